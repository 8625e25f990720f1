"""Cloche's own dialect, `/api/v1`: all features of the library, over HTTP and WebSockets."""

from __future__ import annotations

from importlib.metadata import version

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Receive, Scope, Send

from cloche import errors
from cloche.api.auth import Gatekeeper
from cloche.api.dialect import PathIndexRouter, encoded_json_reply
from cloche.api.http import DialectEndpoint
from cloche.api.native.context import NativeContext
from cloche.api.native.openapi import openapi_document
from cloche.api.native.routes import api_operations, socket_operations
from cloche.api.native.sockets import SocketEndpoint
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.protocol import API_PREFIX, responses


class NativeApi(PathIndexRouter):
    """Serves requests under `/api/v1`. Its errors are `{"error": {"code": .., "message": .., "request_id": ..}}`."""

    def __init__(self, engine: Engine, gatekeeper: Gatekeeper, config: Config):
        api = NativeContext(engine, gatekeeper, config)
        table, sockets = api_operations(api), socket_operations()
        self._document = responses.encode_json(openapi_document(version("cloche"), table, sockets))
        self._nothing = DialectEndpoint(api, _raise_no_route)
        routes: list[BaseRoute] = [api.route(each.method, API_PREFIX + each.path, each.handler) for each in table]
        routes += [WebSocketRoute(API_PREFIX + each.path, SocketEndpoint(api, each.talk)) for each in sockets]
        routes.append(api.route("GET", API_PREFIX + "/openapi.json", self._serve_openapi_document))
        routes += [
            Route(path, DialectEndpoint(api, _raise_wrong_method))
            for path in {API_PREFIX + each.path for each in table}
        ]
        self.routes = routes
        super().__init__(routes, self._answer_missing_route)

    async def _serve_openapi_document(self, request: Request) -> Response:
        return encoded_json_reply(self._document)

    async def _answer_missing_route(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._nothing(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1000, "reason": "no such route"})


async def _raise_no_route(request: Request) -> Response:
    raise errors.NotFound(f"no such route: {API_PREFIX}/openapi.json lists those of {API_PREFIX}")


async def _raise_wrong_method(request: Request) -> Response:
    raise errors.InvalidRequest(f"{request.method} is not for this path: {API_PREFIX}/openapi.json lists the routes")
