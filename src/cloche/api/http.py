"""What every dialect needs of HTTP: who asks, how errors are said, bodies with a limit, streams that own their source.

A dialect is pure decoding, pure encoding, and handlers that the `Edge` wraps: whatever they raise becomes an answer in
the dialect's own shape, with the request's id in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloche import errors
from cloche.engine.engine import Engine
from cloche.model import MIB
from cloche.telemetry import log

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[ASGIApp]]  # mostly a Response

MAX_JSON_BYTES = 64 * MIB
IDLE_BODY_SECONDS = 60.0
LAST_WORDS_SECONDS = 1.0
REQUEST_ID = "x-request-id"
CUT_OFF = "cut_off_by_us"  # in a request's state: it was cancelled, as whoever asks may not do so any more
_MAX_REQUEST_ID = 128

_STATUSES: dict[type[errors.ClocheError], int] = {
    errors.InvalidRequest: 400,
    errors.NotCopyable: 409,
    errors.TooLarge: 413,
    errors.Unauthenticated: 401,
    errors.Forbidden: 403,
    errors.NotFound: 404,
    errors.Gone: 410,
    errors.SandboxPaused: 409,
    errors.VolumeConflict: 409,
    errors.FileError: 400,
    errors.FileExists: 409,
    errors.PermissionDenied: 403,
    errors.NoSpace: 507,
    errors.TemplateBuildFailed: 500,
    errors.Unavailable: 503,
    errors.QuotaExceeded: 429,
    errors.UpstreamFailed: 502,
    errors.ProtocolViolation: 502,
}


def status_of(error: errors.ClocheError) -> int:
    """The status that HTTP has for such an error. Dialects with an own opinion map first."""
    return next((_STATUSES[cls] for cls in type(error).__mro__ if cls in _STATUSES), 500)


class Dialect(Protocol):
    """How a protocol says that something of ours went wrong."""

    def render_error(self, error: errors.ClocheError, request: Request) -> Response: ...


class Internal(errors.ClocheError):
    """A fault of ours that nobody foresaw. The log has it, under the request's id."""

    code = "internal_error"


class Edge:
    """The ASGI endpoint of one handler of one dialect. The one place where unforeseen errors are caught."""

    def __init__(self, dialect: Dialect, handler: Handler):
        self._dialect = dialect
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        begun = _Begun(send)
        try:
            response = await self._handler(request)
            await response(scope, receive, begun)
        except asyncio.CancelledError:
            if not scope.get("state", {}).get(CUT_OFF):
                raise
            await self._fail(_cut_off_error(), request, begun)
        except ClientDisconnect:
            log.debug("request.left", request=request_id(request))
        except Reset:
            _cut_off(scope)
        except Dropped:
            pass  # returning with the response unfinished makes the server close the connection
        except errors.ClocheError as error:
            await self._fail(error, request, begun)
        except Exception as error:  # noqa: BLE001 - the dialect's edge
            await self._fail(unforeseen(error, request_id(request)), request, begun)

    async def _fail(self, error: errors.ClocheError, request: Request, begun: _Begun) -> None:
        if begun.begun:
            return  # it is too late for a status: the connection closes unfinished, which no client takes for success
        response = self._dialect.render_error(_sayable(error), request)
        response.headers.setdefault(REQUEST_ID, request_id(request))
        if error.retry_after_seconds is not None:
            response.headers.setdefault("retry-after", str(max(1, math.ceil(error.retry_after_seconds))))
        await response(request.scope, request.receive, begun)


def _cut_off_error() -> errors.Unauthenticated:
    return errors.Unauthenticated("this key is no longer valid: it was revoked, or has expired, while you waited")


def unforeseen(error: Exception, request: str) -> Internal:
    """What a client is told of a fault of ours; the log has the rest."""
    log.error("request.failed", request=request, error=type(error).__name__, where=where_of(error))
    return Internal("a fault of Cloche's: the server's log has this request")


class _Begun:
    """A `send` that remembers whether the response has begun."""

    def __init__(self, send: Send):
        self._send = send
        self.begun = False

    async def __call__(self, message: Mapping[str, object]) -> None:
        self.begun = True
        await self._send(message)  # type: ignore[arg-type]


