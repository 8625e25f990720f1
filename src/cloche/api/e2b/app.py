"""The E2B dialect as one ASGI application: which plane a request is for, who may enter, and errors before that."""

from __future__ import annotations

import time
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloche import errors
from cloche.api.auth import HOST, Gatekeeper
from cloche.api.e2b import code, envd, sandboxes
from cloche.api.e2b.registry import Lock, Operation, Resident, Residents, Tokens, same, signature
from cloche.api.e2b.replies import (
    AWAY,
    CODE_PORT,
    ENVD_PORT,
    Target,
    error_reply,
    is_api_host,
    is_signed_file,
    json_reply,
    strip_prefix,
    target_of,
)
from cloche.api.http import Edge, status_of, what_is_missing
from cloche.api.ports import Outward, PortProxy
from cloche.api.requests import bill
from cloche.api.router import Paths
from cloche.config import Config
from cloche.engine.engine import Engine

# What stands around the routes of one plane: answers for paths that are not there, and leave for web pages.

_PREFLIGHT_SECONDS = "7200"


class Plane:
    """The routes of one plane. A path or method that it does not have is answered in E2B's shape."""

    def __init__(self, name: str, routes: Sequence[BaseRoute]):
        self._name = name
        self._router = Paths(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # makes the router raise what it would else answer in its own words
        try:
            await self._router(scope, receive, send)
        except HTTPException as error:
            await self._missing(error, scope)(scope, receive, send)

    def _missing(self, error: HTTPException, scope: Scope) -> Response:
        what = what_is_missing(error, scope)
        response = error_reply(error.status_code, f"{self._name}: {what}; see docs/dialects/e2b.md for what there is")
        response.headers.update(error.headers or {})
        return response


class OpenToPages:
    """Lets any web page call what is behind: it takes a token of the sandbox to do anything there.

    Never around the control plane, which takes a key.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await _preflight(headers)(scope, receive, send)
            return

        async def allowing(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                answer["access-control-allow-origin"] = "*"
                answer["access-control-expose-headers"] = "*"
            await send(message)

        await self._app(scope, receive, allowing)


def _preflight(asked: Headers) -> Response:
    return Response(
        status_code=204,
        headers={
            "access-control-allow-origin": "*",
            "access-control-allow-methods": "GET, HEAD, POST, PUT, PATCH, DELETE",
            # Not `*`, which browsers do not take for `Authorization`.
            "access-control-allow-headers": asked.get("access-control-request-headers", "*"),
            "access-control-max-age": _PREFLIGHT_SECONDS,
        },
    )


# Who may speak to a sandbox's ports. The dialect asks before any plane sees a request, so that no plane need ask.
#
# port 49983 (envd)         the access token; `/files` also takes a signature
# port 49999 (code server)  the traffic token or the access token
# any other port            the same, but only where public traffic was switched off
#
# A sandbox that was made without `secure` (only old clients can) has no access token: as in E2B, its id is enough.
# Who has neither is told the same of a sandbox that never was. So `GET /health` of envd needs a token, too, which
# E2B's
# clients send with it.

ACCESS_HEADER = "x-access-token"
TRAFFIC_HEADER = "e2b-traffic-access-token"
PRIVATE_HEADERS = tuple(name.encode() for name in (ACCESS_HEADER, TRAFFIC_HEADER, "e2b-sandbox-id", "e2b-sandbox-port"))
"""What programs inside a sandbox never see of a request that is carried to them."""

_UNAUTHORIZED = "unauthorized access, please provide a valid access token or method signing if supported"
_SECURED = "Sandbox is secured with traffic access token. Token header 'e2b-traffic-access-token' is"


def may_enter(connection: HTTPConnection, resident: Lock, port: int) -> bool:
    """Raises InvalidRequest as below."""
    try:
        require_entrance(connection, resident, port)
    except (errors.Unauthenticated, errors.Forbidden):
        return False
    return True


def require_entrance(connection: HTTPConnection, resident: Lock, port: int) -> None:
    """Raises Unauthenticated or Forbidden unless this request may go to that port."""
    if port == ENVD_PORT:
        require_access(connection, resident)
    elif port == CODE_PORT:
        if resident.access_token is not None or not resident.public_traffic:
            require_traffic(connection, resident)
    elif not resident.public_traffic:
        require_traffic(connection, resident)


def require_access(connection: HTTPConnection, resident: Lock) -> None:
    """envd's rule. Raises Unauthenticated, or InvalidRequest for an expiration that is no number."""
    token, path = resident.access_token, connection.scope["path"]
    if token is None:
        return
    if path == "/files" and _method(connection) in ("GET", "HEAD", "POST"):
        _require_file_access(connection, token)
    elif not same(connection.headers.get(ACCESS_HEADER), token):
        raise errors.Unauthenticated(_UNAUTHORIZED)


def require_traffic(connection: HTTPConnection, resident: Lock) -> None:
    """Raises Forbidden without a token of that sandbox: the traffic token, or the access token, which is worth more."""
    given, headers = connection.headers.get(TRAFFIC_HEADER), connection.headers
    access = resident.access_token
    if same(given, resident.traffic_token) or (access is not None and same(headers.get(ACCESS_HEADER), access)):
        return
    raise errors.Forbidden(f"{_SECURED} {'missing' if given is None else 'invalid'}")


async def signer_of(connection: HTTPConnection, residents: Residents) -> Resident:
    """The sandbox whose token signed this file URL, which names none. Raises Unauthenticated."""
    query = connection.query_params
    return await residents.by_signature(
        query.get("signature", ""),
        query.get("path", ""),
        _operation(connection),
        query.get("username", ""),
        _expiration(connection),
    )


def _require_file_access(connection: HTTPConnection, token: str) -> None:
    given, query = connection.headers.get(ACCESS_HEADER), connection.query_params
    if given is not None:
        if not same(given, token):
            raise errors.Unauthenticated("access token present in header but does not match")
        return
    if "signature" not in query:
        raise errors.Unauthenticated("missing signature query parameter")
    expiration = _expiration(connection)
    wanted = signature(query.get("path", ""), _operation(connection), query.get("username", ""), token, expiration)
    if not same(query["signature"], wanted):
        raise errors.Unauthenticated("invalid signature")
    if expiration is not None and expiration < time.time():
        raise errors.Unauthenticated("signature is already expired")


def _expiration(connection: HTTPConnection) -> int | None:
    given = connection.query_params.get("signature_expiration")
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and len(given) <= 12):
        raise errors.InvalidRequest("signature_expiration must be a time in seconds since 1970")
    return int(given)


def _operation(connection: HTTPConnection) -> Operation:
    return "write" if _method(connection) == "POST" else "read"


def _method(connection: HTTPConnection) -> str:
    return str(connection.scope.get("method", "GET"))


class E2b:
    """Serves requests under `/e2b`, those for ports of sandboxes, those for `api.DOMAIN`, and signed file URLs."""

    def __init__(self, engine: Engine, gatekeeper: Gatekeeper, config: Config, secret: bytes):
        self._domain = config.server.domain
        self.residents = Residents(engine, Tokens(secret))
        routes = sandboxes.sandbox_routes(engine, gatekeeper, self.residents, config, secret)
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
