"""The E2B dialect as one ASGI application: chooses the plane, checks access and renders errors before that."""

from __future__ import annotations

import time
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloche import errors
from cloche.api.auth import HOST_OWNER_STATE, Gatekeeper
from cloche.api.dialect import DialectRouter, json_reply
from cloche.api.e2b import code, envd, network, sandboxes, snapshots, templates, volumes
from cloche.api.e2b.context import SANDBOX_AWAY_ERRORS, E2bContext, error_reply
from cloche.api.e2b.port_target import (
    CODE_PORT,
    ENVD_PORT,
    ID_HEADER,
    PORT_HEADER,
    PortTarget,
    is_api_host,
    is_signed_file_url,
    port_target_of,
    strip_e2b_prefix,
)
from cloche.api.e2b.registry import (
    E2bSandbox,
    E2bSandboxes,
    E2bTokens,
    FileOperation,
    PortAccess,
    secrets_match,
    sign_file_url,
)
from cloche.api.http import DialectEndpoint, status_of
from cloche.api.ports import ForwardedHeaders, PortProxy
from cloche.api.requests import charge_sandbox_owner
from cloche.config import Config
from cloche.engine.engine import Engine

_PREFLIGHT_SECONDS = "7200"


def _plane_router(name: str, routes: Sequence[BaseRoute]) -> DialectRouter:
    """The routes of one plane."""

    def missing(status: int, what: str) -> Response:
        return error_reply(status, f"{name}: {what}; see docs/dialects/e2b.md for what there is")

    return DialectRouter(routes, missing)


class CrossOriginAccess:
    """Allows cross-origin requests of every web page: a sandbox's token protects the routes behind it.

    Never around the control plane, which takes a key.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await _preflight_response(headers)(scope, receive, send)
            return

        async def allowing(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                answer["access-control-allow-origin"] = "*"
                answer["access-control-expose-headers"] = "*"
            await send(message)

        await self._app(scope, receive, allowing)


# Orders to caches, some of which put the later ones above the first.
_CACHE_ORDERS = frozenset(b"cache-control expires pragma surrogate-control cdn-cache-control".split())
_UNCACHED = ((b"cache-control", b"private, no-store"), (b"vary", f"{ID_HEADER}, {PORT_HEADER}".encode()))


def _forbid_caching(send: Send) -> Send:
    """A `send` for the origin that all sandboxes share: no cache keeps an answer of one for the next client."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":  # names of a program's headers are as it wrote them
            kept = (pair for pair in message.get("headers", ()) if pair[0].lower() not in _CACHE_ORDERS)
            message["headers"] = [*kept, *_UNCACHED]
        await send(message)

    return sending


def _preflight_response(asked: Headers) -> Response:
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


# Access to a sandbox's ports.
#
# The dialect checks it before a plane sees the request, so planes need no check.
#     port 49983 (envd)         the access token; `/files` also takes a signature
#     port 49999 (code server)  the traffic token or the access token
#     any other port            the same, but only where public traffic was switched off
#
# A sandbox created without `secure` (only old clients can) has no access token: as in E2B, its id is enough.
# Without a token, an existing and an unknown sandbox get the same response. So `GET /health` of envd needs a
# token, too, which E2B's clients send with it.

ACCESS_HEADER = "x-access-token"
TRAFFIC_HEADER = "e2b-traffic-access-token"
PRIVATE_HEADERS = tuple(name.encode() for name in (ACCESS_HEADER, TRAFFIC_HEADER, ID_HEADER, PORT_HEADER))
"""What programs inside a sandbox never see of a request that is carried to them."""

_UNAUTHORIZED = "unauthorized access, please provide a valid access token or method signing if supported"
_SECURED = "Sandbox is secured with traffic access token. Token header 'e2b-traffic-access-token' is"


def may_enter_port(connection: HTTPConnection, e2b_sandbox: PortAccess, port: int) -> bool:
    """Whether the request may reach that port. Raises InvalidRequest as `require_access_token` does."""
    try:
        require_port_access(connection, e2b_sandbox, port)
    except (errors.Unauthenticated, errors.Forbidden):
        return False
    return True


def require_port_access(connection: HTTPConnection, e2b_sandbox: PortAccess, port: int) -> None:
    """Raises Unauthenticated or Forbidden unless this request may go to that port."""
    if port == ENVD_PORT:
        require_access_token(connection, e2b_sandbox)
    elif port == CODE_PORT:
        if e2b_sandbox.access_token is not None or not e2b_sandbox.public_traffic:
            require_traffic_token(connection, e2b_sandbox)
    elif not e2b_sandbox.public_traffic:
        require_traffic_token(connection, e2b_sandbox)


def require_access_token(connection: HTTPConnection, e2b_sandbox: PortAccess) -> None:
    """envd's rule. Raises Unauthenticated, or InvalidRequest for an expiration that is not a number."""
    token, path = e2b_sandbox.access_token, connection.scope["path"]
    if token is None:
        return
    if path == "/files" and _request_method(connection) in ("GET", "HEAD", "POST"):
        _require_file_access(connection, token)
    elif not secrets_match(connection.headers.get(ACCESS_HEADER), token):
        raise errors.Unauthenticated(_UNAUTHORIZED)


