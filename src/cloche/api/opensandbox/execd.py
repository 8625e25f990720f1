"""execd: code and contexts inside one sandbox. It opens with the sandbox's own token, and with nothing else."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from cloche import errors
from cloche.api.auth import same
from cloche.api.http import Edge, Handler, Stream, status_of, whole_body
from cloche.api.opensandbox import execd_wire as wire
from cloche.api.opensandbox.known import Known, KnownSandboxes, asked_of
from cloche.api.opensandbox.lifecycle_replies import EXECD_PORT, TOKEN_HEADER
from cloche.api.opensandbox.replies import NotOffered, error_reply, json_reply
from cloche.api.requests import bill
from cloche.engine.engine import Engine
from cloche.engine.executions.context import Context
from cloche.engine.executions.execution import Execution
from cloche.engine.sandboxes.sandbox import Sandbox

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
        asked = wire.decode_code(await whole_body(request))
        context = _context_for(sandbox, asked)
        known.use(context)
        return Stream(
            _frames(context.execute(asked.code), context, known),
            media_type="text/event-stream",
            headers=HEADERS,
            at_once=True,
            quiet_seconds=PING_SECONDS,
            keepalive=lambda: wire.ping(_now_ms()),
            until=sandbox.wait_ended,
        )

    async def interrupt(self, request: Request) -> Response:
        sandbox, known = await self._enter(request)
        known.interrupt(sandbox.context(_query(request, "id")))
        return Response()

    async def create_context(self, request: Request) -> Response:
        sandbox, _ = await self._enter(request)
        asked = wire.decode_context(await whole_body(request))
        context = await sandbox.create_context(language=asked.language, cwd=asked.cwd)
        return json_reply(wire.encode_context(context))

    async def list_contexts(self, request: Request) -> Response:
        sandbox, known = await self._enter(request)
        found = _contexts(sandbox, known, request.query_params.get("language"))
        return json_reply([wire.encode_context(each) for each in found])

    async def get_context(self, request: Request) -> Response:
        sandbox, _ = await self._enter(request)
        return json_reply(wire.encode_context(sandbox.context(request.path_params["context"])))

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
    frames = wire.Frames()
    known.wait(execution, context)
    try:
        yield wire.init(context.id, _now_ms())
        async with execution:
            known.begin(execution)
            while events := await execution.next_events():
                if encoded := frames.encode(events, _now_ms()):
                    yield encoded
    except errors.ClocheError as error:  # no kernel could be started: the headers are out, so it is said here
        yield wire.frame(wire.error(type(error).__name__, str(error)), _now_ms())
    finally:
        known.leave(execution)


def _context_for(sandbox: Sandbox, asked: wire.CodeRequest) -> Context:
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
