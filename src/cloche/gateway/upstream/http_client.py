"""The HTTP/1.1 client for one upstream: no proxies, redirects, cookies or HTTP/2. It raises httpx2's errors.

A turn calls its upstream at least twice, and a model that is near answers within a millisecond. Measured in turns in
one run, a turn costs 7 to 9 % more with aiohttp's client and 32 % more with httpx2's. Data that arrives without a
request ends its connection: it must never become the answer to another request.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import time
import zlib
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import cast

import httptools
import httpx2

from cloche.model import Struct

WRITE_BYTES = 64 * 1024  # at once, of a request
MAX_UNREAD_BYTES = 256 * 1024  # of a body that is not read yet; then the server has to wait
MAX_HEAD_BYTES = 64 * 1024  # of a head, of trailers, and of everything else without body data
DECODE_BYTES = 64 * 1024  # at once
ZLIB_ENCODINGS = ("gzip", "x-gzip", "deflate")


class HttpTimeouts(Struct):
    """Timeouts in seconds."""

    connect: float
    read: float  # without a byte
    write: float  # without a piece of the request being taken
    queue: float  # for a free connection


class HttpClient:
    """A pool of connections to one server. A connection is reused after a response that was read to its end."""

    def __init__(
        self,
        base_url: httpx2.URL,
        headers: Mapping[str, str],
        timeouts: HttpTimeouts,
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
        self._timeouts = timeouts
        self._slots = asyncio.Semaphore(connections)
        self._idle: list[ClientConnection] = []
        self._busy: set[ClientConnection] = set()
        self._max_idle = idle
        self._idle_seconds = idle_seconds
        self._is_closed = False

    @contextlib.asynccontextmanager
    async def post(self, path: str, content: bytes, headers: Mapping[str, str]) -> AsyncGenerator[ClientResponse, None]:
        """Yields the response before its body is read. Leaving earlier hangs up. Raises httpx2.HTTPError."""
        lines = _encode_headers({**self._headers, **_lower_names(headers), "content-length": str(len(content))})
        head = b"POST %s%s HTTP/1.1\r\n" % (self._prefix, path.encode("ascii"))
        request = b"".join((head, lines, b"\r\n", content))
        await self._acquire_slot()
        try:
            connection = await self._send_request(request)
            try:
                yield ClientResponse(connection)
            finally:
                self._return_connection(connection)
        finally:
            self._slots.release()

    async def aclose(self) -> None:
        """Closes all connections, also those in use: their readers get the error that the server broke off."""
        self._is_closed = True
        for connection in (*self._idle, *self._busy):
            connection.close()
        self._idle.clear()

    async def _acquire_slot(self) -> None:
        if not self._slots.locked():
            await self._slots.acquire()  # at once
            return
        with _translate_errors(httpx2.PoolTimeout):
            async with asyncio.timeout(self._timeouts.queue):
                await self._slots.acquire()

    async def _send_request(self, request: bytes) -> ClientConnection:
        """Sends the request and returns its connection, after the response has begun.

        A connection that was idle may be closed by the server just when it is used, before it reads
        the request: then the request is sent once more. The server may have read it after all, so a model may be called
        twice; a request over a fresh connection is not sent again.
        """
        used = self._take_idle()
        if used is not None:
            try:
                return await self._send_over(used, request)
            except (httpx2.NetworkError, httpx2.RemoteProtocolError):
                if used.has_response_data or self._is_closed:
                    raise
        return await self._send_over(await self._open_connection(), request)

    async def _send_over(self, connection: ClientConnection, request: bytes) -> ClientConnection:
        self._busy.add(connection)
        try:
            await connection.send(request)
        except BaseException:
            self._drop_connection(connection)
            raise
        return connection

    def _take_idle(self) -> ClientConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable(self._idle_seconds):
                return connection
            connection.close()
        return None

    async def _open_connection(self) -> ClientConnection:
        with _translate_errors(httpx2.ConnectTimeout, httpx2.ConnectError):
            async with asyncio.timeout(self._timeouts.connect):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: ClientConnection(self._timeouts), self._host, self._port, ssl=self._tls
                )
        return connection

    def _return_connection(self, connection: ClientConnection) -> None:
        if not connection.is_reusable or self._is_closed:
            self._drop_connection(connection)
            return
        self._busy.discard(connection)
        connection.mark_idle()
        self._idle.append(connection)
        while len(self._idle) > self._max_idle or (self._idle and self._idle[0].is_old(self._idle_seconds)):
            self._idle.pop(0).close()  # the one that was used longest ago

    def _drop_connection(self, connection: ClientConnection) -> None:
        self._busy.discard(connection)
        connection.close()


class ClientResponse:
    """The subset of httpx2's Response that is used."""

    def __init__(self, connection: ClientConnection):
        self._connection = connection
        self.status_code = connection.status
        self.headers = connection.headers

    async def aiter_bytes(self) -> AsyncGenerator[bytes, None]:
        """Yields the body as it arrives, decoded. Raises httpx2.HTTPError."""
        decoder = self._new_decoder()
        while (piece := await self._connection.read_piece()) is not None:
            if decoder is None:
                yield piece
                continue
            for each in _decompress_piece(decoder, piece):
                yield each
            if decoder.eof:
                return  # it would collect data after its end
        if decoder is not None and not decoder.eof:
            raise httpx2.DecodingError("compressed, and cut off")

    def _new_decoder(self) -> zlib._Decompress | None:
        """None for a plain body, the only kind that was requested. Raises DecodingError."""
        encoding = self.headers.get("content-encoding", "").strip().lower()
        if encoding in ("", "identity"):
            return None
        if encoding not in ZLIB_ENCODINGS:
            raise httpx2.DecodingError(f"content-encoding {encoding[:40]!r}")
        return zlib.decompressobj(zlib.MAX_WBITS | 32)  # it finds out which of them it is