def require_traffic_token(connection: HTTPConnection, e2b_sandbox: PortAccess) -> None:
    """Raises Forbidden without the sandbox's traffic token or its access token, which grants more."""
    given, headers = connection.headers.get(TRAFFIC_HEADER), connection.headers
    access = e2b_sandbox.access_token
    if secrets_match(given, e2b_sandbox.traffic_token) or (
        access is not None and secrets_match(headers.get(ACCESS_HEADER), access)
    ):
        return
    raise errors.Forbidden(f"{_SECURED} {'missing' if given is None else 'invalid'}")


async def find_url_signer(connection: HTTPConnection, registry: E2bSandboxes) -> E2bSandbox:
    """The sandbox that signed this file URL, which names none. Raises Unauthenticated."""
    query = connection.query_params
    return await registry.by_signature(
        query.get("signature", ""),
        query.get("path", ""),
        _file_operation(connection),
        query.get("username", ""),
        _signature_expiration(connection),
    )


def _require_file_access(connection: HTTPConnection, token: str) -> None:
    given, query = connection.headers.get(ACCESS_HEADER), connection.query_params
    if given is not None:
        if not secrets_match(given, token):
            raise errors.Unauthenticated("access token present in header but does not match")
        return
    if "signature" not in query:
        raise errors.Unauthenticated("missing signature query parameter")
    expiration = _signature_expiration(connection)
    wanted = sign_file_url(
        query.get("path", ""), _file_operation(connection), query.get("username", ""), token, expiration
    )
    if not secrets_match(query["signature"], wanted):
        raise errors.Unauthenticated("invalid signature")
    if expiration is not None and expiration < time.time():
        raise errors.Unauthenticated("signature is already expired")


def _signature_expiration(connection: HTTPConnection) -> int | None:
    given = connection.query_params.get("signature_expiration")
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and len(given) <= 12):
        raise errors.InvalidRequest("signature_expiration must be a time in seconds since 1970")
    return int(given)


def _file_operation(connection: HTTPConnection) -> FileOperation:
    return "write" if _request_method(connection) == "POST" else "read"


def _request_method(connection: HTTPConnection) -> str:
    return str(connection.scope.get("method", "GET"))


# The control plane's routes, and those of E2B's that this server does not have.

_BUILD = "this server builds templates as clients from 2.0 on ask for it (POST /v3/templates): use a newer one"
_PUBLISH = "templates that are built by API are their owner's alone on this server; they cannot be made public"
_SECRET = (
    "this server keeps no secrets; give their values with a sandbox's network.rules, where programs never see them"
)
_TEAM = "this server has no teams: a key belongs to an owner; `cloche key list` on the server's machine shows them"

_UNSUPPORTED_ROUTES = (
    ("POST", "/templates", _BUILD),
    ("POST", "/v2/templates", _BUILD),
    ("POST", "/templates/{rest:path}", _BUILD),
    ("PATCH", "/templates/{rest:path}", _PUBLISH),
    ("POST", "/v2/templates/{rest:path}", _BUILD),
    ("PATCH", "/v2/templates/{rest:path}", _PUBLISH),
    *((method, f"/secrets{rest}", _SECRET) for method in ("GET", "POST", "DELETE") for rest in ("", "/{rest:path}")),
    ("GET", "/teams", _TEAM),
    ("GET", "/teams/{rest:path}", _TEAM),
)


def _control_plane_routes(api: E2bContext, secret: bytes) -> list[BaseRoute]:
    return [
        *sandboxes.report_routes(api),  # first, as `/sandboxes/metrics` could be an id as well
        *sandboxes.sandbox_routes(api),
        *sandboxes.timeout_routes(api),
        *sandboxes.pause_routes(api),
        *snapshots.snapshot_routes(api),
        *network.network_routes(api),
        *volumes.volume_routes(api, secret),
        *templates.build_routes(api, api.config, secret),  # before the templates, whose names may be paths
        *templates.template_routes(api, api.config),
        *(api.route(method, path, api.unsupported(why)) for method, path, why in _UNSUPPORTED_ROUTES),
    ]


