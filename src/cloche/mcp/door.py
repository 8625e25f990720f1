"""`/mcp`: streamable HTTP with our keys. What it needs is imported when the first client comes."""

from __future__ import annotations

import asyncio
import importlib
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from cloche import errors
from cloche.api.auth import Gatekeeper
from cloche.api.http import Edge, whole_body
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.mcp import extra
from cloche.mcp.wire import Dialect, Message, message_of
from cloche.model import KIB, MIB, Principal

if TYPE_CHECKING:
    from cloche.mcp.sessions import Session, Sessions

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
                extra.check_installed()
                module = await asyncio.to_thread(importlib.import_module, "cloche.mcp.sessions")
                self._sessions = module.Sessions(self._engine, self._config)
            return self._sessions


async def _nothing(request: Request) -> Response:
    raise errors.NotFound(f"there is nothing here: MCP is at {PATH}")


async def _wrong_method(request: Request) -> Response:
    raise errors.InvalidRequest(f"{request.method} is not possible there: {METHODS} are")
