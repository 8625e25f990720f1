"""The OpenSandbox dialect as one ASGI application."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from cloche import errors
from cloche.api.auth import Gatekeeper
from cloche.api.dialect import DialectRouter, NotSupported, dialect_route
from cloche.api.http import Dialect, Handler, strip_prefix
from cloche.api.opensandbox import egress, lifecycle
from cloche.api.opensandbox.code import CodePlane
from cloche.api.opensandbox.commands import CommandPlane
from cloche.api.opensandbox.context import INVALID_PARAMETER, OpenSandboxContext, error_reply
from cloche.api.opensandbox.egress import EGRESS_PATH
from cloche.api.opensandbox.execd import EXECD_PATH, ExecdPlane
from cloche.api.opensandbox.files import FilePlane
from cloche.api.opensandbox.ports import SandboxPorts
from cloche.api.opensandbox.registry import SandboxStates
from cloche.api.opensandbox.server import server_routes
from cloche.api.opensandbox.sessions import SessionPlane
from cloche.config import Config
from cloche.engine.engine import Engine

OPENSANDBOX_PREFIXES = ("/opensandbox/v1", "/opensandbox")

# Routes of OpenSandbox that this server does not have: each responds with the reason.

SEE_DOCS = "; docs/dialects/opensandbox.md says what there is"
TEMPLATE = "templates are built with `cloche template build` on the server's machine, not over this API"
POOL = "each template has a pool of ready sandboxes, sized by pool.ready in the configuration: give its name as poolRef"
EXECD = "this server's execd has no terminals and no isolated sessions" + SEE_DOCS

_UNSUPPORTED_PATHS = (
    ("/templates", TEMPLATE),
    ("/templates/{rest:path}", TEMPLATE),
    ("/pools", POOL),
    ("/pools/{rest:path}", POOL),
)
_UNSUPPORTED_EXECD_PATHS = ("pty", "v1")
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


def _unsupported_routes(api: OpenSandboxContext, plane: Dialect) -> list[BaseRoute]:
    return [
        *(api.route(_METHODS, path, api.unsupported(why)) for path, why in _UNSUPPORTED_PATHS),
        *(
            each
            for name in _UNSUPPORTED_EXECD_PATHS
            for each in _routes_at_and_below(f"{EXECD_PATH}/{name}", plane, _refuse(NotSupported, EXECD))
        ),
        *_routes_at_and_below(EXECD_PATH, plane, _refuse(errors.NotFound, "execd: no such route" + SEE_DOCS)),
        *_routes_at_and_below(EGRESS_PATH, api, _refuse(errors.NotFound, "egress: no such route" + SEE_DOCS)),
    ]


def _routes_at_and_below(path: str, dialect: Dialect, handler: Handler) -> list[Route]:
    return [dialect_route(dialect, _METHODS, each, handler) for each in (path, path + "/{rest:path}")]


def _refuse(kind: type[errors.ClocheError], why: str) -> Handler:
    """A handler that refuses every request, also one without a token."""

    async def refuse(request: Request) -> Response:
        raise kind(why)

    return refuse


class OpenSandbox:
    """Serves requests under `/opensandbox`, with `/v1` behind it or without."""

    def __init__(self, engine: Engine, gatekeeper: Gatekeeper, config: Config, secret: bytes):
        api = OpenSandboxContext(engine, gatekeeper, SandboxStates(engine, secret), config)
        plane = ExecdPlane(api)
        self._ports = SandboxPorts(api, gatekeeper)
        routes = [
            *lifecycle.lifecycle_routes(api),
            *lifecycle.pause_and_snapshot_routes(api),
            *server_routes(api),
            *(
                route
                for each in (plane, CodePlane(plane), CommandPlane(plane), SessionPlane(plane))
                for route in each.routes
            ),
            *FilePlane(plane).routes,
            *egress.egress_routes(api),
            *_unsupported_routes(api, plane),
            *self._ports.routes,
        ]
        self._router = DialectRouter(routes, _missing_route_reply)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        strip_prefix(scope, OPENSANDBOX_PREFIXES)
        if scope["type"] == "websocket":
            await self._ports.open_websocket(scope, receive, send)
        else:
            await self._router(scope, receive, send)


def _missing_route_reply(status: int, what: str) -> Response:
    return error_reply(status, INVALID_PARAMETER, what + SEE_DOCS)
