"""The sessions of `/mcp`: each belongs to an owner, has a workspace, and ends after a time without use.

This module imports `mcp`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import anyio
from mcp.server.connection import Connection
from mcp.server.runner import ServerRunner, aclose_shielded, modern_error_data
from mcp.shared.dispatcher import CallOptions
from mcp.shared.exceptions import NoBackChannelError
from mcp.shared.transport_context import TransportContext
from mcp_types import INVALID_PARAMS
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, is_version_at_least
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cloche import errors
from cloche.api.http import StreamResponse, wait_for_disconnect
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.mcp import http, tools
from cloche.mcp.backend import LocalSandboxBackend
from cloche.mcp.call import MAX_ANSWER_BYTES
from cloche.mcp.http import SESSION_HEADER, RpcId, RpcMessage
from cloche.mcp.server import LINKS_SINCE_VERSION, create_server, server_options
from cloche.mcp.workspace import McpWorkspace
from cloche.model import Principal, SandboxSpec
from cloche.telemetry import log

MAX_CALLS = 64  # of one session at once
MAX_WAITING_NOTIFICATIONS = 100  # that wait for a client which lost its stream
PING_SECONDS = 15.0
PING_EVENT = b": ping\n\n"
VERSION_HEADER = "mcp-protocol-version"
SANDBOX_METADATA = {"made_by": "mcp"}


class NotificationStream:
    """Notifications to a session's client outside of responses, over its open stream. Duplicates are sent once."""

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
        if self._listener and len(self._waiting) < MAX_WAITING_NOTIFICATIONS:
            self._waiting[http.encode_notification(method, None if params is None else dict(params))] = None
            self._came.set()

    def end(self) -> None:
        self.ended.set()
        self._came.set()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields events until the session ends, or another stream replaces this one: a client may reconnect."""
        self._listener = own = self._listener + 1
        self._came.set()
        while True:
            self._came.clear()
            for message in list(self._waiting):
                del self._waiting[message]
                yield http.encode_event(message)
            if self.ended.is_set() or self._listener != own:
                return
            await self._came.wait()


class McpSession:
    def __init__(
        self, id: str, owner: str, workspace: McpWorkspace, runner: ServerRunner[McpWorkspace], news: NotificationStream
    ):
        self.id = id
        self.owner = owner
        self.workspace = workspace
        self.runner = runner
        self.news = news
        self.calls: dict[RpcId, asyncio.Task[bytes]] = {}
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

    async def take(self, request: Request, message: RpcMessage) -> ASGIApp:
        """Returns the response to a message. Raises InvalidRequest, QuotaExceeded."""
        self.used()
        if message.method is None:
            return Response(status_code=202)
        if message.id is None:
            await self._on_notification(message)
            return Response(status_code=202)
        if message.id in self.calls:
            raise errors.InvalidRequest(f"a request with the id {message.id!r} is being answered: ids are used once")
        if len(self.calls) >= MAX_CALLS:
            raise errors.QuotaExceeded(f"this session waits for {MAX_CALLS} answers already", retry_after_seconds=1.0)
        return McpExchange(self, request, message)

    async def _on_notification(self, message: RpcMessage) -> None:
        if message.method == "notifications/cancelled":
            self.cancel((message.params or {}).get("requestId"))
        else:
            await self.runner.on_notify(NotificationContext(), str(message.method), message.params)

    def cancel(self, id: object) -> None:
        task = self.calls.get(id) if isinstance(id, int | str) else None
        if task is not None:
            task.cancel()

    def listen(self) -> ASGIApp:
        self.used()
        return StreamResponse(
            self._stream_events(),
            media_type="text/event-stream",
            headers={"cache-control": "no-cache, no-transform", "x-accel-buffering": "no", SESSION_HEADER: self.id},
            at_once=True,
            quiet_seconds=PING_SECONDS,
            keepalive=PING_EVENT,
            until=self._wait_until_ended,
        )

    async def _wait_until_ended(self) -> None:
        await self.news.ended.wait()

    async def _stream_events(self) -> AsyncGenerator[bytes, None]:
        self.listeners += 1
        try:
            async for event in self.news.events():
                yield event
        finally:
            self.listeners -= 1
            self.used()

    async def aclose(self) -> None:
        """Cancels the calls in progress, and ends the sandboxes. Harmless when closed."""
        self.news.end()
        calls = list(self.calls.values())
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await self.workspace.aclose()
        await aclose_shielded(self.runner.connection)


class McpSessions:
    """All sessions of a server."""

    def __init__(self, engine: Engine, config: Config):
        self._engine = engine
        self._config = config
        self._server = create_server()
        self._options = server_options(self._server)
        self._all: dict[str, McpSession] = {}
        self._counts: Counter[str] = Counter()  # by owner
        self._watching: dict[str, asyncio.Task[None]] = {}  # until they are idle

    def get(self, id: str, owner: str) -> McpSession:
        """Returns the session. Raises NotFound, with the same message for another owner's."""
        found = self._all.get(id)
        if found is None or found.owner != owner:
            raise errors.NotFound("there is no such session, or it has ended: begin a new one with initialize")
        return found

    def refusal(self, request: Request, message: RpcMessage) -> Response | None:
        """The response to a protocol version without sessions, in which no state could be kept; None for others.

        Clients then fall back to a version with sessions.
        """
        version = request.headers.get(VERSION_HEADER)
        if message.method != "server/discover" and (version is None or version in HANDSHAKE_PROTOCOL_VERSIONS):
            return None
        data = {"supported": list(HANDSHAKE_PROTOCOL_VERSIONS), "requested": (version or "")[:100]}
        words = "state is kept in sessions here: use initialize, of a version that has sessions"
        return Response(
            http.encode_error(message.id, http.UNSUPPORTED_VERSION, words, data), 400, media_type=http.JSON_TYPE
        )

    async def begin(self, request: Request, principal: Principal, message: RpcMessage) -> Response:
        """Begins a session. Raises QuotaExceeded, InvalidRequest."""
        if message.id is None:
            raise errors.InvalidRequest("initialize needs an id")
        if self._counts[principal.owner] >= self._config.mcp.sessions_per_owner:
            raise errors.QuotaExceeded(
                f"{self._config.mcp.sessions_per_owner} sessions are open, the maximum of an owner: end "
                "one, or wait until one is idle for long enough",
                retry_after_seconds=60.0,
            )
        session = self._create_session(principal, _parse_query(request))
        begun, body = await answer_by_package(
            session.runner, NotificationContext(), message
        )  # at once: it waits for nothing
        if begun:
            self._register_session(session)
        return Response(body, headers={SESSION_HEADER: session.id} if begun else None, media_type=http.JSON_TYPE)

    def _create_session(self, principal: Principal, options: Mapping[str, str]) -> McpSession:
        spec = SandboxSpec(
            template=options.get("template", "python"),
            owner=principal.owner,
            metadata=SANDBOX_METADATA,
            lifetime_seconds=self._config.lifetime.max_seconds,
        )
        names = tools.ALL_TOOL_NAMES
        if "tools" in options:
            names = tools.check_tool_names(frozenset(options["tools"].split(",")))
        place = LocalSandboxBackend(self._engine, spec)
        workspace = McpWorkspace(place, spec.template, attached=options.get("sandbox", ""), tools=names)
        id, news = f"mcp_{secrets.token_hex(16)}", NotificationStream()
        connection = Connection.for_loop(news, session_id=id)
        runner = ServerRunner(self._server, connection, workspace, init_options=self._options)
        return McpSession(id, principal.owner, workspace, runner, news)

    def _register_session(self, session: McpSession) -> None:
        self._all[session.id] = session
        self._counts[session.owner] += 1
        self._watching[session.id] = asyncio.create_task(self._end_when_idle(session))
        log.info("mcp.began", owner=session.owner, sessions=len(self._all))

    async def _end_when_idle(self, session: McpSession) -> None:
        idle = self._config.mcp.idle_seconds
        while (left := session.used_at + idle - time.monotonic()) > 0 or session.busy:
            await asyncio.sleep(left if left > 0 else idle)
        await self.end(session)

    async def end(self, session: McpSession) -> None:
        """Harmless when it has ended."""
        if self._all.pop(session.id, None) is None:
            return
        self._counts[session.owner] -= 1
        self._counts += Counter()  # removes owners without sessions
        watching = self._watching.pop(session.id)
        if watching is not asyncio.current_task():
            watching.cancel()
        await session.aclose()
        log.info("mcp.ended", owner=session.owner, sessions=len(self._all))

    async def end_all(self, owner: str) -> None:
        await asyncio.gather(*(self.end(each) for each in list(self._all.values()) if each.owner == owner))

    async def aclose(self) -> None:
        await asyncio.gather(*map(self.end, list(self._all.values())))


