"""HTTP basics of every dialect: error responses, bodies with a limit, streams that own their source.

A dialect is pure decoding, pure encoding, and handlers that `DialectEndpoint` wraps: every exception of a
handler becomes a response in the dialect's own format, with the request's id in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import math
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloche import errors
from cloche.api.body_memory import hold_body
from cloche.engine.engine import Engine
from cloche.json_text import SMALL_BYTES, JsonMeter, TooComplexJson
from cloche.model import MIB
from cloche.telemetry import log

T = TypeVar("T")
S = TypeVar("S", bytes, str)
Handler = Callable[[Request], Awaitable[ASGIApp]]  # mostly a Response

MAX_JSON_BYTES = 64 * MIB
MAX_CODE_REQUEST_BYTES = 16 * MIB  # of a request that runs code, where the code has a bound of its own
MAX_INLINE_BYTES = MIB  # of a text that is decoded on the event loop
MAX_DECODING_THREADS = 2
IDLE_BODY_SECONDS = 60.0
END_GRACE_SECONDS = 1.0
REQUEST_ID_HEADER = "x-request-id"
CUT_OFF_STATE = "cut_off_by_us"  # in a request's state: it was cancelled, as its key or session has ended
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
    """The default HTTP status of an error. Dialects with different statuses map first."""
    return next((_STATUSES[cls] for cls in type(error).__mro__ if cls in _STATUSES), 500)


class Dialect(Protocol):
    """The error format of a protocol."""

    def render_error(self, error: errors.ClocheError, request: Request) -> Response: ...


class InternalError(errors.ClocheError):
    """An unexpected fault of the server. The log has it, under the request's id."""

    code = "internal_error"


class DialectEndpoint:
    """The ASGI endpoint of one handler of one dialect. The only place that catches unexpected errors."""

    def __init__(self, dialect: Dialect, handler: Handler):
        self._dialect = dialect
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        begun = _StartTrackingSend(send)
        try:
            response = await self._handler(request)
            await response(scope, receive, begun)
        except asyncio.CancelledError:
            if not scope.get("state", {}).get(CUT_OFF_STATE):
                raise
            await self._send_error_response(_cut_off_error(), request, begun)
        except ClientDisconnect:
            log.debug("request.left", request=request_id(request))
        except ResetConnection:
            _reset_connection(scope)
        except DropConnection:
            pass  # returning with the response unfinished makes the server close the connection
        except errors.ClocheError as error:
            await self._send_error_response(error, request, begun)
        except Exception as error:  # noqa: BLE001 - the dialect's edge
            await self._send_error_response(log_internal_error(error, request_id(request)), request, begun)

    async def _send_error_response(
        self, error: errors.ClocheError, request: Request, begun: _StartTrackingSend
    ) -> None:
        if begun.begun:
            return  # it is too late for a status: the connection closes unfinished, which no client takes for success
        response = self._dialect.render_error(_escape_surrogates(error), request)
        response.headers.setdefault(REQUEST_ID_HEADER, request_id(request))
        if error.retry_after_seconds is not None:
            response.headers.setdefault("retry-after", str(max(1, math.ceil(error.retry_after_seconds))))
        await response(request.scope, request.receive, begun)


def _cut_off_error() -> errors.Unauthenticated:
    return errors.Unauthenticated("this key is no longer valid: it was revoked, or has expired, while you waited")


def internal_error(request: str) -> InternalError:
    """The error for the client, with the request's id."""
    return InternalError(f"internal error; the server log has request id {request}")


def log_internal_error(error: Exception, request: str) -> InternalError:
    """Logs an unexpected error and returns the error for the client, without details."""
    log.error("request.failed", request=request, error=type(error).__name__, where=raise_location_of(error))
    return internal_error(request)


class _StartTrackingSend:
    """A `send` that records whether the response has started."""

    def __init__(self, send: Send):
        self._send = send
        self.begun = False

    async def __call__(self, message: Mapping[str, object]) -> None:
        self.begun = True
        await self._send(message)  # type: ignore[arg-type]


def _escape_surrogates(error: errors.ClocheError) -> errors.ClocheError:
    """The same error, with lone surrogates escaped: a client's JSON may contain them, UTF-8 cannot encode them."""
    error.args = tuple(
        each.encode("utf-8", "backslashreplace").decode() if isinstance(each, str) else each for each in error.args
    )
    return error


