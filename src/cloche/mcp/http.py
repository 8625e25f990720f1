"""`/mcp`: streamable HTTP with our keys. What it needs is imported when the first client comes."""

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
from cloche.api.http import Edge, request_id, status_of, whole_body
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.mcp.schemas import sayable_values
from cloche.model import KIB, MIB, Principal
from cloche.protocol import responses

if TYPE_CHECKING:
    from cloche.mcp.sessions import Session, Sessions

# JSON-RPC as `/mcp` has it: one message per request. Pure decoding, pure encoding.

PARSE_ERROR, INVALID_REQUEST, INTERNAL_ERROR = -32700, -32600, -32603
UNSUPPORTED_VERSION = -32022
CANCELLED = -32800
MAX_VALUES = 200_000
LINE_ENDS = {end.encode(): f"\\u{ord(end):04x}".encode() for end in "\u0085\u2028\u2029"}
JSON = "application/json"

Id = int | str


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A request, a notification (no id), or an answer to something that we never asked (no method)."""

    jsonrpc: str
    method: str | None = None
    id: Id | None = None
    params: dict[str, Any] | None = None

    @property
    def meta(self) -> dict[str, Any]:
        found = (self.params or {}).get("_meta")
        return found if isinstance(found, dict) else {}

    @property
    def progress_token(self) -> Id | None:
        token = self.meta.get("progressToken")
        return token if isinstance(token, int | str) and not isinstance(token, bool) else None


class NotJson(errors.InvalidRequest):
    """A body that is no message."""


def message_of(body: bytes) -> Message:
    """Raises InvalidRequest that says what is wrong."""
    if body[:1] == b"[":
        raise errors.InvalidRequest("one message at a time: batches are not part of the protocol any more")
    try:
        message: Message = responses.decode(body, Message, MAX_VALUES)
    except msgspec.ValidationError as error:
        raise errors.InvalidRequest(f"this is no JSON-RPC message: {error}") from None
    except ValueError as error:
        raise NotJson(f"the body is no valid JSON: {error}") from None
    if message.jsonrpc != "2.0":
        raise errors.InvalidRequest('this is no JSON-RPC message: it needs "jsonrpc": "2.0"')
    return message


def encoded(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(sayable_values(value))


def answer(id: Id, result: dict[str, Any]) -> bytes:
    return encoded({"jsonrpc": "2.0", "id": id, "result": result})


def failure(id: Id | None, code: int, message: str, data: Any = None) -> bytes:
    error = {"code": code, "message": message}
    return encoded({"jsonrpc": "2.0", "id": id, "error": error if data is None else {**error, "data": data}})


def notification(method: str, params: dict[str, Any] | None) -> bytes:
    told = {"jsonrpc": "2.0", "method": method}
    return encoded(told if params is None else {**told, "params": params})


def event(message: bytes) -> bytes:
    """As one server-sent event. Some clients split lines wherever Unicode has one."""
    if not message.isascii():
        for line_end, escaped in LINE_ENDS.items():
            message = message.replace(line_end, escaped)
    return b"event: message\ndata: " + message + b"\n\n"


class Dialect:
    """How `/mcp` says that something of ours went wrong, before a tool was called."""

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        status = status_of(error)
        code = PARSE_ERROR if isinstance(error, NotJson) else INVALID_REQUEST if status < 500 else INTERNAL_ERROR
        body = failure(None, code, str(error), {"code": error.code, "request_id": request_id(request)})
        headers = {"www-authenticate": 'Bearer realm="cloche"'} if status == 401 else None
        return Response(body, status, headers, JSON)


PATH = "/mcp"
MAX_BODY_BYTES = 32 * MIB
MAX_HELLO_BYTES = 64 * KIB  # of `initialize`: a session keeps what its client says of itself
SESSION = "mcp-session-id"
METHODS = "GET, POST, DELETE"


class Mcp:
    """The dialect."""

    def __init__(self, engine: Engine, gatekeeper: Gatekeeper, config: Config):
        self._engine = engine
        self._gatekeeper = gatekeeper
        self._config = config
        self._sessions: Sessions | None = None
        self._loading = asyncio.Lock()
        self._closed = False
        dialect = Dialect()
        paths = (PATH, f"{PATH}/")
        handlers = {"POST": self._post, "GET": self._get, "DELETE": self._delete}
        routes = [Route(path, Edge(dialect, each), methods=[name]) for path in paths for name, each in handlers.items()]
        routes += [Route(path, Edge(dialect, _wrong_method)) for path in paths]
        self._router = Router(routes, redirect_slashes=False, default=Edge(dialect, _nothing))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000, "reason": "there is nothing here"})
            return
        await self._router(scope, receive, send)

    async def aclose(self) -> None:
        """Ends all sessions, and what they have. New ones are refused."""
        self._closed = True
        if self._sessions is not None:
            await self._sessions.aclose()

    async def end_all(self, owner: str) -> None:
        """Ends the sessions of that owner, and what they have."""
        if self._sessions is not None:
            await self._sessions.end_all(owner)

    async def _post(self, request: Request) -> ASGIApp:
        principal = self._admit(request)
        body = await whole_body(request, MAX_BODY_BYTES)
        message = message_of(body)
        if message.method == "initialize" and len(body) > MAX_HELLO_BYTES:
            raise errors.TooLarge(f"what a client says of itself has {MAX_HELLO_BYTES} bytes at most, not {len(body)}")
        sessions = await self._open()
        refusal = sessions.refusal(request, message)
        if refusal is not None:
            return refusal
        if message.method == "initialize" and SESSION not in request.headers:
            return await sessions.begin(request, principal, message)
        return await self._session(request, sessions, principal, message).take(request, message)

    async def _get(self, request: Request) -> ASGIApp:
        principal = self._admit(request)
        sessions = await self._open()
        return self._session(request, sessions, principal).listen()

    async def _delete(self, request: Request) -> Response:
        principal = self._admit(request)
        sessions = await self._open()
        await sessions.end(self._session(request, sessions, principal))
        return Response(status_code=204)

    def _admit(self, request: Request) -> Principal:
        """Raises Unauthenticated, Forbidden."""
        principal = self._gatekeeper.admit(request)
        self._check_origin(request)
        return principal

    def _check_origin(self, request: Request) -> None:
        """A page of another site must not speak to it, whatever key it has got hold of. Raises Forbidden."""
        origin = request.headers.get("origin")
        if origin is None or origin in self._config.mcp.origins:
            return
        own = {f"{scheme}://{request.headers.get('host')}" for scheme in ("http", "https")}
        public = urlsplit(self._config.server.public_url)
        if origin not in own | {f"{public.scheme}://{public.netloc}"}:
            raise errors.Forbidden("web pages of other sites are not served: the operator lists those in mcp.origins")

    def _session(
        self, request: Request, sessions: Sessions, principal: Principal, message: Message | None = None
    ) -> Session:
        """Raises InvalidRequest without a session's id, SessionNotFound for one that is not theirs."""
        id = request.headers.get(SESSION)
        if id is None:
            what = "this" if message is None else str(message.method)[:100]
            raise errors.InvalidRequest(f"{what} needs a session: begin with initialize, then send its Mcp-Session-Id")
        return sessions.get(id, principal.owner)

    async def _open(self) -> Sessions:
        """Not on the loop: the import takes most of a second.

        Raises ShuttingDown, and Unavailable that says what is not installed.
        """
        if self._closed:
            raise errors.ShuttingDown("the server is about to stop")
        if self._sessions is not None:
            return self._sessions
        async with self._loading:
            if self._sessions is None:
                mcp.check_installed()
                module = await asyncio.to_thread(importlib.import_module, "cloche.mcp.sessions")
                self._sessions = module.Sessions(self._engine, self._config)
            return self._sessions


async def _nothing(request: Request) -> Response:
    raise errors.NotFound(f"there is nothing here: MCP is at {PATH}")


async def _wrong_method(request: Request) -> Response:
    raise errors.InvalidRequest(f"{request.method} is not possible there: {METHODS} are")
