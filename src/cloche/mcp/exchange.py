"""One request of a session, and its answer: JSON where that is there soon, else a stream of events that ends with it.

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
from cloche.mcp import http, tools
from cloche.mcp.call import MOST_BYTES
from cloche.mcp.http import Message
from cloche.mcp.server import LINKS_SINCE
from cloche.mcp.workspace import Workspace

if TYPE_CHECKING:
    from cloche.mcp.sessions import Session

QUIET_SECONDS = 15.0  # without an answer, after which the stream begins: what is between us may give up else
MOST_EVENT_BYTES = 900_000  # of an answer over a stream: clients take a mebibyte in one event
MOST_WAITING = 64  # notices that nobody has read yet
PING = b": ping\n\n"
TRANSPORT = TransportContext(kind="streamable-http", can_send_request=False)
JSON_HEADER = (b"content-type", b"application/json")
STREAM_HEADERS = ((b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache, no-transform"),
                  (b"x-accel-buffering", b"no"))  # fmt: skip


class Notice:
    """The package's context of a message that nobody waits for."""

    transport = TRANSPORT
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


class Asked(Notice):
    """The same of a request: what is told meanwhile goes into its own answer."""

    def __init__(self, exchange: Exchange, id: http.Id):
        super().__init__()
        self.request_id = id
        self._exchange = exchange

    async def notify(self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None) -> None:
        self._exchange.put(http.notification(method, None if params is None else dict(params)))


class Exchange:
    """The ASGI answer. It is also how the tool's client is told of things meanwhile."""

    def __init__(self, session: Session, request: Request, message: Message):
        assert message.id is not None
        self._session = session
        self._message = message
        self._id = message.id
        self._token = message.progress_token
        self._streams = "text/event-stream" in request.headers.get("accept", "")
        self._waiting: list[bytes] = []
        self._stirred = asyncio.Event()
        self._begun = False

    # -- as Told

    @property
    def wants_progress(self) -> bool:
        return self._token is not None and self._streams

    @property
    def knows_links(self) -> bool:
        return is_version_at_least(self._session.version, LINKS_SINCE)

    @property
    def most_bytes(self) -> int:
        return MOST_EVENT_BYTES if self._begun or self._waiting else MOST_BYTES

    async def progress(self, count: int, message: str) -> None:
        told = {"progressToken": self._token, "progress": count, "message": message}
        self.put(http.notification("notifications/progress", told))

    async def resources_changed(self) -> None:
        await self._session.news.notify("notifications/resources/list_changed", None)

    def put(self, notice: bytes) -> None:
        if self._streams and len(self._waiting) < MOST_WAITING:
            self._waiting.append(notice)
            self._stirred.set()

    # -- the answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        working = asyncio.ensure_future(self._answer())
        leaving = asyncio.ensure_future(_left(receive))
        self._session.calls[self._id] = working
        for task in (working, leaving):
            task.add_done_callback(self._stir)
        try:
            await self._attend(working, leaving, send)
        finally:
            leaving.cancel()
            working.cancel()
            await asyncio.wait((working, leaving))
            del self._session.calls[self._id]
            self._session.used()
        await self._finish(_said(working, self._id), send)

    def _stir(self, task: asyncio.Task[Any]) -> None:
        self._stirred.set()

    async def _attend(self, working: asyncio.Task[bytes], leaving: asyncio.Task[None], send: Send) -> None:
        """Until the answer is there. Raises ClientDisconnect: nobody could fetch it later, so it is given up."""
        while not working.done():
            if leaving.done():
                raise ClientDisconnect
            try:
                async with asyncio.timeout(QUIET_SECONDS):
                    await self._stirred.wait()
            except TimeoutError:
                await self._ping(send)
            self._stirred.clear()
            await self._send_waiting(send)

    async def _ping(self, send: Send) -> None:
        if self._streams:
            await self._begin(send)
            await send({"type": "http.response.body", "body": PING, "more_body": True})

    async def _send_waiting(self, send: Send) -> None:
        while self._waiting:
            await self._begin(send)
            await send({"type": "http.response.body", "body": http.event(self._waiting.pop(0)), "more_body": True})

    async def _begin(self, send: Send) -> None:
        if not self._begun:
            self._begun = True
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})

    async def _finish(self, body: bytes, send: Send) -> None:
        await self._send_waiting(send)
        if self._begun:
            body = http.event(body)
        else:
            headers = [JSON_HEADER, (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _answer(self) -> bytes:
        message, session = self._message, self._session
        if message.method == "tools/call" and session.runner.connection.initialize_accepted:
            return await self._call(message.params or {})
        return (await answer_of(session.runner, Asked(self, self._id), message))[1]

    async def _call(self, params: dict[str, Any]) -> bytes:
        """By no way through the package: what it would check is ours already."""
        name, arguments = params.get("name"), params.get("arguments")
        if not isinstance(name, str) or not (arguments is None or isinstance(arguments, dict)):
            return http.failure(self._id, INVALID_PARAMS, "a call has a name, and arguments that are an object")
        try:
            done = await tools.call_tool(self._session.workspace, self, name, arguments)
        except errors.InvalidRequest as error:
            return http.failure(self._id, INVALID_PARAMS, str(error), {"code": error.code})
        return http.answer(self._id, done.encode())


async def answer_of(runner: ServerRunner[Workspace], context: Notice, message: Message) -> tuple[bool, bytes]:
    """What the package answers, and whether that is no error."""
    assert message.id is not None
    try:
        result = await runner.on_request(context, str(message.method), message.params)
    except Exception as error:  # noqa: BLE001 - the dialect's edge
        said = modern_error_data(error)
        return False, http.failure(message.id, said.code, said.message, said.data)
    return True, http.answer(message.id, result)


def _said(working: asyncio.Task[bytes], id: http.Id) -> bytes:
    if working.cancelled():
        return http.failure(id, http.CANCELLED, "the request was cancelled")
    return working.result()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
