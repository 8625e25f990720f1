"""LibreChat's code API as one ASGI application."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from cloche.api.auth import Gatekeeper
from cloche.api.http import strip_prefix, what_is_missing
from cloche.api.librechat import exec, files, tool_calls
from cloche.api.librechat.context import Desk
from cloche.api.librechat.exec import Workshop
from cloche.api.librechat.replies import json_reply
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.store.gateway import Shelf

PREFIXES = ("/librechat/v1", "/librechat")


class LibreChat:
    """Serves requests under `/librechat/v1`, and under `/librechat` for whoever forgot the rest."""

    def __init__(self, engine: Engine, shelf: Shelf, gatekeeper: Gatekeeper, config: Config, secret: bytes):
        desk = Desk(engine, shelf, gatekeeper, config, secret)
        workshop = Workshop(desk)
        routes = [
            desk.route("GET", "/health", _health),
            *exec.routes(desk, workshop),
            *tool_calls.routes(desk, workshop),
            *files.routes(desk),
        ]
        self._router = Router(routes, redirect_slashes=False)  # clients do not follow redirections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000, "reason": "there is no WebSocket here"})
            return
        strip_prefix(scope, PREFIXES)
        scope["app"] = self  # makes the router raise what it would else answer in its own words
        try:
            await self._router(scope, receive, send)
        except HTTPException as error:
            await _missing(error, scope)(scope, receive, send)


async def _health(request: Request) -> Response:
    """For LibreChat's operators. Whether code can be run is what `/health` at the root says."""
    return PlainTextResponse("OK")


def _missing(error: HTTPException, scope: Scope) -> Response:
    return json_reply({"error": what_is_missing(error, scope)}, error.status_code, dict(error.headers or {}))