def _sayable(error: errors.ClocheError) -> errors.ClocheError:
    """The same error. Its message may repeat what a client sent: JSON can hold halves of surrogates, UTF-8 cannot."""
    error.args = tuple(
        each.encode("utf-8", "backslashreplace").decode() if isinstance(each, str) else each for each in error.args
    )
    return error


def where_of(error: BaseException) -> str:
    """File and line of ours where it was raised; never the message, which may hold what a user typed."""
    traceback = error.__traceback__
    where = ""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        where = f"{code.co_filename.rpartition('/')[2]}:{traceback.tb_lineno} {code.co_name}"
        traceback = traceback.tb_next
    return where


def request_id(request: Request) -> str:
    """The client's own id of the request where it sent a sensible one, else one of ours. The same at every call."""
    return request_id_of(request.scope)


def request_id_of(scope: Scope) -> str:
    """As `request_id`, for whoever has no Request."""
    state = scope.setdefault("state", {})
    if "request_id" not in state:
        sent = Headers(scope=scope).get(REQUEST_ID, "")
        usable = 0 < len(sent) <= _MAX_REQUEST_ID and sent.isascii() and sent.isprintable()
        state["request_id"] = sent if usable else "req_" + secrets.token_hex(8)
    return str(state["request_id"])


def strip_prefix(scope: Scope, prefixes: Sequence[str]) -> None:
    """Lets what is behind see the path as if it had the origin to itself. The first that fits is taken off."""
    path: str = scope["path"]
    prefix = next((each for each in prefixes if path == each or path.startswith(each + "/")), "")
    scope["path"], scope["root_path"] = path[len(prefix) :] or "/", ""


def what_is_missing(error: HTTPException, scope: Scope) -> str:
    """What a router means that has no such path, or not with that method."""
    return "there is no such path" if error.status_code == 404 else f"{scope['method']} is not possible there"


async def body_chunks(
    request: Request, max_bytes: int | None = None, *, unbounded: bool = False
) -> AsyncGenerator[bytes, None]:
    """The body as it comes. Raises TooLarge as soon as it is clear, also from a Content-Length.

    It has `max_bytes` at most, and never more than the server allows for any request (`server.upload_bytes`). A client
    that sends nothing for a minute has left. An `unbounded` body has neither limit.
    """
    most: float = math.inf if unbounded else _max_bytes(request, max_bytes)
    claimed = request.headers.get("content-length", "")
    if claimed.isdigit() and int(claimed) > most:
        raise _too_large(most)
    size, more = 0, True
    while more:
        message = await _next_message(request, None if unbounded else IDLE_BODY_SECONDS)
        chunk, more = message.get("body", b""), message.get("more_body", False)
        size += len(chunk)
        if size > most:
            raise _too_large(most)
        if chunk:
            yield chunk


def _max_bytes(request: Request, max_bytes: int | None) -> int:
    most: int = request.scope.get("state", {}).get("max_body_bytes", MAX_JSON_BYTES)
    return most if max_bytes is None else min(max_bytes, most)


async def _next_message(request: Request, seconds: float | None) -> Message:
    """A part of the body, by what it takes least: most bodies are one.

    Raises ClientDisconnect, also after so many seconds: the connection is cut off then.
    """
    try:
        async with asyncio.timeout(seconds):
            message = await request.receive()
    except TimeoutError:
        _cut_off(request.scope)
        raise ClientDisconnect from None
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    return message


