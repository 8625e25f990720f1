"""LibreChat's code API as one ASGI application."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from cloche.api.auth import Gatekeeper
from cloche.api.dialect import DialectRouter, json_reply
from cloche.api.http import strip_prefix
from cloche.api.librechat import exec, files, tool_calls
from cloche.api.librechat.context import LibreChatContext
from cloche.api.librechat.exec import ProgramRunner
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.store.gateway import GatewayStore

LIBRECHAT_PREFIXES = ("/librechat/v1", "/librechat")


class LibreChatApi:
    """Serves requests under `/librechat/v1`, and under `/librechat` for clients configured without `/v1`."""

    def __init__(self, engine: Engine, store: GatewayStore, gatekeeper: Gatekeeper, config: Config, secret: bytes):
        api = LibreChatContext(engine, store, gatekeeper, config, secret)
        runner = ProgramRunner(api)
        routes = [
            api.route("GET", "/health", _health_reply),
            *exec.execution_routes(api, runner),
            *tool_calls.programmatic_routes(api, runner),
            *files.file_routes(api),
        ]
        self._router = DialectRouter(routes, _missing_reply)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000, "reason": "there is no WebSocket here"})
            return
        strip_prefix(scope, LIBRECHAT_PREFIXES)
        await self._router(scope, receive, send)


async def _health_reply(request: Request) -> Response:
    """Liveness, for LibreChat's operators. `/health` at the root reports whether code can be run."""
    return PlainTextResponse("OK")


def _missing_reply(status: int, what: str) -> Response:
    return json_reply({"error": what}, status)
