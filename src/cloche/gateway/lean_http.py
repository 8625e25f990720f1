"""A minimal HTTP/1.1 client for one server: no proxies, redirects, cookies or HTTP/2.

A turn calls its upstream at least twice, and a model that is near answers within a millisecond: httpx2's own
work would be most of that time, and this is a fifth of it. It raises httpx2's errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncGenerator, Iterator, Mapping

import httpx2

from cloche.gateway.lean_connection import HttpTimeouts, LeanConnection, translate_errors

__all__ = ["HttpTimeouts", "LeanAnswer", "LeanClient"]

DECODED_BYTES = 64 * 1024  # at once
GZIPPED = ("gzip", "x-gzip", "deflate")


class LeanClient:
    """A pool of connections to one server. They are used again after an answer that was read to its end."""

    def __init__(
        self,
        base_url: httpx2.URL,
        headers: Mapping[str, str],
        patience: HttpTimeouts,
        *,
        connections: int,
        idle: int,
        idle_seconds: float,
    ):
        self._host = base_url.raw_host.decode("ascii")
        self._port = base_url.port or (443 if base_url.scheme == "https" else 80)
        self._tls = httpx2.create_ssl_context() if base_url.scheme == "https" else None
        self._prefix = base_url.raw_path.rstrip(b"/")
        self._headers = {"host": base_url.netloc.decode("ascii"), **_lower_names(headers)}
        self._patience = patience
        self._free = asyncio.Semaphore(connections)
        self._idle: list[LeanConnection] = []
        self._busy: set[LeanConnection] = set()
        self._most_idle = idle
        self._idle_seconds = idle_seconds
        self._is_closed = False

    @contextlib.asynccontextmanager
    async def post(self, path: str, content: bytes, headers: Mapping[str, str]) -> AsyncGenerator[LeanAnswer, None]:
        """The answer, before its body is read. Leaving the block before its end hangs up. Raises httpx2.HTTPError."""
        lines = _encode_headers({**self._headers, **_lower_names(headers), "content-length": str(len(content))})
        head = b"POST %s%s HTTP/1.1\r\n" % (self._prefix, path.encode("ascii"))
        request = b"".join((head, lines, b"\r\n", content))
        await self._wait_for_turn()
        try:
            connection = await self._send_request(request)
            try:
                yield LeanAnswer(connection)
            finally:
                self._return_connection(connection)
        finally:
            self._free.release()

    async def aclose(self) -> None:
        """Closes all connections, also those in use: their readers get the error that the server broke off."""
        self._is_closed = True
        for connection in (*self._idle, *self._busy):
            connection.close()
        self._idle.clear()

    async def _wait_for_turn(self) -> None:
        if not self._free.locked():
            await self._free.acquire()  # at once
            return
        with translate_errors(httpx2.PoolTimeout):
            async with asyncio.timeout(self._patience.queue):
                await self._free.acquire()

    async def _send_request(self, request: bytes) -> LeanConnection:
        """Sends the request and returns its connection, after the answer has begun.

        A connection that was idle may be closed by the server just when it is used, without it having looked at the
        request: then it is sent once more. The server may have seen it after all, so a model may be asked twice; but
        a fresh connection that breaks is not tried again.
        """
        used = self._take_idle()
        if used is not None:
            try:
                return await self._ask_connection(used, request)
            except (httpx2.NetworkError, httpx2.RemoteProtocolError):
                if used.heard or self._is_closed:
                    raise
        return await self._ask_connection(await self._open_connection(), request)

    async def _ask_connection(self, connection: LeanConnection, request: bytes) -> LeanConnection:
        self._busy.add(connection)
        try:
            await connection.ask(request)
        except BaseException:
            self._drop_connection(connection)
            raise
        return connection

    def _take_idle(self) -> LeanConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable(self._idle_seconds):
                return connection
            connection.close()
        return None

    async def _open_connection(self) -> LeanConnection:
        with translate_errors(httpx2.ConnectTimeout, httpx2.ConnectError):
            async with asyncio.timeout(self._patience.connect):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: LeanConnection(self._patience), self._host, self._port, ssl=self._tls
                )
        return connection

    def _return_connection(self, connection: LeanConnection) -> None:
        if not connection.can_go_on or self._is_closed:
            self._drop_connection(connection)
            return
        self._busy.discard(connection)
        connection.rest()
        self._idle.append(connection)
        while len(self._idle) > self._most_idle or (self._idle and self._idle[0].is_old(self._idle_seconds)):
            self._idle.pop(0).close()  # the one that was used longest ago

    def _drop_connection(self, connection: LeanConnection) -> None:
        self._busy.discard(connection)
        connection.close()


class LeanAnswer:
    """The subset of httpx2's Response that is used."""

    def __init__(self, connection: LeanConnection):
        self._connection = connection
        self.status_code = connection.status
        self.headers = connection.headers

    async def aiter_bytes(self) -> AsyncGenerator[bytes, None]:
        """The body as it comes, decoded. Raises httpx2.HTTPError."""
        decoder = self._new_decoder()
        while (piece := await self._connection.piece()) is not None:
            if decoder is None:
                yield piece
                continue
            for each in _decompress_piece(decoder, piece):
                yield each
            if decoder.eof:
                return  # it would collect what comes after its end
        if decoder is not None and not decoder.eof:
            raise httpx2.DecodingError("compressed, and cut off")

    def _new_decoder(self) -> zlib._Decompress | None:
        """Raises DecodingError. None should be needed: an answer that is not compressed was asked for."""
        encoding = self.headers.get("content-encoding", "").strip().lower()
        if encoding in ("", "identity"):
            return None
        if encoding not in GZIPPED:
            raise httpx2.DecodingError(f"content-encoding {encoding[:40]!r}")
        return zlib.decompressobj(zlib.MAX_WBITS | 32)  # it finds out which of them it is


def _decompress_piece(decoder: zlib._Decompress, piece: bytes) -> Iterator[bytes]:
    """Little at a time: a small piece can be a large text."""
    try:
        some = decoder.decompress(piece, DECODED_BYTES)
        while some:
            yield some
            some = decoder.decompress(decoder.unconsumed_tail, DECODED_BYTES)
    except zlib.error:
        raise httpx2.DecodingError("compressed, and damaged") from None


def _lower_names(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def _encode_headers(headers: Mapping[str, str]) -> bytes:
    return b"".join(b"%s: %s\r\n" % (name.encode("ascii"), value.encode("latin-1")) for name, value in headers.items())
