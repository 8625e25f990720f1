"""Both ends of what goes through a door, as streams whose buffers are small: a sandbox can fill those of all of its
connections, and they are the host's memory and not its own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import cast

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
