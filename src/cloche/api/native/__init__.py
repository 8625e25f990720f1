"""Our own dialect, `/api/v1`: everything that the library can do, over HTTP and WebSockets."""

from __future__ import annotations

from importlib.metadata import version

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Receive, Scope, Send

from cloche import errors
from cloche.api.auth import Gatekeeper
from cloche.api.http import Edge
from cloche.api.native.context import Door, Native, raw_reply
from cloche.api.native.openapi import document
from cloche.api.native.routes import operations, socket_operations
from cloche.api.native.sockets import SocketEdge
from cloche.api.router import Paths
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.protocol import PREFIX, responses


class NativeApi:
    """Serves requests under `/api/v1`. Its errors are `{"error": {"code": .., "message": .., "request_id": ..}}`."""

    def __init__(self, engine: Engine, gatekeeper: Gatekeeper, config: Config):
        door, dialect = Door(engine, gatekeeper, config), Native()
        table, sockets = operations(door), socket_operations()
        self._document = responses.encode(document(version("cloche"), table, sockets))
        self._nothing = Edge(dialect, _nothing)
        routes: list[BaseRoute] = [
            Route(PREFIX + each.path, Edge(dialect, each.handler), methods=[each.method]) for each in table
        ]
        routes += [WebSocketRoute(PREFIX + each.path, SocketEdge(door, each.talk)) for each in sockets]
        routes += [Route(PREFIX + "/openapi.json", Edge(dialect, self._openapi), methods=["GET"])]
        routes += [Route(path, Edge(dialect, _wrong_method)) for path in {PREFIX + each.path for each in table}]
        self.routes = routes
        self._router = Paths(routes, self._nowhere)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._router(scope, receive, send)

    async def _openapi(self, request: Request) -> Response:
        return raw_reply(self._document)

    async def _nowhere(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._nothing(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1000, "reason": "there is nothing here"})


async def _nothing(request: Request) -> Response:
    raise errors.NotFound(f"there is nothing at {PREFIX} for that: {PREFIX}/openapi.json lists what there is")


async def _wrong_method(request: Request) -> Response:
    raise errors.InvalidRequest(f"{request.method} is not for this path: {PREFIX}/openapi.json lists what there is")