class E2b:
    """Serves requests under `/e2b`, requests for ports of sandboxes and for `api.DOMAIN`, and signed file URLs."""

    def __init__(self, engine: Engine, gatekeeper: Gatekeeper, config: Config, secret: bytes):
        self._domain = config.server.domain
        self.registry = E2bSandboxes(engine, E2bTokens(secret))
        control = E2bContext(engine, gatekeeper, self.registry, config)
        self._control = _plane_router("control plane", _control_plane_routes(control, secret))
        self._own_ports: dict[int, ASGIApp] = {
            ENVD_PORT: _plane_router("envd", envd.envd_routes(self.registry, config)),
            CODE_PORT: _plane_router("code server", code.code_routes(self.registry, config)),
        }
        self._programs: ASGIApp = PortProxy(self, ForwardedHeaders(PRIVATE_HEADERS, gatekeeper.knows))
        self._entrance = DialectEndpoint(self, self._choose_plane)
        self._open_entrance = CrossOriginAccess(self._entrance)

    def claims_request(self, scope: Scope) -> bool:
        """Whether a request outside of `/e2b` is for this dialect."""
        try:
            for_sandbox = is_signed_file_url(scope) or port_target_of(scope, self._domain) is not None
        except errors.InvalidRequest:
            return True
        return for_sandbox or is_api_host(scope, self._domain)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._open_websocket(scope, receive, send)
            return
        try:
            target = port_target_of(scope, self._domain)
        except errors.InvalidRequest:
            await self._entrance(scope, receive, _forbid_caching(send))
            return
        for_own_port = is_signed_file_url(scope) if target is None else target.port in self._own_ports
        entrance = self._open_entrance if for_own_port else self._entrance
        await entrance(scope, receive, send if target is not None and target.by_host else _forbid_caching(send))

    async def _choose_plane(self, request: Request) -> ASGIApp:
        scope = request.scope
        target = port_target_of(scope, self._domain)
        if target is not None:
            await self._enter_sandbox_port(request, target)
            if target.port in self._own_ports:  # visitors of a program do not get the limits
                charge_sandbox_owner(scope, scope["state"]["sandbox"])
            return self._own_ports.get(target.port, self._programs)
        strip_e2b_prefix(scope)
        if not is_signed_file_url(scope):
            return self._control
        signer = await find_url_signer(request, self.registry)
        require_port_access(request, signer, ENVD_PORT)
        scope["state"][HOST_OWNER_STATE] = signer.owner
        scope["state"].update(e2b_sandbox=await self.registry.awake(signer), port=ENVD_PORT)
        return self._own_ports[ENVD_PORT]

    async def _enter_sandbox_port(self, connection: HTTPConnection, target: PortTarget) -> None:
        """Checks the token and finds the sandbox, before the application on its port sees the request."""
        if not target.by_host:
            strip_e2b_prefix(connection.scope)
        await self._require_sandbox_token(connection, target)
        found = await self.registry.find(target.sandbox)
        connection.scope["state"][HOST_OWNER_STATE] = found.owner  # it may take a while to wake it
        e2b_sandbox = await self.registry.awake(found)
        connection.scope["state"].update(
            e2b_sandbox=e2b_sandbox,
            sandbox=e2b_sandbox.sandbox,
            port=target.port,
            host=e2b_sandbox.host_for(target.port),
        )

    async def _require_sandbox_token(self, connection: HTTPConnection, target: PortTarget) -> None:
        """Raises Unauthenticated or Forbidden without access, whether or not the sandbox exists.

        Neither the response nor its timing reveals the difference: every refusal includes a lookup in the records.
        """
        known = self.registry.running(target.sandbox)
        if known is not None and may_enter_port(connection, known, target.port):
            return
        require_port_access(connection, await self.registry.lock(target.sandbox), target.port)

    async def _open_websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Only programs inside sandboxes speak WebSocket in this dialect."""
        connection = HTTPConnection(scope)
        try:
            target = port_target_of(scope, self._domain)
            if target is None or target.port in self._own_ports:
                raise errors.InvalidRequest("there is no WebSocket here: only programs inside sandboxes may have one")
            await self._enter_sandbox_port(connection, target)
        except errors.ClocheError as error:
            await self.render_error(error, connection)(scope, receive, send)
        else:
            await self._programs(scope, receive, send)

    def render_error(self, error: errors.ClocheError, request: HTTPConnection) -> Response:
        """Renders errors that occur in front of a sandbox's ports."""
        if isinstance(error, errors.Unauthenticated):
            return error_reply(401, str(error))
        if isinstance(error, errors.InvalidRequest):
            signed = is_signed_file_url(request.scope)
            return error_reply(400, str(error)) if signed else PlainTextResponse(str(error), 400)
        target = port_target_of(request.scope, self._domain)
        id = target.sandbox if target is not None else ""
        status, message = status_of(error), str(error)
        if isinstance(error, errors.PortNotOpen):
            status, message = 502, f"The sandbox is running but port is not open: {error}"
        elif isinstance(error, (errors.NotFound, *SANDBOX_AWAY_ERRORS)):
            status, message = 502, self._absence_message(error, request, id)
        return json_reply({"sandboxId": id, "message": message, "code": status}, status)

    def _absence_message(self, error: errors.ClocheError, request: HTTPConnection, id: str) -> str:
        """Clients search for "was not found". The reason is shown only with a token of that sandbox."""
        tokens, headers = self.registry.tokens, request.headers
        known = secrets_match(headers.get(ACCESS_HEADER), tokens.access(id)) or secrets_match(
            headers.get(TRAFFIC_HEADER), tokens.traffic(id)
        )
        return f"The sandbox was not found: {error}" if known else "The sandbox was not found"
