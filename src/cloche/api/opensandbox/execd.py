"""execd: code and contexts inside one sandbox. It takes the sandbox's own token only."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from cloche import errors
from cloche.api.dialect import (
    InvalidJson,
    NotSupported,
    decode_json_object,
    dialect_route,
    encode_sse,
    event_stream,
    json_reply,
)
from cloche.api.encoding import ascii_json, to_json_value
from cloche.api.http import MAX_CODE_REQUEST_BYTES, Handler, read_decoded, status_of
from cloche.api.opensandbox.context import OpenSandboxContext, error_reply
from cloche.api.opensandbox.lifecycle_schema import EXECD_PORT
from cloche.api.opensandbox.registry import SandboxState, stored_request_of
from cloche.api.requests import charge_sandbox_owner
from cloche.engine.executions.context import Context
from cloche.engine.executions.execution import Execution
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import AnyEvent, Display, Ended, Output, Raised, Started
from cloche.model import Struct

# execd's wire format: decodes requests, encodes events. Pure.
#
# Responses of `/code` are server-sent events in ASCII: clients split them as `str.splitlines` does. A failed
# program sends one `error` and no `execution_complete`.

_FAILURE_NAMES = {
    "died": "KernelDied",
    "out_of_memory": "OutOfMemory",
    "timed_out": "ExecutionTimedOut",
    "interrupted": "KeyboardInterrupt",
}


class ExecdCodeRequest(Struct):
    code: str
    language: str | None = None
    context: str | None = None


class ExecdContextRequest(Struct):
    language: str
    cwd: str | None = None


def decode_code_request(body: bytes) -> ExecdCodeRequest:
    """Raises InvalidRequest."""
    asked = _decode_object(body)
    if not isinstance(asked.get("code"), str):
        raise errors.InvalidRequest("code: it must be a string")
    where = asked.get("context")
    if where is None:
        where = {}
    if not isinstance(where, dict):
        raise errors.InvalidRequest('context: it must be an object such as {"language": "python"}')
    language, context = _optional_string_field(where, "language"), _optional_string_field(where, "id")
    if language is None and context is None:
        raise errors.InvalidRequest('context: it must say where, as {"language": "python"} or {"id": ".."}')
    return ExecdCodeRequest(code=asked["code"], language=language and language.lower(), context=context)


def decode_context_request(body: bytes) -> ExecdContextRequest:
    """Raises InvalidRequest."""
    asked = _decode_object(body)
    language = _optional_string_field(asked, "language")
    if language is None:
        raise errors.InvalidRequest("language: it is missing; give one such as python")
    return ExecdContextRequest(language=language.lower(), cwd=_optional_string_field(asked, "cwd"))


def _decode_object(body: bytes) -> dict[str, Any]:
    try:
        return decode_json_object(body)
    except InvalidJson as error:
        whole = {"type": "must be a JSON object", "complexity": f"is too complex: {error.problem}"}.get(
            error.flaw, "is not JSON"
        )
        raise errors.InvalidRequest(f"the request's body {whole}") from None


def _optional_string_field(asked: Mapping[str, Any], name: str) -> str | None:
    """A string field; None if it is missing, null or empty."""
    value = asked.get(name)
    if value is not None and not isinstance(value, str):
        raise errors.InvalidRequest(f"{name}: it must be a string")
    return value or None


def encode_context(context: Context) -> dict[str, str]:
    return {"id": context.id, "language": context.language}


class ExecutionFrameEncoder:
    """Encodes events as frames.

    An execution has one error at most, sent at the end, when more is known about it.
    """

    def __init__(self) -> None:
        self._error: dict[str, Any] | None = None

    def encode(self, events: Iterable[AnyEvent], now_ms: int) -> bytes:
        """The frames for these events; empty for events that execd does not have."""
        return b"".join([encode_frame(fields, now_ms) for event in events for fields in self._event_fields(event)])

    def _event_fields(self, event: AnyEvent) -> Iterable[dict[str, Any]]:
        match event:
            case Started(count=count) if count:
                return ({"type": "execution_count", "execution_count": count},)
            case Output():
                return ({"type": event.stream, "text": event.text},)
            case Display(update=False):
                return ({"type": "result", "results": encode_display_results(event)},)
            case Raised():
                self._error = self._error or error_fields(event.name, event.value, event.traceback)
            case Ended():
                return (self._end_fields(event),)
        return ()

    def _end_fields(self, ended: Ended) -> dict[str, Any]:
        found = self._error
        if ended.outcome in _FAILURE_NAMES and (found is None or ended.outcome == "timed_out"):
            return error_fields(_FAILURE_NAMES[ended.outcome], ended.reason or ended.outcome)
        if found is None and ended.exit_code:
            return error_fields("CommandExecError", str(ended.exit_code))
        return found or {"type": "execution_complete", "execution_time": round(ended.usage.wall_seconds * 1000)}


def encode_init_frame(context: str, now_ms: int) -> bytes:
    """The first frame. It names the context, by which a client interrupts."""
    return encode_frame({"type": "init", "text": context}, now_ms)


def encode_ping_frame(now_ms: int) -> bytes:
    return encode_frame({"type": "ping", "text": "pong"}, now_ms)


def encode_frame(fields: Mapping[str, Any], now_ms: int) -> bytes:
    return encode_sse(ascii_json({**fields, "timestamp": now_ms}))


def error_fields(name: str, value: str, traceback: str = "") -> dict[str, Any]:
    said = {"ename": name, "evalue": value, "traceback": traceback.splitlines()}
    return {"type": "error", "error": said}


def encode_display_results(event: Display) -> dict[str, Any]:
    """The display by MIME type, except plain text; bytes in base64."""
    return {"text" if mime == "text/plain" else mime: to_json_value(value) for mime, value in event.data.items()}


SSE_PING_SECONDS = 3.0
EXECD_PATH = f"/sandboxes/{{id}}/proxy/{EXECD_PORT}"


def execd_routes(plane: Execd) -> list[BaseRoute]:
    def route(method: str, path: str, handler: Handler) -> Route:
        return dialect_route(plane, method, EXECD_PATH + path, handler)

    return [
        route("GET", "/ping", plane.answer_ping),
        route("POST", "/code", plane.run),
        route("DELETE", "/code", plane.interrupt),
        route("POST", "/code/context", plane.create_context),
        route("GET", "/code/contexts", plane.list_contexts),
        route("DELETE", "/code/contexts", plane.remove_contexts),
        route("GET", "/code/contexts/{context}", plane.get_context),
        route("DELETE", "/code/contexts/{context}", plane.remove_context),
    ]


class Execd:
    def __init__(self, api: OpenSandboxContext):
        self._api = api

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        if isinstance(error, errors.Unauthenticated):
            said = {"code": "UNAUTHORIZED", "message": str(error), "error": f"Unauthorized: {error}"}
            return json_reply(said, 401)
        status, code = _execd_status_and_code(error)
        return error_reply(status, code, str(error))

    async def answer_ping(self, request: Request) -> Response:
        await self._enter_with_token(request)
        return Response()

    async def run(self, request: Request) -> Response:
        sandbox, state = await self._enter_with_token(request)
        asked = await read_decoded(request, decode_code_request, MAX_CODE_REQUEST_BYTES)
        context = _context_for_request(sandbox, asked)
        state.use(context)
        return event_stream(
            _stream_execution_frames(context.execute(asked.code), context, state),
            at_once=True,
            quiet_seconds=SSE_PING_SECONDS,
            keepalive=lambda: encode_ping_frame(_current_time_ms()),
            until=sandbox.wait_ended,
        )

    async def interrupt(self, request: Request) -> Response:
        sandbox, state = await self._enter_with_token(request)
        state.interrupt(sandbox.context(_require_query_parameter(request, "id")))
        return Response()

    async def create_context(self, request: Request) -> Response:
        sandbox, _ = await self._enter_with_token(request)
        asked = await read_decoded(request, decode_context_request, MAX_CODE_REQUEST_BYTES)
        context = await sandbox.create_context(language=asked.language, cwd=asked.cwd)
        return json_reply(encode_context(context))

    async def list_contexts(self, request: Request) -> Response:
        sandbox, state = await self._enter_with_token(request)
        found = _listed_contexts(sandbox, state, request.query_params.get("language"))
        return json_reply([encode_context(each) for each in found])

    async def get_context(self, request: Request) -> Response:
        sandbox, _ = await self._enter_with_token(request)
        return json_reply(encode_context(sandbox.context(request.path_params["context"])))

    async def remove_context(self, request: Request) -> Response:
        sandbox, state = await self._enter_with_token(request)
        _remove_context(sandbox, state, sandbox.context(request.path_params["context"]))
        return Response()

    async def remove_contexts(self, request: Request) -> Response:
        sandbox, state = await self._enter_with_token(request)
        for context in _listed_contexts(sandbox, state, _require_query_parameter(request, "language")):
            _remove_context(sandbox, state, context)
        return Response()

    async def _enter_with_token(self, request: Request) -> tuple[Sandbox, SandboxState]:
        """The sandbox, by its own execd token. Raises Unauthenticated, SandboxNotFound, Gone."""
        sandbox = await self._api.sandbox_by_token(request, "execd")
        charge_sandbox_owner(request.scope, sandbox)
        if renew_seconds := stored_request_of(sandbox.record.spec.notes).renew_seconds:
            sandbox.extend(renew_seconds)
        return sandbox, self._api.states.of(sandbox.id)


async def _stream_execution_frames(
    execution: Execution, context: Context, state: SandboxState
) -> AsyncGenerator[bytes, None]:
    """The response frames. Closing the generator interrupts the program."""
    frames = ExecutionFrameEncoder()
    state.wait(execution, context)
    try:
        yield encode_init_frame(context.id, _current_time_ms())
        async with execution:
            state.begin(execution)
            while events := await execution.next_events():
                if encoded := frames.encode(events, _current_time_ms()):
                    yield encoded
    except errors.ClocheError as error:  # no kernel could be started: the headers are out, so it is said here
        yield encode_frame(error_fields(type(error).__name__, str(error)), _current_time_ms())
    finally:
        state.leave(execution)


def _context_for_request(sandbox: Sandbox, asked: ExecdCodeRequest) -> Context:
    if asked.context is not None:
        return sandbox.context(asked.context)
    assert asked.language is not None
    return sandbox.default_context(asked.language)


def _listed_contexts(sandbox: Sandbox, state: SandboxState, language: str | None) -> list[Context]:
    found = [each for each in sandbox.contexts if state.lists(each)]
    return [each for each in found if not language or each.language == language.lower()]


def _remove_context(sandbox: Sandbox, state: SandboxState, context: Context) -> None:
    sandbox.remove_context(context.id)
    state.forget(context)


def _require_query_parameter(request: Request, name: str) -> str:
    given = request.query_params.get(name)
    if not given:
        raise MissingQueryParameter(f"missing query parameter {name!r}")
    return given


class MissingQueryParameter(errors.InvalidRequest):
    """A required query parameter is missing."""


def _execd_status_and_code(error: errors.ClocheError) -> tuple[int, str]:
    match error:
        case NotSupported():
            return 501, "NOT_SUPPORTED"
        case errors.ContextNotFound():
            return 404, "CONTEXT_NOT_FOUND"
        case errors.SandboxNotFound() | errors.Gone():
            return 404, "SANDBOX_NOT_FOUND"
        case errors.NotFound():
            return 404, "NOT_FOUND"
        case errors.SandboxPaused():
            return 409, "SANDBOX_PAUSED"
        case MissingQueryParameter():
            return 400, "MISSING_QUERY"
        case errors.InvalidRequest():
            return status_of(error), "INVALID_REQUEST_BODY"
        case errors.QuotaExceeded():
            return 429, "RATE_LIMITED"
        case errors.Busy():
            return 503, "AT_CAPACITY"
    return status_of(error), "RUNTIME_ERROR"


def _current_time_ms() -> int:
    return int(time.time() * 1000)