async def whole_body(request: Request, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """The whole body. Raises TooLarge."""
    return b"".join([chunk async for chunk in body_chunks(request, max_bytes)])


def _too_large(max_bytes: float) -> errors.TooLarge:
    return errors.TooLarge(f"the request's body is over the limit of {max_bytes:.0f} bytes: send less, or in parts")


def _cut_off(scope: Scope) -> None:
    """Where the server cannot do that, it closes the connection, once it sees the response unfinished."""
    cut_off = scope.get("state", {}).get("cut_off")
    if cut_off is not None:
        cut_off()


class Dropped(Exception):
    """Raised by a stream's source: the connection closes in the middle, so that nobody takes what came for a whole."""


class Reset(Dropped):
    """The same with a TCP reset, for clients that take a connection which merely ends for another kind of failure."""


class Stream(Response):
    """A response whose chunks come from a source that it owns: when the client leaves, the source is closed.

    Starlette's own leaves a generator suspended that waits in `send`. With `at_once` the headers go out before the
    first chunk is there. After `quiet_seconds` without a chunk, `keepalive` is sent.

    What is sent is a sandbox's, and `until` waits for that one's end. A second later the connection is cut off: whoever
    stops reading must not keep what a sandbox had.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        *,
        status_code: int = 200,
        headers: Mapping[str, str] | None = None,
        media_type: str | None = None,
        at_once: bool = False,
        quiet_seconds: float | None = None,
        keepalive: bytes | Callable[[], bytes] = b"",
        until: Callable[[], Awaitable[None]] | None = None,
    ):
        self.status_code = status_code
        self.media_type = media_type
        self.background = None
        self._chunks = chunks
        self._at_once = at_once
        self._quiet_seconds = quiet_seconds
        self._keepalive = keepalive
        self._until = until
        self._begun = False
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_all(send))
        leaving = asyncio.ensure_future(_wait_for_leaving(receive))
        tasks = [sending, leaving]
        if self._until is not None:
            tasks.append(asyncio.ensure_future(_outlive(self._until)))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
            elif not leaving.done():
                raise Reset
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send_all(self, send: Send) -> None:
        async with contextlib.aclosing(self._chunks) as chunks:
            if self._at_once:
                await self._begin(send)
            async for chunk in self._with_keepalives(chunks):
                await self._begin(send)
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await self._begin(send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin(self, send: Send) -> None:
        if not self._begun:
            self._begun = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    async def _with_keepalives(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        if self._quiet_seconds is None:
            async for chunk in chunks:
                yield chunk
            return
        while True:
            coming = asyncio.ensure_future(anext(chunks, None))
            try:
                while not (await asyncio.wait((coming,), timeout=self._quiet_seconds))[0]:
                    yield self._keepalive if isinstance(self._keepalive, bytes) else self._keepalive()
                following = coming.result()
            finally:
                if not coming.done():
                    coming.cancel()
                    await asyncio.wait((coming,))
            if following is None:
                return
            yield following


async def unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives, or raises. When the client leaves, it is cancelled. The body must have been read.

    Raises ClientDisconnect.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_wait_for_leaving(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


def has_left(request: Request) -> bool:
    """Whether the client is gone. The body must have been read.

    Looks whether the server has something to say of it right now, and waits for nothing. Starlette's `is_disconnected`
    begins to wait and cancels that, which takes longer than all else that a handler does.
    """
    saying = request.receive()
    try:
        saying.send(None)  # type: ignore[attr-defined]  # servers give coroutines
    except StopIteration as said:
        return bool(said.value["type"] == "http.disconnect")
    saying.close()  # type: ignore[attr-defined]  # as above
    return False


async def _wait_for_leaving(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _outlive(until: Callable[[], Awaitable[None]]) -> None:
    """Waits, and a little longer, for what is said about that end."""
    await until()
    await asyncio.sleep(LAST_WORDS_SECONDS)


# Making sandboxes for clients that may leave while they wait for a place.


async def while_wanted(request: Request, engine: Engine, making: Coroutine[Any, Any, T]) -> T:
    """What `making` gives. Where it has to wait for a place, it is given up when the client leaves.

    Else the place would be taken by a sandbox whose id nobody ever hears. Where there is room, nobody leaves that fast,
    and nothing is watched. The request's body must have been read. Raises ClientDisconnect, and what `making` does.
    """
    return await (unless_left(request, making) if engine.housing.admission.crowded else making)


# Work that is done for a client that may leave.


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What the work gives. A client that leaves cancels it. The request's body must have been read.

    Raises ClientDisconnect, once the work has ended.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
