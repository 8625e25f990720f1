"""Programs that listen inside a sandbox, reached through the server: HTTP and WebSocket.

What such a program answers is a stranger's: it is parsed strictly, handed on as it comes, and believed in nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator
from typing import Protocol

import h11
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cloche import errors
from cloche.api.forwarding import HOP_BY_HOP, Outward, RawHeaders, target_of
from cloche.api.http import Dropped, Edge
from cloche.api.websocket_ports import carry_websocket
from cloche.engine.sandboxes.sandbox import Sandbox

READ_BYTES = 1 << 16
MAX_HEAD_BYTES = 1 << 18
STALLED_SECONDS = 60.0  # a program that takes nothing of a body for so long will not
_NO_BODY = (204, 304)


class Errors(Protocol):
    """How the dialect in front says that a port could not be reached."""

    def render_error(self, error: errors.ClocheError, request: HTTPConnection) -> Response: ...


class PortProxy:
    """Carries requests to the port `state["port"]` of the sandbox `state["sandbox"]`."""

    def __init__(self, dialect: Errors, outward: Outward):
        self._dialect = dialect
        self._outward = outward
        self._http = Edge(dialect, self._carry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await self._http(scope, receive, send)
            return
        try:
            await carry_websocket(scope, receive, send, self._outward.headers(scope))
        except errors.ClocheError as error:
            await self._dialect.render_error(error, HTTPConnection(scope))(scope, receive, send)

    async def _carry(self, request: Request) -> ASGIApp:
        sandbox: Sandbox = request.scope["state"]["sandbox"]
        head = _head(request.scope, self._outward.headers(request.scope))
        return _Carried(sandbox, await sandbox.connect_port(request.scope["state"]["port"]), head)


def _head(scope: Scope, headers: RawHeaders) -> h11.Request:
    names = {name for name, _ in scope["headers"]}
    if b"transfer-encoding" in names and b"content-length" not in names:
        headers.append((b"transfer-encoding", b"chunked"))
    headers.append((b"connection", b"close"))
    headers = [(b"Host" if name == b"host" else name, value) for name, value in headers]  # some look for it so
    try:
        return h11.Request(method=scope["method"], target=target_of(scope), headers=headers)
    except h11.LocalProtocolError as error:
        raise errors.InvalidRequest(f"this request cannot be carried to a port: {error}") from None


class _Carried:
    """One request on a connection of its own, as an ASGI application that answers with what comes back.

    It reads and writes the socket itself: asyncio's streams forget what came in once a write has failed, and a program
    may well answer and close before it has read everything.
    """

    def __init__(self, sandbox: Sandbox, connection: socket.socket, head: h11.Request):
        self._sandbox = sandbox
        self._connection = connection
        self._head = head
        self._wire = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._loop = asyncio.get_running_loop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["answered_inside"] = True  # its status is a program's, and no word of ours
        answering = asyncio.ensure_future(self._answer(send))
        asking = asyncio.ensure_future(self._ask(receive))
        try:
            await asyncio.wait((answering, asking), return_when=asyncio.FIRST_COMPLETED)
            for task in (answering, asking):
                if task.done():
                    task.result()
        finally:  # the answer is whole, the client has left, or the program does not read
            for task in (answering, asking):
                task.cancel()
            await asyncio.gather(answering, asking, return_exceptions=True)
            self._connection.close()

    async def _ask(self, receive: Receive) -> None:
        """Sends the request as it comes. Returns when the client has left."""
        await self._write(self._head)
        while (message := await receive())["type"] == "http.request":
            if message.get("body"):
                await self._write(h11.Data(data=message["body"]))
            if not message.get("more_body"):
                await self._write(h11.EndOfMessage())

    async def _write(self, event: h11.Event) -> None:
        """What a program says counts, not that it would not hear us out."""
        with contextlib.suppress(ConnectionError, h11.LocalProtocolError):
            data = self._wire.send(event)
            try:
                async with asyncio.timeout(STALLED_SECONDS):  # `wait_for` of Python 3.11 swallows a cancellation
                    await self._loop.sock_sendall(self._connection, data or b"")
            except TimeoutError:
                raise errors.PortNotOpen(f"the program took nothing for {STALLED_SECONDS:g} s") from None

    async def _answer(self, send: Send) -> None:
        begun = False
        async with contextlib.aclosing(self._events()) as events:
            async for event in events:
                if isinstance(event, h11.Response):
                    begun = True
                    head = {"status": event.status_code, "headers": _answered(event)}
                    await send({"type": "http.response.start", **head})
                elif isinstance(event, h11.Data):
                    await send({"type": "http.response.body", "body": bytes(event.data), "more_body": True})
                elif isinstance(event, h11.EndOfMessage):
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                    return
        if begun:
            raise Dropped
        self._sandbox.check_running()
        raise errors.PortNotOpen("the program on this port closed the connection, or does not speak HTTP")

    async def _events(self) -> AsyncGenerator[h11.Event, None]:
        """What the program answers, until it ends or breaks the rules."""
        while True:
            try:
                event = self._wire.next_event()
                if event is h11.NEED_DATA:
                    self._wire.receive_data(await self._loop.sock_recv(self._connection, READ_BYTES))
                    continue
            except (h11.RemoteProtocolError, ConnectionError):
                return
            if event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                return
            assert not isinstance(event, type)
            yield event


def _answered(response: h11.Response) -> RawHeaders:
    """A program's headers, but for its say on how long the body is where that is not what will be sent."""
    headers = [(name, value) for name, value in response.headers.raw_items() if name.lower() not in HOP_BY_HOP]
    chunked = any(name.lower() == b"transfer-encoding" for name, _ in response.headers.raw_items())
    if response.status_code in _NO_BODY or chunked:
        return [pair for pair in headers if pair[0].lower() != b"content-length"]
    return headers