def _decompress_piece(decoder: zlib._Decompress, piece: bytes) -> Iterator[bytes]:
    """Little at a time: a small piece can be a large text."""
    try:
        some = decoder.decompress(piece, DECODE_BYTES)
        while some:
            yield some
            some = decoder.decompress(decoder.unconsumed_tail, DECODE_BYTES)
    except zlib.error:
        raise httpx2.DecodingError("compressed, and damaged") from None


class ClientConnection(asyncio.Protocol):
    """A connection: `send`, then `read_piece` until it returns None, then `is_reusable`.

    The transport and the parser call its other methods: data is parsed at once, and waits here in pieces.
    """

    def __init__(self, timeouts: HttpTimeouts):
        self._timeouts = timeouts
        self._transport: asyncio.Transport  # from the moment that it is connected
        self._waiter: asyncio.Future[None] | None = None  # of a task that waits to read or to write
        self._awaits_response = False
        self._is_write_paused = False  # the transport takes no more of the request for now
        self._is_read_paused = False  # the server has to wait
        self._error: httpx2.HTTPError | None = None
        self._idle_since = 0.0
        self._begin_response()

    def _begin_response(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.headers: dict[str, str] = {}
        self._pieces: list[bytes] = []
        self._unread = 0  # bytes in them
        self._bytes_without_body = 0  # since the last body data
        self._head_size = 0  # bytes of names and values in it
        self.has_response_data = False  # whether any byte of a response arrived
        self._has_head = self._is_complete = self._is_delimited = self._keeps_alive = self._is_sent = False

    # -- called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._awaits_response or self._is_complete:
            self._end_connection(httpx2.RemoteProtocolError("the server sent data without a request"))
            return
        self.has_response_data = True
        self._bytes_without_body += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._keeps_alive = False
            if not self._is_complete:  # data after a response does not damage it
                self._end_connection(httpx2.RemoteProtocolError(f"no HTTP: {type(error).__name__}"))
        if max(self._bytes_without_body, self._head_size) > MAX_HEAD_BYTES:
            self._end_connection(httpx2.RemoteProtocolError("the head of the answer is too long"))
        elif self._unread > MAX_UNREAD_BYTES:
            self._pause_reading()
        self._wake_waiter()

    def eof_received(self) -> None:
        if self._awaits_response and self._has_head and not self._is_delimited:
            self._is_complete = True  # a response without a length ends so
        self._end_connection(httpx2.RemoteProtocolError("the server broke off"))

    def connection_lost(self, exc: Exception | None) -> None:
        error = httpx2.ReadError(type(exc).__name__) if exc else httpx2.RemoteProtocolError("the server broke off")
        error.__cause__ = exc
        self._end_connection(error)

    def pause_writing(self) -> None:
        self._is_write_paused = True

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self._wake_waiter()

    # -- called by the parser

    def on_message_begin(self) -> None:
        if not self._is_complete:
            self.headers = {}  # after an interim response the final one begins
        self._keeps_alive = False  # after a second response to one request, none can be attributed

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # trailers are of no use here
            self._head_size += len(name) + len(value) + 4
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._is_complete:
            return
        self.status = self._parser.get_status_code()
        self._has_head = self.status >= 200
        self._is_delimited = "content-length" in self.headers or "transfer-encoding" in self.headers
        if self._has_head:
            self._bytes_without_body = 0

    def on_body(self, piece: bytes) -> None:
        if not self._is_complete:
            self._pieces.append(piece)
            self._unread += len(piece)
            self._bytes_without_body = 0

    def on_message_complete(self) -> None:
        if self._has_head and not self._is_complete:
            self._is_complete = True
            self._keeps_alive = self._is_delimited and self._parser.should_keep_alive()  # it knows only now

    # -- called by the client

    @property
    def is_reusable(self) -> bool:
        """Whether the response was read to its end, and another can follow."""
        is_over = self._is_complete and self._is_sent and not self._is_write_paused and not self._pieces
        return is_over and self._keeps_alive and self._error is None

    def mark_idle(self) -> None:
        self._awaits_response = False
        self._idle_since = time.monotonic()

    def is_usable(self, idle_seconds: float) -> bool:
        """Whether a request may be sent: not after the server sent anything, or closed its side."""
        return not self.is_old(idle_seconds) and not self._has_unread()

    def is_old(self, idle_seconds: float) -> bool:
        return self._error is not None or time.monotonic() - self._idle_since > idle_seconds

    def _has_unread(self) -> bool:
        """Whether there is data that the event loop has not read yet."""
        socket = self._transport.get_extra_info("socket")
        if socket is None or socket.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(socket.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    async def send(self, request: bytes) -> None:
        """Returns when the head of the response is there. Raises httpx2.HTTPError."""
        self._begin_response()
        self._awaits_response = True
        await self._send_request(request)
        while not self._has_head:
            self._raise_error()
            await self._wait_for_change(self._timeouts.read, httpx2.ReadTimeout)

    async def read_piece(self) -> bytes | None:
        """Returns more of the body; None at its end. Raises httpx2.HTTPError."""
        while not self._pieces:
            if self._is_complete:
                return None
            self._raise_error()
            await self._wait_for_change(self._timeouts.read, httpx2.ReadTimeout)
        whole = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._unread = 0
        self._resume_reading()
        return whole

    def close(self) -> None:
        self._end_connection(httpx2.RemoteProtocolError("the connection was closed"))

    # -- inside

    async def _send_request(self, request: bytes) -> None:
        for at in range(0, len(request), WRITE_BYTES):
            while self._is_write_paused and self._error is None and not self._is_refused:
                await self._wait_for_change(self._timeouts.write, httpx2.WriteTimeout)
            if self._is_refused:
                return  # a server that refuses may not read on
            self._raise_error()
            self._transport.write(request[at : at + WRITE_BYTES])
        self._is_sent = True

    @property
    def _is_refused(self) -> bool:
        return self._has_head and self.status >= 400

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    async def _wait_for_change(self, seconds: float, late: type[httpx2.TimeoutException]) -> None:
        """Waits until data arrives, the transport takes data, or the connection breaks."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(seconds):
                await self._waiter
        except TimeoutError:
            raise late("it took too long") from None
        finally:
            self._waiter = None

    def _wake_waiter(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _pause_reading(self) -> None:
        if not self._is_read_paused and not self._transport.is_closing():
            self._transport.pause_reading()
            self._is_read_paused = True

    def _resume_reading(self) -> None:
        if self._is_read_paused and not self._transport.is_closing():
            self._transport.resume_reading()
            self._is_read_paused = False

    def _end_connection(self, error: httpx2.HTTPError) -> None:
        """Ends the connection. The first reason counts. Data that has arrived can still be read."""
        if self._error is not None:
            return
        self._error = error
        self._transport.abort()
        self._wake_waiter()


@contextlib.contextmanager
def _translate_errors(
    late: type[httpx2.HTTPError], broken: type[httpx2.HTTPError] = httpx2.NetworkError
) -> Iterator[None]:
    """Translates errors to httpx2's. Some addresses cannot even be tried: their errors are no OSError."""
    try:
        yield
    except TimeoutError as error:
        raise late("it took too long") from error
    except (OSError, ValueError, OverflowError) as error:
        raise broken(type(error).__name__) from error


def _lower_names(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def _encode_headers(headers: Mapping[str, str]) -> bytes:
    return b"".join(b"%s: %s\r\n" % (name.encode("ascii"), value.encode("latin-1")) for name, value in headers.items())
