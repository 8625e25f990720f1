"""OpenAI's API under `/v1`: Responses and Chat with the code interpreter, Containers, Files and others."""

from __future__ import annotations

import time

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from cloche.api.auth import Gatekeeper
from cloche.api.dialect import PathIndexRouter
from cloche.api.http import DialectEndpoint
from cloche.api.openai.chat import ChatRoutes
from cloche.api.openai.containers import ContainerFileRoutes, ContainerRoutes
from cloche.api.openai.context import OpenAiContext, OpenAiNotFound
from cloche.api.openai.conversations import ConversationLocks, ConversationRoutes
from cloche.api.openai.files import OpenAiFileRoutes
from cloche.api.openai.models import ModelRoutes
from cloche.api.openai.responses import ResponseRoutes
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.gateway.gateway import Gateway

API_VERSION = "2020-10-01"  # of the API, as OpenAI's servers say


class OpenAi:
    """Serves requests under `/v1`."""

    def __init__(self, engine: Engine, gateway: Gateway, gatekeeper: Gatekeeper, config: Config):
        api = OpenAiContext(engine, gateway, gatekeeper, config)
        self._nothing = DialectEndpoint(api, _no_route)
        self.routes: list[BaseRoute] = [
            *ResponseRoutes(api, ConversationLocks()).routes,
            *ConversationRoutes(api).routes,
            *ChatRoutes(api).routes,
            *ContainerRoutes(api).routes,
            *ContainerFileRoutes(api).routes,
            *OpenAiFileRoutes(api).routes,
            *ModelRoutes(api).routes,
            Route("/v1{rest:path}", self._nothing),  # also what is there, with another method
        ]
        self._router = PathIndexRouter(self.routes, self._nothing)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await WebSocketClose()(scope, receive, send)  # OpenAI's WebSocket mode is not served
            return
        began = time.monotonic()

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["openai-version"] = API_VERSION
                headers["openai-processing-ms"] = str(int((time.monotonic() - began) * 1000))
            await send(message)

        await self._router(scope, receive, send_with_headers)


async def _no_route(request: Request) -> Response:
    raise OpenAiNotFound(f"Invalid URL ({request.method} /v1/..): docs/dialects/openai.md says what there is")
