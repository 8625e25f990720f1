"""HTTP/1.1 to one server, without what calls of an upstream do not need: no proxies, redirects, cookies or HTTP/2.

A turn calls its upstream at least twice, and a model that is near answers within a millisecond: httpx2's own work
would be most of that time, and this is a fifth of it. It fails with httpx2's errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncGenerator, Iterator, Mapping

import httpx2

from cloche.gateway.lean_connection import Connection, Patience, raising

__all__ = ["LeanAnswer", "LeanClient", "Patience"]

DECODED_BYTES = 64 * 1024  # at once
GZIPPED = ("gzip", "x-gzip", "deflate")


class LeanClient:
    """A pool of connections to one server. They are used again after an answer that was read to its end."""

    def __init__(
        self,
        base_url: httpx2.URL,
        headers: Mapping[str, str],
        patience: Patience,
        *,
        connections: int,
        idle: int,
        idle_seconds: float,
    ):
        self._host = base_url.raw_host.decode("ascii")
        self._port = base_url.port or (443 if base_url.scheme == "https" else 80)
        self._tls = httpx2.create_ssl_context() if base_url.scheme == "https" else None
        self._prefix = base_url.raw_path.rstrip(b"/")
        self._headers = {"host": base_url.netloc.decode("ascii"), **_lower(headers)}
        self._patience = patience
        self._free = asyncio.Semaphore(connections)
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._most_idle = idle
        self._idle_seconds = idle_seconds
        self._is_closed = False

    @contextlib.asynccontextmanager
    async def post(self, path: str, content: bytes, headers: Mapping[str, str]) -> AsyncGenerator[LeanAnswer, None]:
        """The answer, before its body is read. Leaving the block before its end hangs up. Raises httpx2.HTTPError."""
        lines = _lines({**self._headers, **_lower(headers), "content-length": str(len(content))})
        head = b"POST %s%s HTTP/1.1\r\n" % (self._prefix, path.encode("ascii"))
        request = b"".join((head, lines, b"\r\n", content))
        await self._wait_for_turn()
        try:
            connection = await self._asked(request)
            try:
                yield LeanAnswer(connection)
            finally:
                self._give_back(connection)
        finally:
            self._free.release()

    async def aclose(self) -> None:
        """Also those that are in use: whoever reads there is told that the server broke off."""
        self._is_closed = True
        for connection in (*self._idle, *self._busy):
            connection.close()
        self._idle.clear()

    async def _wait_for_turn(self) -> None:
        if not self._free.locked():
            await self._free.acquire()  # at once
            return
        with raising(httpx2.PoolTimeout):
            async with asyncio.timeout(self._patience.queue):
                await self._free.acquire()

    async def _asked(self, request: bytes) -> Connection:
        """A connection whose answer has begun.

        A connection that was idle may be closed by the server just when it is used, without it having looked at the
        request: then it is sent once more. The server may have seen it after all, so a model may be asked twice; but
        a fresh connection that breaks is not tried again.
        """
        used = self._take()
        if used is not None:
            try:
                return await self._ask(used, request)
            except (httpx2.NetworkError, httpx2.RemoteProtocolError):
                if used.heard or self._is_closed:
                    raise
        return await self._ask(await self._connect(), request)

    async def _ask(self, connection: Connection, request: bytes) -> Connection:
        self._busy.add(connection)
        try:
            await connection.ask(request)
        except BaseException:
            self._drop(connection)
            raise
        return connection

    def _take(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable(self._idle_seconds):
                return connection
            connection.close()
        return None

    async def _connect(self) -> Connection:
        with raising(httpx2.ConnectTimeout, httpx2.ConnectError):
            async with asyncio.timeout(self._patience.connect):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(self._patience), self._host, self._port, ssl=self._tls
                )
        return connection

    def _give_back(self, connection: Connection) -> None:
        if not connection.can_go_on or self._is_closed:
            self._drop(connection)
            return
        self._busy.discard(connection)
        connection.rest()
        self._idle.append(connection)
        while len(self._idle) > self._most_idle or (self._idle and self._idle[0].is_old(self._idle_seconds)):
            self._idle.pop(0).close()  # the one that was used longest ago

    def _drop(self, connection: Connection) -> None:
        self._busy.discard(connection)
        connection.close()


class LeanAnswer:
    """Has what is used of httpx2's Response."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self.status_code = connection.status
        self.headers = connection.headers

    async def aiter_bytes(self) -> AsyncGenerator[bytes, None]:
        """The body as it comes, decoded. Raises httpx2.HTTPError."""
        decoder = self._decoder()
        while (piece := await self._connection.piece()) is not None:
            if decoder is None:
                yield piece
                continue
            for each in _decoded(decoder, piece):
                yield each
            if decoder.eof:
                return  # it would collect what comes after its end
        if decoder is not None and not decoder.eof:
            raise httpx2.DecodingError("compressed, and cut off")

    def _decoder(self) -> zlib._Decompress | None:
        """Raises DecodingError. None should be needed: an answer that is not compressed was asked for."""
        encoding = self.headers.get("content-encoding", "").strip().lower()
        if encoding in ("", "identity"):
            return None
        if encoding not in GZIPPED:
            raise httpx2.DecodingError(f"content-encoding {encoding[:40]!r}")
        return zlib.decompressobj(zlib.MAX_WBITS | 32)  # it finds out which of them it is


def _decoded(decoder: zlib._Decompress, piece: bytes) -> Iterator[bytes]:
    """Little at a time: a small piece can be a large text."""
    try:
        some = decoder.decompress(piece, DECODED_BYTES)
        while some:
            yield some
            some = decoder.decompress(decoder.unconsumed_tail, DECODED_BYTES)
    except zlib.error:
        raise httpx2.DecodingError("compressed, and damaged") from None


def _lower(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def _lines(headers: Mapping[str, str]) -> bytes:
    return b"".join(b"%s: %s\r\n" % (name.encode("ascii"), value.encode("latin-1")) for name, value in headers.items())
