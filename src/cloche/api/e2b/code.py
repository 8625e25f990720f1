"""The code server (port 49999): executions as lines of JSON, and contexts.

Who may ask was checked before a request comes here: see access.py.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from weakref import WeakSet

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from cloche import errors
from cloche.api.e2b import code_wire
from cloche.api.e2b.replies import AWAY, json_reply
from cloche.api.e2b.residents import Residents, away_reply
from cloche.api.http import Dropped, Edge, Handler, Stream, status_of, whole_body
from cloche.config import Config
from cloche.engine.executions.context import LANGUAGES, Context
from cloche.engine.executions.execution import Execution
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import Showing

QUIET_SECONDS = 5.0
SHOWING = Showing(json=True, whole_text=True, whole_data=True, saved_images=True)
LISTED_FROM_THE_START = ("javascript",)  # beside Python's


def routes(residents: Residents, config: Config) -> list[BaseRoute]:
    plane = Code()

    def route(path: str, method: str, handler: Handler) -> Route:
        return Route(path, Edge(plane, handler), methods=[method])

    return [
        route("/health", "GET", plane.health),
        route("/execute", "POST", plane.execute),
        route("/contexts", "GET", plane.list_contexts),
        route("/contexts", "POST", plane.create_context),
        route("/contexts/{id}/restart", "POST", plane.restart_context),
        route("/contexts/{id}", "DELETE", plane.remove_context),
    ]


class ContextFailed(errors.ClocheError):
    """No context could be made. E2B has one status for it, whatever the reason."""

    def __init__(self, reason: errors.ClocheError):
        super().__init__(f"Failed to create context: {reason}")


class Code:
    def __init__(self) -> None:
        self._opened: WeakSet[Sandbox] = WeakSet()

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        if isinstance(error, code_wire.Unprocessable):
            return json_reply({"detail": error.detail}, 422)
        if isinstance(error, AWAY):
            return away_reply(error, request)
        return PlainTextResponse(str(error), status_of(error))

    async def health(self, request: Request) -> Response:
        return json_reply("OK")

    async def execute(self, request: Request) -> Response:
        sandbox = self._sandbox(request)
        asked = code_wire.decode_execute(await whole_body(request))
        context = _context_for(sandbox, asked)
        execution = context.execute(asked.code, env=asked.env_vars, until_deadline=True, showing=SHOWING)
        return Stream(
            _lines(execution, sandbox),
            at_once=True,
            quiet_seconds=QUIET_SECONDS,
            keepalive=code_wire.KEEPALIVE,
            until=sandbox.wait_ended,
        )

    async def list_contexts(self, request: Request) -> Response:
        return json_reply([code_wire.encode_context(each) for each in self._sandbox(request).contexts])

    async def create_context(self, request: Request) -> Response:
        sandbox = self._sandbox(request)
        asked = code_wire.decode_context(await whole_body(request))
        try:
            context = await sandbox.create_context(language=asked.language, cwd=asked.cwd)
        except (errors.InvalidRequest, errors.FileError, errors.Unavailable) as error:
            raise ContextFailed(error) from error
        return json_reply(code_wire.encode_context(context))

    async def restart_context(self, request: Request) -> Response:
        await _context(self._sandbox(request), request.path_params["id"]).restart()
        return json_reply(None)

    async def remove_context(self, request: Request) -> Response:
        sandbox = self._sandbox(request)
        sandbox.remove_context(_context(sandbox, request.path_params["id"]).id)
        return json_reply(None)

    def _sandbox(self, request: Request) -> Sandbox:
        sandbox: Sandbox = request.scope["state"]["resident"].sandbox
        if sandbox not in self._opened:
            self._opened.add(sandbox)
            for language in LISTED_FROM_THE_START:
                if language in LANGUAGES:
                    sandbox.default_context(language)
        return sandbox


def _context_for(sandbox: Sandbox, asked: code_wire.ExecuteRequest) -> Context:
    if asked.context_id is not None:
        return _context(sandbox, asked.context_id)
    try:
        return sandbox.default_context(asked.language or code_wire.DEFAULT_LANGUAGE)
    except errors.InvalidRequest as error:
        raise ContextFailed(error) from error


def _context(sandbox: Sandbox, id: str) -> Context:
    try:
        return sandbox.context(id)
    except errors.ContextNotFound:
        raise errors.ContextNotFound(f"Context {id} not found") from None


async def _lines(execution: Execution, sandbox: Sandbox) -> AsyncGenerator[bytes, None]:
    """Closing it interrupts the program. Raises Dropped if the sandbox ends meanwhile."""
    lines = code_wire.Lines()
    try:
        async with execution:
            while events := await execution.next_events():
                if execution.ended is not None and execution.ended.reason == (sandbox.ending or ""):
                    raise Dropped
                if encoded := lines.encode(events, datetime.now(UTC).isoformat()):
                    yield encoded
    except AWAY:
        raise Dropped from None
    except errors.ClocheError as error:  # no kernel could be started: the headers are out, so it is said here
        yield code_wire.line(code_wire.error(type(error).__name__, str(error))) + code_wire.END