def raise_location_of(error: BaseException) -> str:
    """File and line of the raise; never the message, which may contain user input."""
    traceback = error.__traceback__
    where = ""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        where = f"{code.co_filename.rpartition('/')[2]}:{traceback.tb_lineno} {code.co_name}"
        traceback = traceback.tb_next
    return where


def request_id(request: Request) -> str:
    """The client's own request id if it is valid, else a generated one. The same at every call."""
    return request_id_of(request.scope)


def request_id_of(scope: Scope) -> str:
    """As `request_id`, for callers without a Request."""
    state = scope.setdefault("state", {})
    if "request_id" not in state:
        sent = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        usable = 0 < len(sent) <= _MAX_REQUEST_ID and sent.isascii() and sent.isprintable()
        state["request_id"] = sent if usable else "req_" + secrets.token_hex(8)
    return str(state["request_id"])


def strip_prefix(scope: Scope, prefixes: Sequence[str]) -> None:
    """Removes the first matching prefix from the path, so that the routes behind see only their own paths."""
    path: str = scope["path"]
    prefix = next((each for each in prefixes if path == each or path.startswith(each + "/")), "")
    scope["path"], scope["root_path"] = path[len(prefix) :] or "/", ""


async def read_body_chunks(
    request: Request, max_bytes: int | None = None, *, unbounded: bool = False
) -> AsyncGenerator[bytes, None]:
    """The body as it arrives. Raises TooLarge as early as possible, also from a Content-Length.

    It has `max_bytes` at most, and never more than the server allows for any request (`server.upload_bytes`). A
    client that sends nothing for a minute counts as disconnected. An `unbounded` body has neither limit.
    """
    most: float = math.inf if unbounded else _body_limit_bytes(request, max_bytes)
    claimed = request.headers.get("content-length", "")
    if claimed.isdigit() and int(claimed) > most:
        raise _body_too_large(most)
    size, more = 0, True
    while more:
        message = await _next_message(request, None if unbounded else IDLE_BODY_SECONDS)
        chunk, more = message.get("body", b""), message.get("more_body", False)
        size += len(chunk)
        if size > most:
            raise _body_too_large(most)
        if chunk:
            yield chunk


def _body_limit_bytes(request: Request, max_bytes: int | None) -> int:
    most: int = request.scope.get("state", {}).get("max_body_bytes", MAX_JSON_BYTES)
    return most if max_bytes is None else min(max_bytes, most)


async def _next_message(request: Request, seconds: float | None) -> Message:
    """The next part of the body, with the least overhead: most bodies have one part.

    Raises ClientDisconnect, also after `seconds` without a part: then the connection is reset.
    """
    try:
        async with asyncio.timeout(seconds):
            message = await request.receive()
    except TimeoutError:
        _reset_connection(request.scope)
        raise ClientDisconnect from None
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    return message


async def read_whole_body(request: Request, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """The whole body, which is no JSON, or none that is kept. Raises TooLarge."""
    return b"".join([chunk async for chunk in read_body_chunks(request, max_bytes)])


async def read_decoded(request: Request, decode: Callable[[bytes], T], max_bytes: int = MAX_JSON_BYTES) -> T:
    """The body's JSON, as `decode` reads it. Raises TooLarge, Busy, and everything that `decode` raises.

    Every decoder checks the text by `check_json`. One that this refuses is not read to its end.
    """
    return await decode_apart(decode, await collect_json(_held_chunks(request, max_bytes)))


async def _held_chunks(request: Request, max_bytes: int) -> AsyncGenerator[bytes, None]:
    """The chunks of a body that is held whole: all such bodies together have a bound."""
    size = 0
    async with contextlib.aclosing(read_body_chunks(request, max_bytes)) as chunks:
        async for chunk in chunks:
            size += len(chunk)
            await hold_body(request.scope.setdefault("state", {}), size)
            yield chunk


async def collect_json(chunks: AsyncGenerator[bytes, None]) -> bytes:
    """The whole text; one that is too complex ends where that shows, for its decoder to refuse it in its own words."""
    text, meter, metered = io.BytesIO(), JsonMeter(), 0
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            text.write(chunk)
            if text.tell() <= SMALL_BYTES:
                continue
            try:
                meter.feed(chunk if metered else text.getvalue())
            except TooComplexJson:
                break
            metered = text.tell()
    return text.getvalue()


async def decode_apart(decode: Callable[[S], T], text: S) -> T:
    """Decodes a large text in a thread, of which there are few: the event loop has its turns meanwhile."""
    if len(text) <= MAX_INLINE_BYTES:
        return decode(text)
    return await asyncio.get_running_loop().run_in_executor(_decoding_threads(), decode, text)


@functools.cache
def _decoding_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MAX_DECODING_THREADS, "json")


