"""The OpenSandbox dialect as one ASGI application."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from cloche.api.auth import Gatekeeper
from cloche.api.http import describe_missing_route, strip_prefix
from cloche.api.opensandbox import egress, execd, lifecycle, unsupported
from cloche.api.opensandbox.context import OpenSandboxContext
from cloche.api.opensandbox.registry import SandboxStates
from cloche.api.opensandbox.replies import INVALID_PARAMETER, NOT_SUPPORTED, error_reply
from cloche.config import Config
from cloche.engine.engine import Engine

OPENSANDBOX_PREFIXES = ("/opensandbox/v1", "/opensandbox")


class OpenSandbox:
    """Serves requests under `/opensandbox`, with `/v1` behind it or without."""

    def __init__(self, engine: Engine, gatekeeper: Gatekeeper, config: Config, secret: bytes):
        known = SandboxStates(engine, secret)
        api, plane = OpenSandboxContext(engine, gatekeeper, known, config), execd.Execd(engine, known)
        routes = [
            *lifecycle.lifecycle_routes(api),
            *lifecycle.pause_and_snapshot_routes(api),
            *execd.execd_routes(plane),
            *egress.egress_routes(api),
        ]
        routes += unsupported.unsupported_routes(api, plane)
        self._router = Router(routes, redirect_slashes=False)  # clients do not follow redirections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            refusal = error_reply(501, NOT_SUPPORTED, "there is no WebSocket here yet" + unsupported.SEE_DOCS)
            await refusal(scope, receive, send)
            return
        strip_prefix(scope, OPENSANDBOX_PREFIXES)
        scope["app"] = self  # makes the router raise what it would else answer in its own words
        try:
            await self._router(scope, receive, send)
        except HTTPException as error:
            await _missing_route_response(error, scope)(scope, receive, send)


def _missing_route_response(error: HTTPException, scope: Scope) -> Response:
    response = error_reply(
        error.status_code, INVALID_PARAMETER, describe_missing_route(error, scope) + unsupported.SEE_DOCS
    )
    response.headers.update(error.headers or {})
    return response
