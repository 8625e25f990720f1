"""Connect-RPC with the JSON codec and without compression: the subset that E2B's clients use with envd.

A service is a list of routes of handlers made here: `unary_handler`, `server_stream_handler` and
`client_stream_handler` decode a request into a `ConnectMessage`, call, and encode the result. Every exception
of a handler becomes an error of the protocol: by `render_connect_error` before the response has started, and
in the end frame of a stream after that.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar, dataclass_transform

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from cloche import errors
from cloche.api.body_memory import hold_body
from cloche.api.dialect import dialect_route, json_reply
from cloche.api.e2b.context import SANDBOX_AWAY_ERRORS, e2b_sandbox_of
from cloche.api.http import (
    Dialect,
    Handler,
    ResetConnection,
    StreamResponse,
    decode_apart,
    read_body_chunks,
    read_decoded,
)
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.json_text import SMALL_BYTES, JsonMeter, TooComplexJson, parse_json
from cloche.model import MIB

UNARY_TYPE = "application/json"
STREAM_TYPE = "application/connect+json"
MAX_MESSAGE_BYTES = 32 * MIB
QUIET_SECONDS = 90.0  # after which a stream says that it lives, unless its client asks for another time
_LEAST_QUIET_SECONDS = 1.0

_ENVELOPE = struct.Struct(">BI")
_COMPRESSED, _END = 1, 2

STATUSES = {
    "canceled": 499,
    "unknown": 500,
    "invalid_argument": 400,
    "deadline_exceeded": 504,
    "not_found": 404,
    "already_exists": 409,
    "permission_denied": 403,
    "resource_exhausted": 429,
    "failed_precondition": 400,
    "aborted": 409,
    "out_of_range": 400,
    "unimplemented": 501,
    "internal": 500,
    "unavailable": 503,
    "data_loss": 500,
    "unauthenticated": 401,
}
_CODES: dict[type[errors.ClocheError], str] = {
    errors.InvalidRequest: "invalid_argument",
    errors.Unauthenticated: "unauthenticated",
    errors.Forbidden: "permission_denied",
    errors.NotFound: "not_found",
    errors.Gone: "unavailable",
    errors.SandboxPaused: "unavailable",
    errors.FileExists: "already_exists",
    errors.PermissionDenied: "permission_denied",
    errors.IsADirectory: "invalid_argument",
    errors.NotADirectory: "invalid_argument",
    errors.Unavailable: "unavailable",
    errors.Busy: "resource_exhausted",  # clients take `unavailable` for a sandbox that has ended
    errors.QuotaExceeded: "resource_exhausted",
}


class ConnectRpcError(errors.ClocheError):
    """An error with a Connect code that the error tree does not imply. `connect_code` is one of STATUSES."""

    code = "refused"

    def __init__(self, connect_code: str, message: str):
        super().__init__(message)
        self.connect_code = connect_code


@dataclass_transform(frozen_default=True, kw_only_default=True)  # for mypy
class ConnectMessage(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Base of the requests: proto3's JSON, with field names in either case.

    Every field has a default, as in proto3.
    """


M = TypeVar("M", bound=ConnectMessage)
Reply = Mapping[str, Any]


# -- handlers


def service_routes(name: str, dialect: Dialect, methods: Mapping[str, Handler]) -> list[BaseRoute]:
    """The routes of one service, such as `process.Process`."""
    return [dialect_route(dialect, "POST", f"/{name}/{method}", call) for method, call in methods.items()]


def unary_handler(kind: type[M], call: Callable[[Request, M], Awaitable[Reply]]) -> Handler:
    """One message in, one out."""

    async def handle(request: Request) -> Response:
        _check_content_type(request, UNARY_TYPE)
        message = await read_decoded(request, lambda body: decode_message(kind, body), MAX_MESSAGE_BYTES)
        return json_reply(await call(request, message))

    return handle


def server_stream_handler(
    kind: type[M],
    call: Callable[[Request, M], Awaitable[AsyncGenerator[Reply, None]]],
    *,
    keepalive: Reply,
) -> Handler:
    """One message in, many out. An exception of `call`, or of its generator, ends the stream with an error.

    The generator is closed when the client disconnects or its `Connect-Timeout-Ms` has passed. Each step of it
    may run in a task of its own: it must not hold an `asyncio.timeout` or a task group across a `yield`.
    """

    async def handle(request: Request) -> Response:
        _check_content_type(request, STREAM_TYPE)
        ends_at = _call_deadline_of(request)
        message = await _read_only_message(request, kind)
        replies = await call(request, message)
        return StreamResponse(
            _frame_replies(replies, ends_at),
            until=e2b_sandbox_of(request).sandbox.wait_ended,
            media_type=STREAM_TYPE,
            at_once=True,
            quiet_seconds=keepalive_interval_seconds(request),
            keepalive=encode_frame(keepalive),
        )

    return handle


