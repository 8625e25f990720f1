"""Both ends of what goes through a door, as streams whose buffers are small: a sandbox can fill those of all of its
connections, and they are the host's memory and not its own."""

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


def at_hand(reader: asyncio.StreamReader) -> bytearray:
    """What has come and was not read yet: to look at, until the next `await`.

    Who reads little by little what is there already pays for an `await` each time, and nobody else has a turn.
    """
    return reader._buffer  # type: ignore[attr-defined,no-any-return]  # there is no other way to look before one reads


class Writer(asyncio.StreamWriter):
    """What is written to who has gone is lost, and `drain` says so; what is written after the end is lost, too. By
    themselves the loops' transports raise RuntimeError for either."""

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


class _Receiving(asyncio.BufferedProtocol):
    """Feeds a reader in small portions: by themselves the loops receive 256 KiB at once, whatever its limit is."""

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


async def accepted(connection: socket.socket, made: Callable[[asyncio.Transport], None]) -> Streams:
    """Streams of a connection that was accepted. `made` has its transport even where this is interrupted."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(BUFFER_BYTES)
    protocol = _Receiving(reader, made)
    transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection)
    return reader, Writer(transport, protocol.stream, reader, loop)


async def connected(connection: socket.socket, tls: ssl.SSLContext | None, host: str) -> Streams:
    """Streams of a connection to a server, over TLS if wanted: then it must be that host. Raises OSError."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(BUFFER_BYTES)
    if tls is not None:
        stream = asyncio.StreamReaderProtocol(reader)
        secured, _ = await loop.create_connection(lambda: stream, sock=connection, ssl=tls, server_hostname=host)
        return reader, Writer(secured, stream, reader, loop)
    protocol = _Receiving(reader, lambda _: None)
    transport, _ = await loop.create_connection(lambda: protocol, sock=connection)
    return reader, Writer(transport, protocol.stream, reader, loop)


# Why a program does not get what it asks for at the door, and how that is said to it.

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


# How often something may happen.


class Pace:
    """So often at once, and so often in a second after that."""

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