def _parse_query(request: Request) -> dict[str, str]:
    """The sandbox options in the query of a client's URL. Raises InvalidRequest for unknown ones."""
    found = dict(request.query_params)
    unknown = found.keys() - {"template", "sandbox", "tools"}
    if unknown:
        raise errors.InvalidRequest(
            f"the address may have template, sandbox and tools, not {sorted(unknown)[0][:100]!r}"
        )
    return found


# --- One request of a session, and its answer: JSON if it is quick, else a stream of events that ends with it.

QUIET_SECONDS = 15.0  # without an answer, after which the stream begins: a proxy in between could time out
MAX_EVENT_BYTES = 900_000  # of an answer over a stream: clients take a mebibyte in one event
MAX_WAITING_NOTICES = 64  # unread notices
TRANSPORT_CONTEXT = TransportContext(kind="streamable-http", can_send_request=False)
JSON_HEADER = (b"content-type", b"application/json")
STREAM_HEADERS = ((b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache, no-transform"),
                  (b"x-accel-buffering", b"no"))  # fmt: skip


class NotificationContext:
    """The package's context of a notification, which has no answer."""

    transport = TRANSPORT_CONTEXT
    can_send_request = False
    request_id: Any = None
    message_metadata: Any = None

    def __init__(self) -> None:
        self.cancel_requested = anyio.Event()

    async def send_raw_request(
        self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None
    ) -> dict[str, Any]:
        raise NoBackChannelError(method)

    async def notify(self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None) -> None:
        pass

    async def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        pass


class McpRequestContext(NotificationContext):
    """The package's context of a request: its notifications go into its own answer."""

    def __init__(self, exchange: McpExchange, id: http.RpcId):
        super().__init__()
        self.request_id = id
        self._exchange = exchange

    async def notify(self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None) -> None:
        self._exchange.put(http.encode_notification(method, None if params is None else dict(params)))


class McpExchange:
    """The ASGI response to a request. It is also the tool's channel to the client meanwhile."""

    def __init__(self, session: McpSession, request: Request, message: RpcMessage):
        assert message.id is not None
        self._session = session
        self._message = message
        self._id = message.id
        self._token = message.progress_token
        self._streams = "text/event-stream" in request.headers.get("accept", "")
        self._waiting: list[bytes] = []
        self._stirred = asyncio.Event()
        self._begun = False

    # -- as ClientChannel

    @property
    def wants_progress(self) -> bool:
        return self._token is not None and self._streams

    @property
    def knows_links(self) -> bool:
        return is_version_at_least(self._session.version, LINKS_SINCE_VERSION)

    @property
    def most_bytes(self) -> int:
        return MAX_EVENT_BYTES if self._begun or self._waiting else MAX_ANSWER_BYTES

    async def progress(self, count: int, message: str) -> None:
        told = {"progressToken": self._token, "progress": count, "message": message}
        self.put(http.encode_notification("notifications/progress", told))

    async def resources_changed(self) -> None:
        await self._session.news.notify("notifications/resources/list_changed", None)

    def put(self, notice: bytes) -> None:
        if self._streams and len(self._waiting) < MAX_WAITING_NOTICES:
            self._waiting.append(notice)
            self._stirred.set()

    # -- the answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        working = asyncio.ensure_future(self._compute_answer())
        leaving = asyncio.ensure_future(wait_for_disconnect(receive))
        self._session.calls[self._id] = working
        for task in (working, leaving):
            task.add_done_callback(self._wake_up)
        try:
            await self._wait_for_answer(working, leaving, send)
        finally:
            leaving.cancel()
            working.cancel()
            await asyncio.wait((working, leaving))
            del self._session.calls[self._id]
            self._session.used()
        await self._send_answer(_answer_body(working, self._id), send)

    def _wake_up(self, task: asyncio.Task[Any]) -> None:
        self._stirred.set()

    async def _wait_for_answer(self, working: asyncio.Task[bytes], leaving: asyncio.Task[None], send: Send) -> None:
        """Waits for the answer. Raises ClientDisconnect: the answer could not be fetched later, so it is cancelled."""
        while not working.done():
            if leaving.done():
                raise ClientDisconnect
            try:
                async with asyncio.timeout(QUIET_SECONDS):
                    await self._stirred.wait()
            except TimeoutError:
                await self._send_ping(send)
            self._stirred.clear()
            await self._send_waiting(send)

    async def _send_ping(self, send: Send) -> None:
        if self._streams:
            await self._start_stream(send)
            await send({"type": "http.response.body", "body": PING_EVENT, "more_body": True})

    async def _send_waiting(self, send: Send) -> None:
        while self._waiting:
            await self._start_stream(send)
            await send(
                {"type": "http.response.body", "body": http.encode_event(self._waiting.pop(0)), "more_body": True}
            )

    async def _start_stream(self, send: Send) -> None:
        if not self._begun:
            self._begun = True
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})

    async def _send_answer(self, body: bytes, send: Send) -> None:
        await self._send_waiting(send)
        if self._begun:
            body = http.encode_event(body)
        else:
            headers = [JSON_HEADER, (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _compute_answer(self) -> bytes:
        message, session = self._message, self._session
        if message.method == "tools/call" and session.runner.connection.initialize_accepted:
            return await self._call_tool(message.params or {})
        return (await answer_by_package(session.runner, McpRequestContext(self, self._id), message))[1]

    async def _call_tool(self, params: dict[str, Any]) -> bytes:
        """Calls the tool directly, not through the package: our own code makes the same checks."""
        name, arguments = params.get("name"), params.get("arguments")
        if not isinstance(name, str) or not (arguments is None or isinstance(arguments, dict)):
            return http.encode_error(self._id, INVALID_PARAMS, "a call has a name, and arguments that are an object")
        try:
            done = await tools.call_tool(self._session.workspace, self, name, arguments)
        except errors.InvalidRequest as error:
            return http.encode_error(self._id, INVALID_PARAMS, str(error), {"code": error.code})
        return http.encode_result(self._id, done.encode())


async def answer_by_package(
    runner: ServerRunner[McpWorkspace], context: NotificationContext, message: RpcMessage
) -> tuple[bool, bytes]:
    """Returns whether the package's answer is a success, and the answer."""
    assert message.id is not None
    try:
        result = await runner.on_request(context, str(message.method), message.params)
    except Exception as error:  # noqa: BLE001 - the dialect's edge
        said = modern_error_data(error)
        return False, http.encode_error(message.id, said.code, said.message, said.data)
    return True, http.encode_result(message.id, result)


def _answer_body(working: asyncio.Task[bytes], id: http.RpcId) -> bytes:
    if working.cancelled():
        return http.encode_error(id, http.REQUEST_CANCELLED, "the request was cancelled")
    return working.result()