def _body_too_large(max_bytes: float) -> errors.TooLarge:
    return errors.TooLarge(f"the request's body is over the limit of {max_bytes:.0f} bytes: send less, or in parts")


def _reset_connection(scope: Scope) -> None:
    """Resets the connection. A server without that ability closes it when the response stays unfinished."""
    cut_off = scope.get("state", {}).get("cut_off")
    if cut_off is not None:
        cut_off()


class DropConnection(Exception):
    """Raised by a stream's source to close the connection, so that a partial response does not look whole."""


class ResetConnection(DropConnection):
    """As DropConnection, with a TCP reset, for clients that read a plain close as another kind of failure."""


class StreamResponse(Response):
    """A response that owns the source of its chunks: when the client disconnects, the source is closed.

    Starlette's own leaves a generator suspended that waits in `send`. With `at_once` the headers are sent before
    the first chunk exists. After `quiet_seconds` without a chunk, `keepalive` is sent.

    The content belongs to a sandbox, and `until` waits for that sandbox's end. A second later the connection is
    reset: a client that stops reading must not keep data of an ended sandbox alive.
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
        with contextlib.suppress(ClientDisconnect):
            await _run_while_connected(receive, self._send_all_chunks(send), self._until)

    async def _send_all_chunks(self, send: Send) -> None:
        async with contextlib.aclosing(self._chunks) as chunks:
            if self._at_once:
                await self._send_start_once(send)
            async for chunk in self._with_keepalives(chunks):
                await self._send_start_once(send)
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await self._send_start_once(send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_start_once(self, send: Send) -> None:
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


async def run_unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`, or raises its error. A disconnect of the client cancels it.

    The request's body must have been read. Raises ClientDisconnect, once the work has ended.
    """
    return await _run_while_connected(request.receive, work)


async def _run_while_connected(
    receive: Receive, work: Coroutine[Any, Any, T], until: Callable[[], Awaitable[None]] | None = None
) -> T:
    """As `run_unless_disconnected`. Raises ResetConnection when `until`, and a grace period after it, are over."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(wait_for_disconnect(receive))
    watching = [leaving] if until is None else [leaving, asyncio.ensure_future(_wait_with_grace(until))]
    try:
        await asyncio.wait((working, *watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect if leaving.done() else ResetConnection
    finally:
        for task in watching:
            task.cancel()
        if not working.done():
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)


def has_client_disconnected(request: Request) -> bool:
    """Whether the client has disconnected. The body must have been read.

    Polls the server once, without waiting. Starlette's `is_disconnected` starts a wait and cancels it, which
    takes longer than the rest of a handler.
    """
    receiving = request.receive()
    try:
        receiving.send(None)  # type: ignore[attr-defined]  # servers give coroutines
    except StopIteration as stopped:
        return bool(stopped.value["type"] == "http.disconnect")
    receiving.close()  # type: ignore[attr-defined]  # as above
    return False


async def wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client has disconnected. Messages that come before are dropped."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _wait_with_grace(until: Callable[[], Awaitable[None]]) -> None:
    """Waits for the sandbox's end, plus a grace period for the events that report it."""
    await until()
    await asyncio.sleep(END_GRACE_SECONDS)


async def create_unless_disconnected(request: Request, engine: Engine, making: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `making`. If it has to wait for capacity, a disconnect of the client cancels it.

    Otherwise the slot would go to a sandbox with an id that no client ever receives. With free capacity creation
    is too fast for that, and the connection is not watched. The request's body must have been read. Raises
    ClientDisconnect, and everything that `making` raises.
    """
    return await (run_unless_disconnected(request, making) if engine.cell_supply.admission.crowded else making)
