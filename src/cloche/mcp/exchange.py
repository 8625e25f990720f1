"""One request of a session, and its answer: JSON if it is quick, else a stream of events that ends with it.

This module imports `mcp`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import anyio
from mcp.server.runner import ServerRunner, modern_error_data
from mcp.shared.dispatcher import CallOptions
from mcp.shared.exceptions import NoBackChannelError
from mcp.shared.transport_context import TransportContext
from mcp_types import INVALID_PARAMS
from mcp_types.version import is_version_at_least
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from cloche import errors
from cloche.api.http import wait_for_disconnect
from cloche.mcp import http, tools
from cloche.mcp.call import MAX_ANSWER_BYTES
from cloche.mcp.http import RpcMessage
from cloche.mcp.server import LINKS_SINCE_VERSION
from cloche.mcp.workspace import McpWorkspace

if TYPE_CHECKING:
    from cloche.mcp.sessions import McpSession

QUIET_SECONDS = 15.0  # without an answer, after which the stream begins: a proxy in between could time out
MAX_EVENT_BYTES = 900_000  # of an answer over a stream: clients take a mebibyte in one event
MAX_WAITING_NOTICES = 64  # unread notices
PING_EVENT = b": ping\n\n"
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
