"""Why a program does not get what it asks for at the door, and how that is said to it."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Literal

Verdict = Literal["allowed", "denied", "failed"]

_PHRASES = {
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    417: "Expectation Failed",
    429: "Too Many Requests",
    501: "Not Implemented",
    502: "Bad Gateway",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}


_HOST = re.compile(r"[a-z0-9._:-]{1,253}")


class Refusal(Exception):
    """Its text says why, for the program and for the log. It never repeats more than a host's name of what was said."""

    status = 403
    verdict: Verdict = "denied"
    socks_code = 2  # not allowed by ruleset
    phrase = ""  # beside the status: of what a proxy answers to CONNECT, programs show nothing else
    host = ""  # that was asked for, as it was understood: added to the phrase


class TooSlow(Refusal):
    """It took too long to say what it wants."""

    status, socks_code = 408, 1
    verdict = "failed"


class OverLimit(Refusal):
    """Its text says over which."""

    status = 429


Say = Callable[[Refusal], bytes]


def in_http(refusal: Refusal) -> bytes:
    names_host = refusal.phrase and _HOST.fullmatch(refusal.host)
    return answer(refusal.status, str(refusal), refusal.phrase + (f": {refusal.host}" if names_host else ""))


def answer(status: int, why: str, phrase: str = "") -> bytes:
    """A whole answer. What was said by others is in its body only, and there as plain text."""
    text = f"Cloche: {why}\n".encode("ascii", "backslashreplace")
    head = (
        f"HTTP/1.1 {status} {phrase or _PHRASES[status]}\r\nContent-Type: text/plain\r\nContent-Length: {len(text)}\r\n"
        "X-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + text


def in_socks(refusal: Refusal) -> bytes:
    return socks_reply(refusal.socks_code)


def socks_reply(code: int) -> bytes:
    return struct.pack("!BBBB4sH", 5, code, 0, 1, bytes(4), 0)


def in_old_socks(_: Refusal) -> bytes:
    return bytes((0, 91, *bytes(6)))


def in_tls(_: Refusal) -> bytes:
    """A fatal alert, `unrecognized_name`: what libraries show is better than a connection that ends."""
    return bytes((21, 3, 3, 0, 2, 2, 112))


def in_silence(_: Refusal) -> bytes:
    return b""
