"""LibreChat's code API as one ASGI application."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from cloche.api.auth import Gatekeeper
from cloche.api.http import describe_missing_route, strip_prefix
from cloche.api.librechat import exec, files, tool_calls
from cloche.api.librechat.context import LibreChatContext
from cloche.api.librechat.exec import ProgramRunner
from cloche.api.librechat.replies import json_reply
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.store.gateway import GatewayStore

LIBRECHAT_PREFIXES = ("/librechat/v1", "/librechat")


class LibreChatApi:
    """Serves requests under `/librechat/v1`, and under `/librechat` for clients configured without `/v1`."""

    def __init__(self, engine: Engine, shelf: GatewayStore, gatekeeper: Gatekeeper, config: Config, secret: bytes):
        api = LibreChatContext(engine, shelf, gatekeeper, config, secret)
        workshop = ProgramRunner(api)
        routes = [
            api.route("GET", "/health", _health_reply),
            *exec.execution_routes(api, workshop),
            *tool_calls.programmatic_routes(api, workshop),
            *files.file_routes(api),
        ]
        self._router = Router(routes, redirect_slashes=False)  # clients do not follow redirections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000, "reason": "there is no WebSocket here"})
            return
        strip_prefix(scope, LIBRECHAT_PREFIXES)
        scope["app"] = self  # makes the router raise what it would else answer in its own words
        try:
            await self._router(scope, receive, send)
        except HTTPException as error:
            await _missing_reply(error, scope)(scope, receive, send)


async def _health_reply(request: Request) -> Response:
    """Liveness, for LibreChat's operators. `/health` at the root reports whether code can be run."""
    return PlainTextResponse("OK")


def _missing_reply(error: HTTPException, scope: Scope) -> Response:
    return json_reply({"error": describe_missing_route(error, scope)}, error.status_code, dict(error.headers or {}))
