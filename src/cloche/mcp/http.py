"""`/mcp`: streamable HTTP with our keys. Its other modules are imported when the first client comes."""

from __future__ import annotations

import asyncio
import importlib
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from cloche import errors, mcp
from cloche.api.auth import Gatekeeper
from cloche.api.http import DialectEndpoint, read_decoded, request_id, status_of
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.events import decode_json
from cloche.json_text import TooComplexJson, check_json
from cloche.mcp.schemas import escape_values
from cloche.model import KIB, MIB, Principal

if TYPE_CHECKING:
    from cloche.mcp.sessions import McpSession, McpSessions

# JSON-RPC messages of `/mcp`: one per request. Pure decoding, pure encoding.

PARSE_ERROR, INVALID_REQUEST, INTERNAL_ERROR = -32700, -32600, -32603
UNSUPPORTED_VERSION = -32022
REQUEST_CANCELLED = -32800
MAX_INITIALIZE_BYTES = 64 * KIB  # of `initialize`: a session keeps the client's description of itself
MAX_SLOW_PARSE_BYTES = 8 * MIB  # of a message with halves of surrogates
ESCAPED_LINE_ENDS = {end.encode(): f"\\u{ord(end):04x}".encode() for end in "\u0085\u2028\u2029"}
JSON_TYPE = "application/json"

RpcId = int | str


class RpcMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A request, a notification (no id), or an unsolicited response (no method)."""

    jsonrpc: str
    method: str | None = None
    id: RpcId | None = None
    params: dict[str, Any] | None = None

    @property
    def meta(self) -> dict[str, Any]:
        found = (self.params or {}).get("_meta")
        return found if isinstance(found, dict) else {}

    @property
    def progress_token(self) -> RpcId | None:
        token = self.meta.get("progressToken")
        return token if isinstance(token, int | str) and not isinstance(token, bool) else None


class NotJson(errors.InvalidRequest):
    """A body that is not JSON."""


def decode_message(body: bytes) -> RpcMessage:
    """Decodes a message. Raises InvalidRequest that names the problem."""
    if body[:1] == b"[":
        raise errors.InvalidRequest("one message at a time: batches are not part of the protocol any more")
    try:
        check_json(body)
        message: RpcMessage = decode_json(body, RpcMessage, MAX_SLOW_PARSE_BYTES)
    except msgspec.ValidationError as error:
        raise errors.InvalidRequest(f"not a JSON-RPC message: {error}") from None
    except TooComplexJson as error:
        raise errors.InvalidRequest(f"not a message that is read here: {error}") from None
    except ValueError as error:
        raise NotJson(f"the body is no valid JSON: {error}") from None
    if message.jsonrpc != "2.0":
        raise errors.InvalidRequest('not a JSON-RPC message: it needs "jsonrpc": "2.0"')
    if message.method == "initialize" and len(body) > MAX_INITIALIZE_BYTES:
        raise errors.TooLarge(
            f"a client's initialize message can have {MAX_INITIALIZE_BYTES} bytes at most, not {len(body)}"
        )
    return message


def encode_json(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(escape_values(value))


def encode_result(id: RpcId, result: dict[str, Any]) -> bytes:
    return encode_json({"jsonrpc": "2.0", "id": id, "result": result})


def encode_error(id: RpcId | None, code: int, message: str, data: Any = None) -> bytes:
    error = {"code": code, "message": message}
    return encode_json({"jsonrpc": "2.0", "id": id, "error": error if data is None else {**error, "data": data}})


def encode_notification(method: str, params: dict[str, Any] | None) -> bytes:
    told = {"jsonrpc": "2.0", "method": method}
    return encode_json(told if params is None else {**told, "params": params})


def encode_event(message: bytes) -> bytes:
    """Encodes one server-sent event. Some clients split lines at every line end that Unicode has."""
    if not message.isascii():
        for line_end, escaped in ESCAPED_LINE_ENDS.items():
            message = message.replace(line_end, escaped)
    return b"event: message\ndata: " + message + b"\n\n"


class McpErrorRenderer:
    """Renders errors of `/mcp` outside of tool calls."""

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        status = status_of(error)
        code = PARSE_ERROR if isinstance(error, NotJson) else INVALID_REQUEST if status < 500 else INTERNAL_ERROR
        body = encode_error(None, code, str(error), {"code": error.code, "request_id": request_id(request)})
        headers = {"www-authenticate": 'Bearer realm="cloche"'} if status == 401 else None
        return Response(body, status, headers, JSON_TYPE)


MCP_PATH = "/mcp"
MAX_BODY_BYTES = 32 * MIB
SESSION_HEADER = "mcp-session-id"
ALLOWED_METHODS = "GET, POST, DELETE"


class McpDialect:
    """The dialect."""

    def __init__(self, engine: Engine, gatekeeper: Gatekeeper, config: Config):
        self._engine = engine
        self._gatekeeper = gatekeeper
        self._config = config
        self._sessions: McpSessions | None = None
        self._loading = asyncio.Lock()
        self._closed = False
        dialect = McpErrorRenderer()
        paths = (MCP_PATH, f"{MCP_PATH}/")
        handlers = {"POST": self._handle_post, "GET": self._handle_get, "DELETE": self._handle_delete}
        routes = [
            Route(path, DialectEndpoint(dialect, each), methods=[name])
            for path in paths
            for name, each in handlers.items()
        ]
        routes += [Route(path, DialectEndpoint(dialect, _raise_wrong_method)) for path in paths]
        self._router = Router(routes, redirect_slashes=False, default=DialectEndpoint(dialect, _raise_no_route))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000, "reason": "no such route"})
            return
        await self._router(scope, receive, send)

    async def aclose(self) -> None:
        """Ends all sessions with their sandboxes. New ones are refused."""
        self._closed = True
        if self._sessions is not None:
            await self._sessions.aclose()

    async def end_all(self, owner: str) -> None:
        """Ends the sessions of that owner, with their sandboxes."""
        if self._sessions is not None:
            await self._sessions.end_all(owner)

    async def _handle_post(self, request: Request) -> ASGIApp:
        principal = self._admit_request(request)
        message = await read_decoded(request, decode_message, MAX_BODY_BYTES)
        sessions = await self._load_sessions()
        refusal = sessions.refusal(request, message)
        if refusal is not None:
            return refusal
        if message.method == "initialize" and SESSION_HEADER not in request.headers:
            return await sessions.begin(request, principal, message)
        return await self._find_session(request, sessions, principal, message).take(request, message)

    async def _handle_get(self, request: Request) -> ASGIApp:
        principal = self._admit_request(request)
        sessions = await self._load_sessions()
        return self._find_session(request, sessions, principal).listen()

    async def _handle_delete(self, request: Request) -> Response:
        principal = self._admit_request(request)
        sessions = await self._load_sessions()
        await sessions.end(self._find_session(request, sessions, principal))
        return Response(status_code=204)

    def _admit_request(self, request: Request) -> Principal:
        """Raises Unauthenticated, Forbidden."""
        principal = self._gatekeeper.admit(request)
        self._check_origin(request)
        return principal

    def _check_origin(self, request: Request) -> None:
        """Raises Forbidden for a page of another site, even with a valid key."""
        origin = request.headers.get("origin")
        if origin is None or origin in self._config.mcp.origins:
            return
        own = {f"{scheme}://{request.headers.get('host')}" for scheme in ("http", "https")}
        public = urlsplit(self._config.server.public_url)
        if origin not in own | {f"{public.scheme}://{public.netloc}"}:
            raise errors.Forbidden("web pages of other sites are not served: the operator lists those in mcp.origins")

    def _find_session(
        self, request: Request, sessions: McpSessions, principal: Principal, message: RpcMessage | None = None
    ) -> McpSession:
        """Finds the session. Raises InvalidRequest without a session's id, NotFound for another owner's."""
        id = request.headers.get(SESSION_HEADER)
        if id is None:
            what = "this" if message is None else str(message.method)[:100]
            raise errors.InvalidRequest(f"{what} needs a session: begin with initialize, then send its Mcp-Session-Id")
        return sessions.get(id, principal.owner)

    async def _load_sessions(self) -> McpSessions:
        """Imports the sessions in a thread: the import takes most of a second.

        Raises ShuttingDown, and Unavailable that names the missing package.
        """
        if self._closed:
            raise errors.ShuttingDown("the server is about to stop")
        if self._sessions is not None:
            return self._sessions
        async with self._loading:
            if self._sessions is None:
                mcp.check_installed()
                module = await asyncio.to_thread(importlib.import_module, "cloche.mcp.sessions")
                self._sessions = module.McpSessions(self._engine, self._config)
            return self._sessions


async def _raise_no_route(request: Request) -> Response:
    raise errors.NotFound(f"no such route: MCP is at {MCP_PATH}")


async def _raise_wrong_method(request: Request) -> Response:
    raise errors.InvalidRequest(f"{request.method} is not allowed on this path: use {ALLOWED_METHODS}")
