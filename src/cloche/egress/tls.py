"""TLS that ends here: a program's connection, as the plain text in it.

Over memory, and not by the event loop's own upgrade of a transport: what the program has said already was read from
that transport, and both loops that we run on would lose it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from types import TracebackType

from cloche.egress.streams import BUFFER_BYTES


class TlsEnd:
    """After `handshake`, use as `async with`: then `reader` has the plain text.

    `first` is what was read of the connection already.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, context: ssl.SSLContext, first: bytes = b""
    ):
        self.reader = asyncio.StreamReader(BUFFER_BYTES)
        self.reader.set_transport(self)  # type: ignore[arg-type]  # of which it needs the two methods below
        self._reader = reader
        self._writer = writer
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._incoming.write(first)
        self._room = asyncio.Event()
        self._room.set()
        self._decrypting: asyncio.Task[None] | None = None

    async def handshake(self) -> None:
        """Raises ssl.SSLError, OSError."""
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                await self._flush()
                await self._receive()
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    await self._flush()  # the alert
                raise
        await self._flush()

    async def __aenter__(self) -> TlsEnd:
        self._decrypting = asyncio.create_task(self._decrypt())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._decrypting is not None:
            self._decrypting.cancel()
            await asyncio.wait([self._decrypting])  # somebody else may want to read what is left
        if error is None:
            with contextlib.suppress(ssl.SSLError):  # the other side's word of leave is not waited for
                self._tls.unwrap()
            with contextlib.suppress(OSError):
                await self._flush()

    async def write(self, content: bytes) -> None:
        """Returns when there is room for more. Raises OSError."""
        left = memoryview(content)
        while left:  # it may take one record at a time
            left = left[self._tls.write(left) :]
        await self._flush()

    # -- what a StreamReader needs of its transport

    def pause_reading(self) -> None:
        self._room.clear()

    def resume_reading(self) -> None:
        self._room.set()

    # -- inside

    async def _flush(self) -> None:
        if self._writer.is_closing():
            raise ConnectionResetError("the program has gone")
        if self._outgoing.pending:
            self._writer.write(self._outgoing.read())
            await self._writer.drain()

    async def _receive(self) -> None:
        part = await self._reader.read(BUFFER_BYTES)
        if part:
            self._incoming.write(part)
        else:
            self._incoming.write_eof()

    async def _decrypt(self) -> None:
        try:
            while plain := await self._plain():
                self.reader.feed_data(plain)
                await self._room.wait()
        except OSError:  # of which ssl.SSLError is one: what came is not from who began
            pass
        self.reader.feed_eof()

    async def _plain(self) -> bytes:
        while True:
            try:
                return self._tls.read(BUFFER_BYTES)
            except ssl.SSLWantReadError:
                await self._flush()
                await self._receive()
            except ssl.SSLZeroReturnError:
                return b""
