"""One connection of `lean_http`: a request, its answer, and then perhaps another request.

Data that arrives without a request ends the connection: it must never become the answer to another request.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import time
from collections.abc import Iterator
from typing import cast

import httptools
import httpx2

from cloche.model import Struct

WRITTEN_BYTES = 64 * 1024  # at once, of a request
WAITING_BYTES = 256 * 1024  # of a body that nobody has read yet; then the server has to wait
MAX_HEAD_BYTES = 64 * 1024  # of a head, of trailers, and of whatever else brings nothing of a body


class HttpTimeouts(Struct):
    """Timeouts in seconds."""

    connect: float
    read: float  # without a byte
    write: float  # without a piece of the request being taken
    queue: float  # for a free connection


class LeanConnection(asyncio.Protocol):
    """A connection: `ask`, then `piece` until it returns None; `can_go_on` tells whether it can be reused.

    The transport and the parser call it: data is parsed at once, and waits here in pieces.
    """

    def __init__(self, patience: HttpTimeouts):
        self._patience = patience
        self._transport: asyncio.Transport  # from the moment that it is connected
        self._waiter: asyncio.Future[None] | None = None  # of whoever waits for something to come, or to be taken
        self._is_asked = False
        self._is_full = False  # the transport takes no more of the request for now
        self._is_held = False  # the server has to wait
        self._broken: httpx2.HTTPError | None = None
        self.rested_at = 0.0
        self._begin_answer()

    def _begin_answer(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.headers: dict[str, str] = {}
        self._pieces: list[bytes] = []
        self._waiting = 0  # bytes in them
        self._barren = 0  # bytes since the last that were of use
        self._head_size = 0  # bytes in it that say something
        self.heard = False  # whether anything of an answer came
        self._has_head = self._over = self._has_end = self._lasts = self._is_sent = False

    # -- what the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._is_asked or self._over:
            self._end_connection(httpx2.RemoteProtocolError("the server spoke without being asked"))
            return
        self.heard = True
        self._barren += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._lasts = False
            if not self._over:  # what follows an answer takes nothing from it
                self._end_connection(httpx2.RemoteProtocolError(f"no HTTP: {type(error).__name__}"))
        if max(self._barren, self._head_size) > MAX_HEAD_BYTES:
            self._end_connection(httpx2.RemoteProtocolError("the head of the answer is too long"))
        elif self._waiting > WAITING_BYTES:
            self._pause_server()
        self._wake_waiter()

    def eof_received(self) -> None:
        if self._is_asked and self._has_head and not self._has_end:
            self._over = True  # an answer without a length ends so
        self._end_connection(httpx2.RemoteProtocolError("the server broke off"))

    def connection_lost(self, exc: Exception | None) -> None:
        error = httpx2.ReadError(type(exc).__name__) if exc else httpx2.RemoteProtocolError("the server broke off")
        error.__cause__ = exc
        self._end_connection(error)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._wake_waiter()

    # -- what the parser calls

    def on_message_begin(self) -> None:
        if not self._over:
            self.headers = {}  # after an interim answer the real one begins
        self._lasts = False  # a second answer to one request: whose is the third?

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # trailers are of no use here
            self._head_size += len(name) + len(value) + 4
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._over:
            return
        self.status = self._parser.get_status_code()
        self._has_head = self.status >= 200
        self._has_end = "content-length" in self.headers or "transfer-encoding" in self.headers
        if self._has_head:
            self._barren = 0

    def on_body(self, piece: bytes) -> None:
        if not self._over:
            self._pieces.append(piece)
            self._waiting += len(piece)
            self._barren = 0

    def on_message_complete(self) -> None:
        if self._has_head and not self._over:
            self._over = True
            self._lasts = self._has_end and self._parser.should_keep_alive()  # it knows only now

    # -- what the client calls

    @property
    def can_go_on(self) -> bool:
        """Whether the answer was read to its end, and another can follow."""
        is_over = self._over and self._is_sent and not self._is_full and not self._pieces
        return is_over and self._lasts and self._broken is None

    def rest(self) -> None:
        self._is_asked = False
        self.rested_at = time.monotonic()

    def is_usable(self, idle_seconds: float) -> bool:
        """Whether a request may be sent: not after the server has said anything, not even good-bye."""
        return not self.is_old(idle_seconds) and not self._has_unread()

    def is_old(self, idle_seconds: float) -> bool:
        return self._broken is not None or time.monotonic() - self.rested_at > idle_seconds

    def _has_unread(self) -> bool:
        """Whether there is something that the loop has not got round to."""
        socket = self._transport.get_extra_info("socket")
        if socket is None or socket.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(socket.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    async def ask(self, request: bytes) -> None:
        """Returns when the head of the answer is there. Raises httpx2.HTTPError."""
        self._begin_answer()
        self._is_asked = True
        await self._send_request(request)
        while not self._has_head:
            self._check_broken()
            await self._wait_for_news(self._patience.read, httpx2.ReadTimeout)

    async def piece(self) -> bytes | None:
        """More of the body; None at its end. Raises httpx2.HTTPError."""
        while not self._pieces:
            if self._over:
                return None
            self._check_broken()
            await self._wait_for_news(self._patience.read, httpx2.ReadTimeout)
        whole = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._waiting = 0
        self._resume_server()
        return whole

    def close(self) -> None:
        self._end_connection(httpx2.RemoteProtocolError("the connection was closed"))

    # -- inside

    async def _send_request(self, request: bytes) -> None:
        for at in range(0, len(request), WRITTEN_BYTES):
            while self._is_full and self._broken is None and not self._is_refused:
                await self._wait_for_news(self._patience.write, httpx2.WriteTimeout)
            if self._is_refused:
                return  # a server that says no may not read on
            self._check_broken()
            self._transport.write(request[at : at + WRITTEN_BYTES])
        self._is_sent = True

    @property
    def _is_refused(self) -> bool:
        return self._has_head and self.status >= 400

    def _check_broken(self) -> None:
        if self._broken is not None:
            raise self._broken

    async def _wait_for_news(self, seconds: float, late: type[httpx2.TimeoutException]) -> None:
        """Until something came, was taken or broke."""
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

    def _pause_server(self) -> None:
        if not self._is_held and not self._transport.is_closing():
            self._transport.pause_reading()
            self._is_held = True

    def _resume_server(self) -> None:
        if self._is_held and not self._transport.is_closing():
            self._transport.resume_reading()
            self._is_held = False

    def _end_connection(self, error: httpx2.HTTPError) -> None:
        """Ends the connection. The first reason counts. Data that has arrived can still be read."""
        if self._broken is not None:
            return
        self._broken = error
        self._transport.abort()
        self._wake_waiter()


@contextlib.contextmanager
def translate_errors(
    late: type[httpx2.HTTPError], broken: type[httpx2.HTTPError] = httpx2.NetworkError
) -> Iterator[None]:
    """Translates errors to httpx2's. Some addresses cannot even be tried: their errors are no OSError."""
    try:
        yield
    except TimeoutError as error:
        raise late("it took too long") from error
    except (OSError, ValueError, OverflowError) as error:
        raise broken(type(error).__name__) from error
