"""The sessions of `/mcp`: each belongs to an owner, has a workspace, and ends when nobody uses it any more.

This module imports `mcp`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from mcp.server.connection import Connection
from mcp.server.runner import ServerRunner, aclose_shielded
from mcp.shared.dispatcher import CallOptions
from mcp.shared.exceptions import NoBackChannelError
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from cloche import errors
from cloche.api.http import Stream
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.mcp import http
from cloche.mcp import tools as toolbox
from cloche.mcp.backend import NearPlace
from cloche.mcp.exchange import Exchange, Notice, answer_of
from cloche.mcp.http import SESSION, Id, Message
from cloche.mcp.server import options_of, server_of
from cloche.mcp.workspace import Workspace
from cloche.model import Principal, SandboxSpec
from cloche.telemetry import log

MOST_CALLS = 64  # of one session at once
MOST_NEWS = 100  # that wait for a client which lost its stream
PING_SECONDS = 15.0
PING = b": ping\n\n"
VERSION = "mcp-protocol-version"
MADE_BY = {"made_by": "mcp"}


class News:
    """What a session's client is told beside answers, over the stream that it holds open. The same is said once."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, None] = {}
        self._came = asyncio.Event()
        self._listener = 0
        self.ended = asyncio.Event()

    async def send_raw_request(
        self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None
    ) -> dict[str, Any]:
        raise NoBackChannelError(method)

    async def notify(self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None) -> None:
        if self._listener and len(self._waiting) < MOST_NEWS:
            self._waiting[http.notification(method, None if params is None else dict(params))] = None
            self._came.set()

    def end(self) -> None:
        self.ended.set()
        self._came.set()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Until the session ends, or somebody else listens: a client that lost its connection comes back."""
        self._listener = own = self._listener + 1
        self._came.set()
        while True:
            self._came.clear()
            for message in list(self._waiting):
                del self._waiting[message]
                yield http.event(message)
            if self.ended.is_set() or self._listener != own:
                return
            await self._came.wait()


class Session:
    def __init__(self, id: str, owner: str, workspace: Workspace, runner: ServerRunner[Workspace], news: News):
        self.id = id
        self.owner = owner
        self.workspace = workspace
        self.runner = runner
        self.news = news
        self.calls: dict[Id, asyncio.Task[bytes]] = {}
        self.used_at = time.monotonic()
        self.listeners = 0

    @property
    def busy(self) -> bool:
        return bool(self.calls or self.listeners)

    @property
    def version(self) -> str:
        return self.runner.connection.protocol_version

    def used(self) -> None:
        self.used_at = time.monotonic()

    async def take(self, request: Request, message: Message) -> ASGIApp:
        """Answers. Raises InvalidRequest, QuotaExceeded."""
        self.used()
        if message.method is None:
            return Response(status_code=202)
        if message.id is None:
            await self._hear(message)
            return Response(status_code=202)
        if message.id in self.calls:
            raise errors.InvalidRequest(f"a request with the id {message.id!r} is being answered: ids are used once")
        if len(self.calls) >= MOST_CALLS:
            raise errors.QuotaExceeded(f"this session waits for {MOST_CALLS} answers already", retry_after_seconds=1.0)
        return Exchange(self, request, message)

    async def _hear(self, message: Message) -> None:
        if message.method == "notifications/cancelled":
            self.cancel((message.params or {}).get("requestId"))
        else:
            await self.runner.on_notify(Notice(), str(message.method), message.params)

    def cancel(self, id: object) -> None:
        task = self.calls.get(id) if isinstance(id, int | str) else None
        if task is not None:
            task.cancel()

    def listen(self) -> ASGIApp:
        self.used()
        return Stream(
            self._events(),
            media_type="text/event-stream",
            headers={"cache-control": "no-cache, no-transform", "x-accel-buffering": "no", SESSION: self.id},
            at_once=True,
            quiet_seconds=PING_SECONDS,
            keepalive=PING,
            until=self._ended,
        )

    async def _ended(self) -> None:
        await self.news.ended.wait()

    async def _events(self) -> AsyncGenerator[bytes, None]:
        self.listeners += 1
        try:
            async for event in self.news.events():
                yield event
        finally:
            self.listeners -= 1
            self.used()

    async def aclose(self) -> None:
        """What is being answered is cancelled, and its sandboxes end. Harmless when closed."""
        self.news.end()
        calls = list(self.calls.values())
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await self.workspace.aclose()
        await aclose_shielded(self.runner.connection)


class Sessions:
    """All of a server."""

    def __init__(self, engine: Engine, config: Config):
        self._engine = engine
        self._config = config
        self._server = server_of()
        self._options = options_of(self._server)
        self._all: dict[str, Session] = {}
        self._counts: Counter[str] = Counter()  # by owner
        self._watching: dict[str, asyncio.Task[None]] = {}  # until they are idle

    def get(self, id: str, owner: str) -> Session:
        """Raises NotFound, for another owner's in the same words."""
        found = self._all.get(id)
        if found is None or found.owner != owner:
            raise errors.NotFound("there is no such session, or it has ended: begin a new one with initialize")
        return found

    def refusal(self, request: Request, message: Message) -> Response | None:
        """For a version of the protocol that has no sessions, in which no state could be kept. Clients go back to one
        that has."""
        asked = request.headers.get(VERSION)
        if message.method != "server/discover" and (asked is None or asked in HANDSHAKE_PROTOCOL_VERSIONS):
            return None
        data = {"supported": list(HANDSHAKE_PROTOCOL_VERSIONS), "requested": (asked or "")[:100]}
        words = "state is kept in sessions here: use initialize, of a version that has sessions"
        return Response(http.failure(message.id, http.UNSUPPORTED_VERSION, words, data), 400, media_type=http.JSON)

    async def begin(self, request: Request, principal: Principal, message: Message) -> Response:
        """Raises QuotaExceeded, InvalidRequest."""
        if message.id is None:
            raise errors.InvalidRequest("initialize needs an id")
        if self._counts[principal.owner] >= self._config.mcp.sessions_per_owner:
            raise errors.QuotaExceeded(
                f"{self._config.mcp.sessions_per_owner} sessions are open, which is as many as an owner may have: end "
                "one, or wait until one is idle for long enough",
                retry_after_seconds=60.0,
            )
        session = self._new(principal, _query(request))
        begun, body = await answer_of(session.runner, Notice(), message)  # at once: it waits for nothing
        if begun:
            self._keep(session)
        return Response(body, headers={SESSION: session.id} if begun else None, media_type=http.JSON)

    def _new(self, principal: Principal, asked: Mapping[str, str]) -> Session:
        spec = SandboxSpec(
            template=asked.get("template", "python"),
            owner=principal.owner,
            metadata=MADE_BY,
            lifetime_seconds=self._config.lifetime.max_seconds,
        )
        tools = toolbox.checked(frozenset(asked["tools"].split(","))) if "tools" in asked else toolbox.ALL
        place = NearPlace(self._engine, spec)
        workspace = Workspace(place, spec.template, attached=asked.get("sandbox", ""), tools=tools)
        id, news = f"mcp_{secrets.token_hex(16)}", News()
        connection = Connection.for_loop(news, session_id=id)
        runner = ServerRunner(self._server, connection, workspace, init_options=self._options)
        return Session(id, principal.owner, workspace, runner, news)

    def _keep(self, session: Session) -> None:
        self._all[session.id] = session
        self._counts[session.owner] += 1
        self._watching[session.id] = asyncio.create_task(self._end_when_idle(session))
        log.info("mcp.began", owner=session.owner, sessions=len(self._all))

    async def _end_when_idle(self, session: Session) -> None:
        idle = self._config.mcp.idle_seconds
        while (left := session.used_at + idle - time.monotonic()) > 0 or session.busy:
            await asyncio.sleep(left if left > 0 else idle)
        await self.end(session)

    async def end(self, session: Session) -> None:
        """Harmless when it has ended."""
        if self._all.pop(session.id, None) is None:
            return
        self._counts[session.owner] -= 1
        self._counts += Counter()  # forgets owners who have none
        watching = self._watching.pop(session.id)
        if watching is not asyncio.current_task():
            watching.cancel()
        await session.aclose()
        log.info("mcp.ended", owner=session.owner, sessions=len(self._all))

    async def end_all(self, owner: str) -> None:
        await asyncio.gather(*(self.end(each) for each in list(self._all.values()) if each.owner == owner))

    async def aclose(self) -> None:
        await asyncio.gather(*map(self.end, list(self._all.values())))


def _query(request: Request) -> dict[str, str]:
    """What a client's address may say of its sandbox. Raises InvalidRequest for anything else."""
    found = dict(request.query_params)
    unknown = found.keys() - {"template", "sandbox", "tools"}
    if unknown:
        raise errors.InvalidRequest(
            f"the address may have template, sandbox and tools, not {sorted(unknown)[0][:100]!r}"
        )
    return found
