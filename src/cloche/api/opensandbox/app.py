"""The OpenSandbox dialect as one ASGI application."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from cloche.api.auth import Gatekeeper
from cloche.api.http import strip_prefix, what_is_missing
from cloche.api.opensandbox import egress, execd, lifecycle, unsupported
from cloche.api.opensandbox.context import Desk
from cloche.api.opensandbox.registry import KnownSandboxes
from cloche.api.opensandbox.replies import INVALID, NOT_SUPPORTED, error_reply
from cloche.config import Config
from cloche.engine.engine import Engine

PREFIXES = ("/opensandbox/v1", "/opensandbox")


class OpenSandbox:
    """Serves requests under `/opensandbox`, with `/v1` behind it or without."""

    def __init__(self, engine: Engine, gatekeeper: Gatekeeper, config: Config, secret: bytes):
        known = KnownSandboxes(engine, secret)
        desk, plane = Desk(engine, gatekeeper, known, config), execd.Execd(engine, known)
        routes = [
            *lifecycle.lifecycle_routes(desk),
            *lifecycle.pause_routes(desk),
            *execd.routes(plane),
            *egress.routes(desk),
        ]
        routes += unsupported.routes(desk, plane)
        self._router = Router(routes, redirect_slashes=False)  # clients do not follow redirections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            refusal = error_reply(501, NOT_SUPPORTED, "there is no WebSocket here yet" + unsupported.SEE)
            await refusal(scope, receive, send)
            return
        strip_prefix(scope, PREFIXES)
        scope["app"] = self  # makes the router raise what it would else answer in its own words
        try:
            await self._router(scope, receive, send)
        except HTTPException as error:
            await _missing(error, scope)(scope, receive, send)


def _missing(error: HTTPException, scope: Scope) -> Response:
    response = error_reply(error.status_code, INVALID, what_is_missing(error, scope) + unsupported.SEE)
    response.headers.update(error.headers or {})
    return response
