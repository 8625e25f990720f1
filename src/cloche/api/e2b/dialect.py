"""The E2B dialect as one ASGI application: which plane a request is for, who may enter, and errors before that."""

from __future__ import annotations

from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cloche import errors
from cloche.api.auth import HOST, Gatekeeper
from cloche.api.e2b import code, control, envd
from cloche.api.e2b.access import (
    ACCESS_HEADER,
    PRIVATE_HEADERS,
    TRAFFIC_HEADER,
    may_enter,
    require_entrance,
    signer_of,
)
from cloche.api.e2b.planes import OpenToPages, Plane
from cloche.api.e2b.replies import AWAY, error_reply, json_reply
from cloche.api.e2b.residents import Residents
from cloche.api.e2b.routing import (
    CODE_PORT,
    ENVD_PORT,
    Target,
    is_api_host,
    is_signed_file,
    strip_prefix,
    target_of,
)
from cloche.api.e2b.tokens import Tokens, same
from cloche.api.http import Edge, status_of
from cloche.api.ports import Outward, PortProxy
from cloche.api.requests import bill
from cloche.config import Config
from cloche.engine.engine import Engine


class E2b:
    """Serves requests under `/e2b`, those for ports of sandboxes, those for `api.DOMAIN`, and signed file URLs."""

    def __init__(self, engine: Engine, gatekeeper: Gatekeeper, config: Config, secret: bytes):
        self._domain = config.server.domain
        self.residents = Residents(engine, Tokens(secret))
        routes = control.routes(engine, gatekeeper, self.residents, config, secret)
        self._control: ASGIApp = Plane("control plane", routes)
        self._own_ports: dict[int, ASGIApp] = {
            ENVD_PORT: Plane("envd", envd.routes(self.residents, config)),
            CODE_PORT: Plane("code server", code.routes(self.residents, config)),
        }
        self._programs: ASGIApp = PortProxy(self, Outward(PRIVATE_HEADERS, gatekeeper.knows))
        self._entrance = Edge(self, self._direct)
        self._open_entrance = OpenToPages(self._entrance)

    def claims(self, scope: Scope) -> bool:
        """Whether a request that is not under `/e2b` is for this dialect all the same."""
        try:
            for_sandbox = is_signed_file(scope) or target_of(scope, self._domain) is not None
        except errors.InvalidRequest:
            return True
        return for_sandbox or is_api_host(scope, self._domain)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._open_websocket(scope, receive, send)
        elif self._is_for_own_port(scope):
            await self._open_entrance(scope, receive, send)
        else:
            await self._entrance(scope, receive, send)

    def _is_for_own_port(self, scope: Scope) -> bool:
        try:
            target = target_of(scope, self._domain)
        except errors.InvalidRequest:
            return False
        return is_signed_file(scope) if target is None else target.port in self._own_ports

    async def _direct(self, request: Request) -> ASGIApp:
        scope = request.scope
        target = target_of(scope, self._domain)
        if target is not None:
            await self._enter(request, target)
            if target.port in self._own_ports:  # those who visit a program are told nothing
                bill(scope, scope["state"]["sandbox"])
            return self._own_ports.get(target.port, self._programs)
        strip_prefix(scope)
        if not is_signed_file(scope):
            return self._control
        signer = await signer_of(request, self.residents)
        require_entrance(request, signer, ENVD_PORT)
        scope["state"][HOST] = signer.owner
        scope["state"].update(resident=await self.residents.awake(signer), port=ENVD_PORT)
        return self._own_ports[ENVD_PORT]

    async def _enter(self, connection: HTTPConnection, target: Target) -> None:
        """Finds the sandbox and asks for a token, before anything behind its port sees the request."""
        if not target.by_host:
            strip_prefix(connection.scope)
        await self._unlock(connection, target)
        found = await self.residents.find(target.sandbox)
        connection.scope["state"][HOST] = found.owner  # it may take a while to wake it
        resident = await self.residents.awake(found)
        connection.scope["state"].update(
            resident=resident, sandbox=resident.sandbox, port=target.port, host=resident.host_for(target.port)
        )

    async def _unlock(self, connection: HTTPConnection, target: Target) -> None:
        """Raises Unauthenticated or Forbidden for who may not enter, whether there is such a sandbox or not.

        Neither the answer nor the time it takes tells the two apart: what is refused was looked up in the records.
        """
        known = self.residents.running(target.sandbox)
        if known is not None and may_enter(connection, known, target.port):
            return
        require_entrance(connection, await self.residents.lock(target.sandbox), target.port)

    async def _open_websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Only programs inside sandboxes speak WebSocket in this dialect."""
        connection = HTTPConnection(scope)
        try:
            target = target_of(scope, self._domain)
            if target is None or target.port in self._own_ports:
                raise errors.InvalidRequest("there is no WebSocket here: only programs inside sandboxes may have one")
            await self._enter(connection, target)
        except errors.ClocheError as error:
            await self.render_error(error, connection)(scope, receive, send)
        else:
            await self._programs(scope, receive, send)

    def render_error(self, error: errors.ClocheError, request: HTTPConnection) -> Response:
        """What is said in front of a sandbox's ports."""
        if isinstance(error, errors.Unauthenticated):
            return error_reply(401, str(error))
        if isinstance(error, errors.InvalidRequest):
            signed = is_signed_file(request.scope)
            return error_reply(400, str(error)) if signed else PlainTextResponse(str(error), 400)
        target = target_of(request.scope, self._domain)
        id = target.sandbox if target is not None else ""
        status, message = status_of(error), str(error)
        if isinstance(error, errors.PortNotOpen):
            status, message = 502, f"The sandbox is running but port is not open: {error}"
        elif isinstance(error, (errors.NotFound, *AWAY)):
            status, message = 502, self._absence(error, request, id)
        return json_reply({"sandboxId": id, "message": message, "code": status}, status)

    def _absence(self, error: errors.ClocheError, request: HTTPConnection, id: str) -> str:
        """Clients look for "was not found". Why is for those only who held a token of that sandbox."""
        tokens, headers = self.residents.tokens, request.headers
        known = same(headers.get(ACCESS_HEADER), tokens.access(id)) or same(
            headers.get(TRAFFIC_HEADER), tokens.traffic(id)
        )
        return f"The sandbox was not found: {error}" if known else "The sandbox was not found"
