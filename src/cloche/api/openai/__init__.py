"""OpenAI's API under `/v1`: Responses and Chat with the code interpreter, Containers, Files, Conversations, Models."""

from __future__ import annotations

import time

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from cloche.api.auth import Gatekeeper
from cloche.api.http import Edge
from cloche.api.openai.chat import Chat
from cloche.api.openai.containers import ContainerFiles, Containers
from cloche.api.openai.context import Door, NotThere, OpenAiErrors
from cloche.api.openai.conversations import Busy, Conversations
from cloche.api.openai.files import Files
from cloche.api.openai.models import Models
from cloche.api.openai.responses import Responses
from cloche.api.router import Paths
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.gateway.gateway import Gateway

VERSION = "2020-10-01"  # of the API, as OpenAI's servers say


class OpenAi:
    """Serves requests under `/v1`."""

    def __init__(self, engine: Engine, gateway: Gateway, gatekeeper: Gatekeeper, config: Config):
        door, dialect = Door(engine=engine, gateway=gateway, gatekeeper=gatekeeper, config=config), OpenAiErrors()
        self._nothing = Edge(dialect, _nothing)
        self.routes: list[BaseRoute] = [
            *Responses(door, dialect, Busy()).routes,
            *Conversations(door, dialect).routes,
            *Chat(door, dialect).routes,
            *Containers(door, dialect).routes,
            *ContainerFiles(door, dialect).routes,
            *Files(door, dialect).routes,
            *Models(door, dialect).routes,
            Route("/v1{rest:path}", self._nothing),  # also what is there, with another method
        ]
        self._router = Paths(self.routes, self._nothing)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await WebSocketClose()(scope, receive, send)  # OpenAI's WebSocket mode is not served
            return
        began = time.monotonic()

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["openai-version"] = VERSION
                headers["openai-processing-ms"] = str(int((time.monotonic() - began) * 1000))
            await send(message)

        await self._router(scope, receive, send_with_headers)


async def _nothing(request: Request) -> Response:
    raise NotThere(f"Invalid URL ({request.method} /v1/..): docs/dialects/openai.md says what there is")
