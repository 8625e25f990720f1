"""The Open Terminal dialect as one ASGI application."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, WebSocketRoute
from starlette.types import Receive, Scope, Send

from cloche.api.auth import Gatekeeper
from cloche.api.dialect import DialectRouter, json_reply
from cloche.api.http import strip_prefix
from cloche.api.open_terminal.commands import CommandRoutes
from cloche.api.open_terminal.context import OpenTerminalContext
from cloche.api.open_terminal.files import FileRoutes
from cloche.api.open_terminal.notebooks import NotebookRoutes
from cloche.api.open_terminal.openapi import openapi_document
from cloche.api.open_terminal.ports import PortRoutes
from cloche.api.open_terminal.terminals import TerminalRoutes
from cloche.config import Config
from cloche.engine.engine import Engine

OPEN_TERMINAL_PREFIX = "/open-terminal"
OPEN_TERMINAL_VERSION = "0.14.5"  # whose routes these are
FEATURES = {"terminal": True, "notebooks": True, "system": True}
SYSTEM_PROMPT = (
    "The tools act on a Linux sandbox that is yours alone: a shell, Python, and files below /home/user. Run commands, "
    "read and write files, and search. Look at the state of things before you change it, and at the output of commands "
    "afterwards; a command without output has mostly succeeded. Programs reach the hosts that the operator allows, and "
    "no others."
)
_POLICY_PATH = re.compile(r"/p/([^/]+)(/.*)", re.DOTALL)


class ServerRoutes:
    """The routes that are about the server."""

    def __init__(self, api: OpenTerminalContext):
        self._api = api

    def routes(self) -> list[BaseRoute]:
        route = self._api.route
        return [
            route("GET", "/openapi.json", self.tell_document),
            route("GET", "/health", self.tell_health),
            route("GET", "/api/config", self.tell_features),
            route("GET", "/system", self.tell_prompt),
            route("GET", "/info", self.tell_info),
        ]

    async def tell_document(self, request: Request) -> Response:
        return json_reply(openapi_document(OPEN_TERMINAL_VERSION, with_info=bool(self._info)))

    async def tell_health(self, request: Request) -> Response:
        return json_reply({"status": "ok"})

    async def tell_features(self, request: Request) -> Response:
        return json_reply({"features": FEATURES})

    async def tell_prompt(self, request: Request) -> Response:
        self._api.admit(request)
        return json_reply({"prompt": "\n\n".join(filter(None, (SYSTEM_PROMPT, self._info)))})

    async def tell_info(self, request: Request) -> Response:
        self._api.admit(request)
        if not self._info:
            return _missing_route_reply(404, "Not Found")
        return json_reply({"info": self._info})

    @property
    def _info(self) -> str:
        return self._api.config.open_terminal.info


class OpenTerminal:
    """Serves requests under `/open-terminal`, and `/open-terminal/p/POLICY`."""

    def __init__(self, engine: Engine, gatekeeper: Gatekeeper, config: Config):
        api = OpenTerminalContext(engine, gatekeeper, config)
        terminals = TerminalRoutes(api)
        routes = [
            *ServerRoutes(api).routes(),
            *FileRoutes(api).routes(),
            *CommandRoutes(api).routes(),
            *PortRoutes(api, gatekeeper).routes(),
            *terminals.routes(),
            WebSocketRoute("/api/terminals/{session}", terminals.socket),
            *NotebookRoutes(api).routes(),
        ]
        self._router = DialectRouter(routes, _missing_route_reply)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        strip_prefix(scope, (OPEN_TERMINAL_PREFIX,))
        match = _POLICY_PATH.fullmatch(scope["path"])
        state: dict[str, Any] = scope.setdefault("state", {})
        if match is not None:
            state["policy"], scope["path"] = match[1], match[2]
        await self._router(scope, receive, send)


def _missing_route_reply(status: int, what: str) -> Response:
    return json_reply({"detail": HTTPStatus(status).phrase}, status)
