"""Ports of programs inside sandboxes: HTTP and WebSocket at `/sandboxes/{id}/proxy/{port}`, with a token."""

from __future__ import annotations

import re
import time
from urllib.parse import unquote

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from cloche import errors
from cloche.api.auth import HOST_OWNER_STATE, Gatekeeper, secrets_match
from cloche.api.dialect import NotSupported
from cloche.api.http import DialectEndpoint
from cloche.api.opensandbox.context import OpenSandboxContext, error_reply, render_lifecycle_error
from cloche.api.opensandbox.lifecycle_schema import PORT_TOKEN_HEADER, TOKEN_HEADERS_BY_PORT, parse_port_number
from cloche.api.opensandbox.registry import stored_request_of
from cloche.api.ports import ForwardedHeaders, PortProxy

PORT_PATH = "/sandboxes/{id}/proxy/{program_port}"
PRIVATE_HEADERS = tuple(name.lower().encode() for name in (PORT_TOKEN_HEADER, *TOKEN_HEADERS_BY_PORT.values()))
"""What programs inside a sandbox never see of a request that is carried to them."""
_PORT_REQUEST = re.compile(r"/sandboxes/([^/]+)/proxy/([^/]+)(?:/.*)?", re.DOTALL)


class SandboxPorts:
    def __init__(self, api: OpenSandboxContext, gatekeeper: Gatekeeper):
        self._api = api
        self._programs: ASGIApp = PortProxy(self, ForwardedHeaders(PRIVATE_HEADERS, gatekeeper.knows))
        endpoint = DialectEndpoint(self, self._open_port)
        self.routes: list[BaseRoute] = [Route(path, endpoint) for path in (PORT_PATH, PORT_PATH + "/{rest:path}")]

    async def open_websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = HTTPConnection(scope)
        try:
            match = _PORT_REQUEST.fullmatch(scope["path"])
            if match is None or match[2] in map(str, TOKEN_HEADERS_BY_PORT):
                raise NotSupported("there is no WebSocket here: only programs inside sandboxes have some")
            await self._enter(connection, match[1], match[2])
        except errors.ClocheError as error:
            await self.render_error(error, connection)(scope, receive, send)
        else:
            await self._programs(scope, receive, send)

    def render_error(self, error: errors.ClocheError, request: HTTPConnection) -> Response:
        if isinstance(error, errors.PortNotOpen):
            return error_reply(502, "SANDBOX::PORT_NOT_OPEN", str(error))
        if isinstance(error, errors.Unauthenticated):
            return error_reply(401, "UNAUTHORIZED", str(error))
        return render_lifecycle_error(error)

    async def _open_port(self, request: Request) -> ASGIApp:
        await self._enter(request, request.path_params["id"], request.path_params["program_port"])
        return self._programs

    async def _enter(self, connection: HTTPConnection, id: str, given_port: str) -> None:
        """Checks the token and finds the sandbox. Raises Unauthenticated, SandboxNotFound, Gone, InvalidRequest."""
        port = parse_port_number(given_port)
        if not self._opens(connection.headers.get(PORT_TOKEN_HEADER), id, port):
            raise errors.Unauthenticated(
                f"{PORT_TOKEN_HEADER} is missing or wrong: GET /sandboxes/ID/endpoints/{port} has it in `headers`"
            )
        handle = await self._api.engine.handle(id, None)
        connection.scope["state"][HOST_OWNER_STATE] = handle.owner  # it may take a while to wake it
        sandbox = await handle.running()
        if renew_seconds := stored_request_of(sandbox.record.spec.notes).renew_seconds:
            sandbox.extend(renew_seconds)
        scope = connection.scope
        scope["state"].update(sandbox=sandbox, port=port, host=None)
        _strip_port_path(scope, given_port)

    def _opens(self, given: str | None, id: str, port: int) -> bool:
        expires, dot, _ = (given or "").partition(".")
        if not dot:
            return secrets_match(given, self._api.states.token(id, "port"))
        if not (expires.isascii() and expires.isdigit() and len(expires) <= 12):
            return False
        signed = self._api.states.signed_token(id, port, int(expires))
        return secrets_match(given, signed) and int(expires) > time.time()


def _strip_port_path(scope: Scope, port: str) -> None:
    """Leaves the path that the program is asked for, as the client wrote it."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    _, _, rest = raw.partition(b"/proxy/" + port.encode())
    scope["raw_path"] = rest if rest.startswith(b"/") else b"/"
    scope["path"], scope["root_path"] = unquote(scope["raw_path"].decode("ascii", "replace")), ""