def client_stream_handler(kind: type[M], call: Callable[[Request, AsyncIterator[M]], Awaitable[Reply]]) -> Handler:
    """Many messages in, one out."""

    async def handle(request: Request) -> Response:
        _check_content_type(request, STREAM_TYPE)
        async with contextlib.aclosing(iterate_client_messages(request, kind)) as coming:
            reply = await _call_while_running(e2b_sandbox_of(request).sandbox, call(request, coming))
        return Response(encode_frame(reply) + encode_end_frame(), media_type=STREAM_TYPE)

    return handle


async def _call_while_running(sandbox: Sandbox, call: Awaitable[Reply]) -> Reply:
    """Returns the result of `call`. Raises Gone if the sandbox ends first: a client may be silent for long.

    Also raises Gone if the call failed because the sandbox, with its processes, had ended.
    """
    calling, ending = asyncio.ensure_future(call), asyncio.ensure_future(sandbox.wait_ended())
    try:
        await asyncio.wait((calling, ending), return_when=asyncio.FIRST_COMPLETED)
        if not calling.done() or calling.exception():
            sandbox.check_running()
        return await calling
    finally:
        for task in (calling, ending):
            task.cancel()
        await asyncio.gather(calling, ending, return_exceptions=True)


# -- what comes


def decode_message(kind: type[M], data: bytes) -> M:
    """Decodes a message. Unknown fields are ignored, null means the default. Raises InvalidRequest."""
    try:
        given = parse_json(data or b"{}")
        return msgspec.convert(_rename_to_json_fields(kind, given), kind, strict=False)
    except (msgspec.MsgspecError, UnicodeError, TooComplexJson) as error:
        raise _unreadable_message(error) from None


def _rename_to_json_fields(kind: Any, given: Any) -> Any:
    """Renames proto3's snake_case fields to their JSON names, in messages only: maps have keys of users."""
    if not isinstance(given, dict):
        return given
    named = {}
    for field in msgspec.structs.fields(kind):
        value = given.get(field.encode_name, given.get(field.name))
        if value is not None:
            inner = _message_type(field.type)
            named[field.encode_name] = value if inner is None else _rename_to_json_fields(inner, value)
    return named


def _message_type(kind: Any) -> type[ConnectMessage] | None:
    """The message type of a field, also of an optional one; None for other fields."""
    for each in (kind, *getattr(kind, "__args__", ())):
        if isinstance(each, type) and issubclass(each, ConnectMessage):
            return each
    return None


async def iterate_client_messages(request: Request, kind: type[M]) -> AsyncGenerator[M, None]:
    """The messages of a client's stream, as they arrive.

    Raises InvalidRequest for an invalid or incomplete stream. Only the sandbox's lifetime limits it, not bytes or
    silence: one message at a time is kept in memory.
    """
    async with contextlib.aclosing(_iterate_request_frames(request, unbounded=True)) as frames:
        async for data in frames:
            yield await decode_apart(lambda data: decode_message(kind, data), data)


async def _read_only_message(request: Request, kind: type[M]) -> M:
    only: bytes | None = None
    async with contextlib.aclosing(_iterate_request_frames(request)) as frames:
        async for data in frames:
            if only is not None:
                raise errors.InvalidRequest("this call takes one message, and more came")
            only = data
    if only is None:
        raise errors.InvalidRequest("this call takes one message, and none came")
    return await decode_apart(lambda data: decode_message(kind, data), only)


async def _iterate_request_frames(request: Request, *, unbounded: bool = False) -> AsyncGenerator[bytes, None]:
    buffer, meter = bytearray(), None
    async with contextlib.aclosing(read_body_chunks(request, unbounded=unbounded)) as chunks:
        async for chunk in chunks:
            buffer += chunk
            await hold_body(request.scope["state"], len(buffer))
            while (data := take_frame(buffer)) is not None:
                yield data
                meter = None
            if len(buffer) > SMALL_BYTES:
                meter = _meter_incomplete(meter, buffer, chunk)
    if buffer:
        raise errors.InvalidRequest("the request ended in the middle of a frame: send the whole message")


def _meter_incomplete(meter: JsonMeter | None, buffer: bytearray, chunk: bytes) -> JsonMeter:
    """Measures a long message while it arrives. Raises InvalidRequest for one that is too complex."""
    started = meter or JsonMeter()
    try:
        started.feed(bytes(buffer[_ENVELOPE.size :]) if meter is None else chunk)
    except TooComplexJson as error:
        raise _unreadable_message(error) from None
    return started


def _unreadable_message(error: Exception) -> errors.InvalidRequest:
    return errors.InvalidRequest(f"this is no message that can be read here: {error}")


