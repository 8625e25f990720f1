"""Streams with small buffers for both ends of a connection: a sandbox can fill those of all its
connections, and they are the host's memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import struct
import time
from collections.abc import Callable
from typing import Literal, cast

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

BUFFER_BYTES = 32 << 10  # twice that is read ahead, and so much waits to be written
RECEIVE_BYTES = 32 << 10


def buffered_bytes(reader: asyncio.StreamReader) -> bytearray:
    """The received bytes that were not read yet: to look at, until the next `await`.

    A reader that takes buffered bytes little by little pays for an `await` each time, and no other task has a
    turn.
    """
    return reader._buffer  # type: ignore[attr-defined,no-any-return]  # there is no other way to look before one reads


class LenientWriter(asyncio.StreamWriter):
    """Drops writes after the peer has gone, which `drain` reports, and writes after the end. By themselves the
    loops' transports raise RuntimeError for either.
    """

    _has_ended = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._has_ended and not self.transport.is_closing():
            super().write(data)

    def write_eof(self) -> None:
        if not self._has_ended and not self.transport.is_closing():
            self._has_ended = True
            if self.transport.can_write_eof():  # TLS has no end of one side alone
                with contextlib.suppress(OSError):
                    super().write_eof()


class _BoundedReceiver(asyncio.BufferedProtocol):
    """Feeds a reader in small portions: by themselves the loops receive 256 KiB at once, regardless of its
    limit.
    """

    def __init__(self, reader: asyncio.StreamReader, made: Callable[[asyncio.Transport], None]):
        self.stream = asyncio.StreamReaderProtocol(reader)
        self._made = made
        self._buffer = bytearray(RECEIVE_BYTES)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.stream.data_received(bytes(memoryview(self._buffer)[:nbytes]))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        both_ways = cast(asyncio.Transport, transport)  # uvloop's is one in all but its class
        both_ways.set_write_buffer_limits(BUFFER_BYTES)
        self._made(both_ways)
        self.stream.connection_made(both_ways)

    def eof_received(self) -> bool | None:
        return self.stream.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        self.stream.connection_lost(error)

    def pause_writing(self) -> None:
        self.stream.pause_writing()

    def resume_writing(self) -> None:
        self.stream.resume_writing()


async def accepted_streams(connection: socket.socket, made: Callable[[asyncio.Transport], None]) -> Streams:
    """Streams of a connection that was accepted. `made` has its transport even where this is interrupted."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(BUFFER_BYTES)
    protocol = _BoundedReceiver(reader, made)
    transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection)
    return reader, LenientWriter(transport, protocol.stream, reader, loop)


async def connected_streams(connection: socket.socket, tls: ssl.SSLContext | None, host: str) -> Streams:
    """Streams of a connection to a server, over TLS if wanted: then it must be that host. Raises OSError."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(BUFFER_BYTES)
    if tls is not None:
        stream = asyncio.StreamReaderProtocol(reader)
        secured, _ = await loop.create_connection(lambda: stream, sock=connection, ssl=tls, server_hostname=host)
        return reader, LenientWriter(secured, stream, reader, loop)
    protocol = _BoundedReceiver(reader, lambda _: None)
    transport, _ = await loop.create_connection(lambda: protocol, sock=connection)
    return reader, LenientWriter(transport, protocol.stream, reader, loop)


# The reasons for which the proxy refuses a request, and their encodings in each protocol.

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


class EgressRefusal(Exception):
    """Its text is the reason, for the program and for the log. Of the request it repeats at most the host's
    name.
    """

    status = 403
    verdict: Verdict = "denied"
    socks_code = 2  # not allowed by ruleset
    phrase = ""  # beside the status: programs show nothing else of a proxy's answer to CONNECT
    host = ""  # the requested host, as parsed: added to the phrase


class RequestTooSlow(EgressRefusal):
    """The program took too long to send its request."""

    status, socks_code = 408, 1
    verdict = "failed"


class TransferOverLimit(EgressRefusal):
    """A limit was reached; the text says which."""

    status = 429


RefusalEncoder = Callable[[EgressRefusal], bytes]


def http_refusal(refusal: EgressRefusal) -> bytes:
    names_host = refusal.phrase and _HOST.fullmatch(refusal.host)
    return error_answer(refusal.status, str(refusal), refusal.phrase + (f": {refusal.host}" if names_host else ""))


def error_answer(status: int, why: str, phrase: str = "") -> bytes:
    """A whole answer. Foreign text is in its body only, as plain text."""
    text = f"Cloche: {why}\n".encode("ascii", "backslashreplace")
    head = (
        f"HTTP/1.1 {status} {phrase or _PHRASES[status]}\r\nContent-Type: text/plain\r\nContent-Length: {len(text)}\r\n"
        "X-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + text


def socks_refusal(refusal: EgressRefusal) -> bytes:
    return socks_reply(refusal.socks_code)


def socks_reply(code: int) -> bytes:
    return struct.pack("!BBBB4sH", 5, code, 0, 1, bytes(4), 0)


def old_socks_refusal(_: EgressRefusal) -> bytes:
    return bytes((0, 91, *bytes(6)))


def tls_refusal(_: EgressRefusal) -> bytes:
    """A fatal alert, `unrecognized_name`: TLS libraries report it better than a closed connection."""
    return bytes((21, 3, 3, 0, 2, 2, 112))


def silent_refusal(_: EgressRefusal) -> bytes:
    return b""


# A token bucket.


class TokenBucket:
    """Allows `most` events at once, and `per_second` after that."""

    def __init__(self, most: int, per_second: float):
        self._most, self._per_second = most, per_second
        self._left, self._at = float(most), time.monotonic()

    def take(self) -> bool:
        """Whether it may happen now."""
        now = time.monotonic()
        self._left = min(self._most, self._left + (now - self._at) * self._per_second)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
