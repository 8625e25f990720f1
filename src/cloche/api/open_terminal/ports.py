"""The workspace's listening ports, and the way to them."""

from __future__ import annotations

from urllib.parse import unquote

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from cloche import errors
from cloche.api.auth import Gatekeeper
from cloche.api.dialect import encoded_json_reply, json_reply
from cloche.api.http import DialectEndpoint, run_unless_disconnected
from cloche.api.open_terminal.context import CHAT_HEADER, USER_HEADER, OpenTerminalContext, error_reply
from cloche.api.open_terminal.workspace import Refusal
from cloche.api.ports import ForwardedHeaders, PortProxy

PRIVATE_HEADERS = (USER_HEADER.encode(), CHAT_HEADER.encode(), b"authorization", b"x-api-key")


class PortRoutes:
    def __init__(self, api: OpenTerminalContext, gatekeeper: Gatekeeper):
        self._api = api
        self._programs: ASGIApp = PortProxy(self, ForwardedHeaders(PRIVATE_HEADERS, gatekeeper.knows))

    def routes(self) -> list[BaseRoute]:
        endpoint = DialectEndpoint(self._api, self._open_port)
        return [
            self._api.route("GET", "/ports", self.list),
            Route("/proxy/{program_port}", endpoint),
            Route("/proxy/{program_port}/{rest:path}", endpoint),
        ]

    def render_error(self, error: errors.ClocheError, request: HTTPConnection) -> Response:
        return error_reply(error)

    async def list(self, request: Request) -> Response:
        workspace = self._api.find_workspace(request)
        if workspace is None:
            return json_reply({"ports": []})
        return encoded_json_reply(await run_unless_disconnected(request, workspace.perform("list_ports")))

    async def _open_port(self, request: Request) -> ASGIApp:
        """Raises PortNotOpen for a port on which nothing listens."""
        given = request.path_params["program_port"]
        port = int(given) if given.isascii() and given.isdigit() and len(given) < 6 else 0
        workspace = self._api.find_workspace(request)
        if not 0 < port < 1 << 16:
            raise Refusal(422, "Port must be between 1 and 65535")
        if workspace is None:
            raise errors.PortNotOpen("Port not found")
        scope = request.scope
        scope["state"].update(sandbox=await workspace.sandbox(), port=port, host=f"localhost:{port}")
        raw: bytes = scope.get("raw_path") or scope["path"].encode()
        _, _, rest = raw.partition(b"/proxy/" + given.encode())
        scope["raw_path"] = rest if rest.startswith(b"/") else b"/"
        scope["path"], scope["root_path"] = unquote(scope["raw_path"].decode("ascii", "replace")), ""
        return self._programs