def take_frame(buffer: bytearray) -> bytes | None:
    """Removes the first frame from `buffer` and returns its message; None if incomplete. Raises InvalidRequest."""
    if len(buffer) < _ENVELOPE.size:
        return None
    flags, size = _ENVELOPE.unpack_from(buffer)
    if flags & _COMPRESSED:
        raise ConnectRpcError("unimplemented", "compressed messages are not understood here: send them as they are")
    if flags:
        raise errors.InvalidRequest(f"a frame of a request cannot have the flags {flags:#04x}: send 0x00")
    if size > MAX_MESSAGE_BYTES:
        raise errors.InvalidRequest(f"a message of {size} bytes is over the limit of {MAX_MESSAGE_BYTES} bytes")
    end = _ENVELOPE.size + size
    if len(buffer) < end:
        return None
    with memoryview(buffer) as whole:
        data = bytes(whole[_ENVELOPE.size : end])
    del buffer[:end]
    return data


def _check_content_type(request: Request, wanted: str) -> None:
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != wanted:
        raise UnsupportedContentType(f"this call takes {wanted}, not {given or 'a body without a type'}")
    encoding = request.headers.get("connect-content-encoding" if wanted == STREAM_TYPE else "content-encoding", "")
    if encoding not in ("", "identity"):
        raise ConnectRpcError("unimplemented", f"the compression {encoding!r} is not understood here: send it as it is")


class UnsupportedContentType(errors.InvalidRequest):
    """A codec or protocol that is not supported."""


def client_timeout_seconds(request: Request) -> float | None:
    """The client's `Connect-Timeout-Ms`; None if it sets none. Raises InvalidRequest."""
    given = request.headers.get("connect-timeout-ms")
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and len(given) <= 10):
        raise errors.InvalidRequest("Connect-Timeout-Ms must be a number of milliseconds of up to ten digits")
    return int(given) / 1000 or None


def keepalive_interval_seconds(request: Request) -> float:
    """The silence after which the client expects a keepalive: its `Keepalive-Ping-Interval`."""
    given = request.headers.get("keepalive-ping-interval", "")
    if not (given.isascii() and given.isdigit() and len(given) <= 6):
        return QUIET_SECONDS
    return max(float(given), _LEAST_QUIET_SECONDS)


def _call_deadline_of(request: Request) -> float | None:
    seconds = client_timeout_seconds(request)
    return None if seconds is None else asyncio.get_running_loop().time() + seconds


# -- what goes


def encode_frame(reply: Reply, flags: int = 0) -> bytes:
    data = msgspec.json.encode(reply)
    return _ENVELOPE.pack(flags, len(data)) + data


def encode_end_frame(error: errors.ClocheError | None = None) -> bytes:
    """The last frame of a stream, with its error if it failed."""
    return encode_frame({} if error is None else {"error": connect_error_body(error)}, _END)


async def _frame_replies(replies: AsyncGenerator[Reply, None], ends_at: float | None) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(replies):
        try:
            while (reply := await _next_reply(replies, ends_at)) is not None:
                yield encode_frame(reply)
            yield encode_end_frame()
        except SANDBOX_AWAY_ERRORS:
            # Clients check whether the sandbox lives when a stream breaks off, and only then.
            raise ResetConnection from None
        except errors.ClocheError as error:
            yield encode_end_frame(error)


async def _next_reply(replies: AsyncGenerator[Reply, None], ends_at: float | None) -> Reply | None:
    try:
        async with asyncio.timeout_at(ends_at):
            return await anext(replies, None)
    except TimeoutError:
        raise ConnectRpcError("deadline_exceeded", "the time that the client gave this call has passed") from None


def connect_code_of(error: errors.ClocheError) -> str:
    """The Connect code of a Cloche error."""
    if isinstance(error, ConnectRpcError):
        return error.connect_code
    return next((_CODES[cls] for cls in type(error).__mro__ if cls in _CODES), "internal")


def connect_error_body(error: errors.ClocheError) -> dict[str, str]:
    # Clients look for "was not found" to tell that a sandbox has ended.
    message = f"The sandbox was not found: {error}" if isinstance(error, SANDBOX_AWAY_ERRORS) else str(error)
    return {"code": connect_code_of(error), "message": message}


def is_stream_request(request: Request) -> bool:
    return request.headers.get("content-type", "").lower().startswith("application/connect+")


def render_connect_error(error: errors.ClocheError, request: Request) -> Response:
    """An error before the response has started, in the format of the call."""
    if isinstance(error, UnsupportedContentType):
        return json_reply(connect_error_body(error), 415, {"accept-post": f"{UNARY_TYPE}, {STREAM_TYPE}"})
    if isinstance(error, SANDBOX_AWAY_ERRORS):
        return json_reply(connect_error_body(error), 502)
    if is_stream_request(request):
        return Response(encode_end_frame(error), media_type=STREAM_TYPE)
    return json_reply(connect_error_body(error), STATUSES[connect_code_of(error)])
