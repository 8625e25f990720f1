"""execd: code and contexts inside one sandbox. It opens with the sandbox's own token, and with nothing else."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from cloche import errors
from cloche.api.auth import same
from cloche.api.encoding import ascii_json
from cloche.api.http import Edge, Handler, Stream, status_of, whole_body
from cloche.api.opensandbox.lifecycle_schema import EXECD_PORT, TOKEN_HEADER
from cloche.api.opensandbox.registry import Known, KnownSandboxes, asked_of
from cloche.api.opensandbox.replies import NotOffered, error_reply, json_reply
from cloche.api.requests import bill
from cloche.engine.engine import Engine
from cloche.engine.executions.context import Context
from cloche.engine.executions.execution import Execution
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import AnyEvent, Display, Ended, Output, Raised, Started
from cloche.model import Struct

# execd's bytes: requests decoded, events encoded. Pure.
#
# Answers of `/code` are server-sent events, in ASCII: clients split them where `str.splitlines` does. A program that
# fails says so with one `error` and no `execution_complete`.

_FAILURES = {
    "died": "KernelDied",
    "out_of_memory": "OutOfMemory",
    "timed_out": "ExecutionTimedOut",
    "interrupted": "KeyboardInterrupt",
}


class CodeRequest(Struct):
    code: str
    language: str | None = None
    context: str | None = None


class ContextRequest(Struct):
    language: str
    cwd: str | None = None


def decode_code(body: bytes) -> CodeRequest:
    """Raises InvalidRequest."""
    asked = _object(body)
    if not isinstance(asked.get("code"), str):
        raise errors.InvalidRequest("code: it must be a string")
    where = asked.get("context")
    if where is None:
        where = {}
    if not isinstance(where, dict):
        raise errors.InvalidRequest('context: it must be an object such as {"language": "python"}')
    language, context = _text(where, "language"), _text(where, "id")
    if language is None and context is None:
        raise errors.InvalidRequest('context: it must say where, as {"language": "python"} or {"id": ".."}')
    return CodeRequest(code=asked["code"], language=language and language.lower(), context=context)


def decode_context(body: bytes) -> ContextRequest:
    """Raises InvalidRequest."""
    asked = _object(body)
    language = _text(asked, "language")
    if language is None:
        raise errors.InvalidRequest("language: it is missing; give one such as python")
    return ContextRequest(language=language.lower(), cwd=_text(asked, "cwd"))


def _object(body: bytes) -> dict[str, Any]:
    try:
        asked = json.loads(body)  # Python's own: lone surrogates in code are the program's affair
    except (ValueError, RecursionError):
        raise errors.InvalidRequest("the request's body is not JSON") from None
    if not isinstance(asked, dict):
        raise errors.InvalidRequest("the request's body must be a JSON object")
    return asked


def _text(asked: Mapping[str, Any], name: str) -> str | None:
    """None for what is missing, null or empty."""
    value = asked.get(name)
    if value is not None and not isinstance(value, str):
        raise errors.InvalidRequest(f"{name}: it must be a string")
    return value or None


def encode_context(context: Context) -> dict[str, str]:
    return {"id": context.id, "language": context.language}


class Frames:
    """Events as frames. An execution has one error at most: it waits for the end, which may know more of it."""

    def __init__(self) -> None:
        self._error: dict[str, Any] | None = None

    def encode(self, events: Iterable[AnyEvent], now_ms: int) -> bytes:
        """What these events are on the wire; nothing for those that execd does not know."""
        return b"".join([frame(fields, now_ms) for event in events for fields in self._fields(event)])

    def _fields(self, event: AnyEvent) -> Iterable[dict[str, Any]]:
        match event:
            case Started(count=count) if count:
                return ({"type": "execution_count", "execution_count": count},)
            case Output():
                return ({"type": event.stream, "text": event.text},)
            case Display(update=False):
                return ({"type": "result", "results": results(event)},)
            case Raised():
                self._error = self._error or error_fields(event.name, event.value, event.traceback)
            case Ended():
                return (self._end(event),)
        return ()

    def _end(self, ended: Ended) -> dict[str, Any]:
        found = self._error
        if ended.outcome in _FAILURES and (found is None or ended.outcome == "timed_out"):
            return error_fields(_FAILURES[ended.outcome], ended.reason or ended.outcome)
        if found is None and ended.exit_code:
            return error_fields("CommandExecError", str(ended.exit_code))
        return found or {"type": "execution_complete", "execution_time": round(ended.usage.wall_seconds * 1000)}


def init(context: str, now_ms: int) -> bytes:
    """The first frame. What it names is what can be interrupted."""
    return frame({"type": "init", "text": context}, now_ms)


def ping(now_ms: int) -> bytes:
    return frame({"type": "ping", "text": "pong"}, now_ms)


def frame(fields: Mapping[str, Any], now_ms: int) -> bytes:
    return b"data: " + ascii_json({**fields, "timestamp": now_ms}) + b"\n\n"


def error_fields(name: str, value: str, traceback: str = "") -> dict[str, Any]:
    said = {"ename": name, "evalue": value, "traceback": traceback.splitlines()}
    return {"type": "error", "error": said}


def results(event: Display) -> dict[str, Any]:
    """By MIME type, but for plain text; bytes in base 64."""
    return {"text" if mime == "text/plain" else mime: _plain(value) for mime, value in event.data.items()}


def _plain(value: Any) -> Any:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


PING_SECONDS = 3.0
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # else a proxy in front keeps events to itself
BASE = f"/sandboxes/{{id}}/proxy/{EXECD_PORT}"


def routes(plane: Execd) -> list[BaseRoute]:
    def route(method: str, path: str, handler: Handler) -> Route:
        return Route(BASE + path, Edge(plane, handler), methods=[method])

    return [
        route("GET", "/ping", plane.ping),
        route("POST", "/code", plane.run),
        route("DELETE", "/code", plane.interrupt),
        route("POST", "/code/context", plane.create_context),
        route("GET", "/code/contexts", plane.list_contexts),
        route("DELETE", "/code/contexts", plane.remove_contexts),
        route("GET", "/code/contexts/{context}", plane.get_context),
        route("DELETE", "/code/contexts/{context}", plane.remove_context),
    ]


class Execd:
    def __init__(self, engine: Engine, known: KnownSandboxes):
        self._engine = engine
        self._known = known

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        if isinstance(error, errors.Unauthenticated):
            said = {"code": "UNAUTHORIZED", "message": str(error), "error": f"Unauthorized: {error}"}
            return json_reply(said, 401)
        status, code = _named(error)
        return error_reply(status, code, str(error))

    async def ping(self, request: Request) -> Response:
        await self._enter(request)
        return Response()

    async def run(self, request: Request) -> Response:
        sandbox, known = await self._enter(request)
        asked = decode_code(await whole_body(request))
        context = _context_for(sandbox, asked)
        known.use(context)
        return Stream(
            _frames(context.execute(asked.code), context, known),
            media_type="text/event-stream",
            headers=HEADERS,
            at_once=True,
            quiet_seconds=PING_SECONDS,
            keepalive=lambda: ping(_now_ms()),
            until=sandbox.wait_ended,
        )

    async def interrupt(self, request: Request) -> Response:
        sandbox, known = await self._enter(request)
        known.interrupt(sandbox.context(_query(request, "id")))
        return Response()

    async def create_context(self, request: Request) -> Response:
        sandbox, _ = await self._enter(request)
        asked = decode_context(await whole_body(request))
        context = await sandbox.create_context(language=asked.language, cwd=asked.cwd)
        return json_reply(encode_context(context))

    async def list_contexts(self, request: Request) -> Response:
        sandbox, known = await self._enter(request)
        found = _contexts(sandbox, known, request.query_params.get("language"))
        return json_reply([encode_context(each) for each in found])

    async def get_context(self, request: Request) -> Response:
        sandbox, _ = await self._enter(request)
        return json_reply(encode_context(sandbox.context(request.path_params["context"])))

    async def remove_context(self, request: Request) -> Response:
        sandbox, known = await self._enter(request)
        _remove(sandbox, known, sandbox.context(request.path_params["context"]))
        return Response()

    async def remove_contexts(self, request: Request) -> Response:
        sandbox, known = await self._enter(request)
        for context in _contexts(sandbox, known, _query(request, "language")):
            _remove(sandbox, known, context)
        return Response()

    async def _enter(self, request: Request) -> tuple[Sandbox, Known]:
        """Whose token it is was said when it was given. Raises Unauthenticated, SandboxNotFound, Gone."""
        id = request.path_params["id"]
        if not same(request.headers.get(TOKEN_HEADER), self._known.token(id)):
            raise errors.Unauthenticated(
                f"{TOKEN_HEADER} is missing or wrong: GET /sandboxes/ID/endpoints/{EXECD_PORT} has it in `headers`"
            )
        sandbox = await self._engine.find(id)
        bill(request.scope, sandbox)
        if renew_seconds := asked_of(sandbox.record.notes).renew_seconds:
            sandbox.extend(renew_seconds)
        return sandbox, self._known.of(id)


async def _frames(execution: Execution, context: Context, known: Known) -> AsyncGenerator[bytes, None]:
    """Closing it interrupts the program."""
    frames = Frames()
    known.wait(execution, context)
    try:
        yield init(context.id, _now_ms())
        async with execution:
            known.begin(execution)
            while events := await execution.next_events():
                if encoded := frames.encode(events, _now_ms()):
                    yield encoded
    except errors.ClocheError as error:  # no kernel could be started: the headers are out, so it is said here
        yield frame(error_fields(type(error).__name__, str(error)), _now_ms())
    finally:
        known.leave(execution)


def _context_for(sandbox: Sandbox, asked: CodeRequest) -> Context:
    if asked.context is not None:
        return sandbox.context(asked.context)
    assert asked.language is not None
    return sandbox.default_context(asked.language)


def _contexts(sandbox: Sandbox, known: Known, language: str | None) -> list[Context]:
    found = [each for each in sandbox.contexts if known.lists(each)]
    return [each for each in found if not language or each.language == language.lower()]


def _remove(sandbox: Sandbox, known: Known, context: Context) -> None:
    sandbox.remove_context(context.id)
    known.forget(context)


def _query(request: Request, name: str) -> str:
    given = request.query_params.get(name)
    if not given:
        raise MissingQuery(f"missing query parameter {name!r}")
    return given


class MissingQuery(errors.InvalidRequest):
    """A parameter that the path's query must have."""


def _named(error: errors.ClocheError) -> tuple[int, str]:
    match error:
        case NotOffered():
            return 501, "NOT_SUPPORTED"
        case errors.ContextNotFound():
            return 404, "CONTEXT_NOT_FOUND"
        case errors.SandboxNotFound() | errors.Gone():
            return 404, "SANDBOX_NOT_FOUND"
        case errors.NotFound():
            return 404, "NOT_FOUND"
        case errors.SandboxPaused():
            return 409, "SANDBOX_PAUSED"
        case MissingQuery():
            return 400, "MISSING_QUERY"
        case errors.InvalidRequest():
            return status_of(error), "INVALID_REQUEST_BODY"
        case errors.QuotaExceeded():
            return 429, "RATE_LIMITED"
        case errors.Busy():
            return 503, "AT_CAPACITY"
    return status_of(error), "RUNTIME_ERROR"


def _now_ms() -> int:
    return int(time.time() * 1000)
