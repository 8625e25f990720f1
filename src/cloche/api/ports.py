"""Programs that listen inside a sandbox, reached through the server: HTTP and WebSocket.

What such a program answers is a stranger's: it is parsed strictly, handed on as it comes, and believed in nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable
from typing import Protocol
from urllib.parse import quote, unquote

import h11
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cloche import errors
from cloche.api.http import Dropped, Edge
from cloche.api.websocket_ports import carry_websocket
from cloche.engine.sandbox import Sandbox

READ_BYTES = 1 << 16
MAX_HEAD_BYTES = 1 << 18

# Said between two neighbours only, and so said anew on each side.
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)
RawHeaders = list[tuple[bytes, bytes]]


class Errors(Protocol):
    """How the dialect in front says that a port could not be reached."""

    def render_error(self, error: errors.ClocheError, request: HTTPConnection) -> Response: ...


class PortProxy:
    """Carries requests to the port `state["port"]` of the sandbox `state["sandbox"]`.

    Headers named in `private` are the server's own and stay outside: a program must not see what opens its sandbox.
    """

    def __init__(self, dialect: Errors, private: Iterable[bytes]):
        self._dialect = dialect
        self._private = frozenset(private) | HOP_BY_HOP
        self._http = Edge(dialect, self._carry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await self._http(scope, receive, send)
            return
        try:
            await carry_websocket(scope, receive, send, outward(scope, self._private))
        except errors.ClocheError as error:
            await self._dialect.render_error(error, HTTPConnection(scope))(scope, receive, send)

    async def _carry(self, request: Request) -> ASGIApp:
        sandbox: Sandbox = request.scope["state"]["sandbox"]
        connection = await sandbox.connect_port(request.scope["state"]["port"])
        reader, writer = await asyncio.open_connection(sock=connection, limit=READ_BYTES)
        return _Carried(reader, writer, _head(request.scope, self._private))


def outward(scope: Scope, private: frozenset[bytes]) -> RawHeaders:
    """The request's headers as a program inside gets them, with who asked for it and under which name."""
    own = [(name, value) for name, value in scope["headers"] if name not in private]
    client = (scope.get("client") or ("", 0))[0]
    host = next((value for name, value in own if name == b"host"), b"")
    return [
        *((name, value) for name, value in own if not name.startswith(b"x-forwarded-")),
        (b"x-forwarded-for", client.encode()),
        (b"x-forwarded-proto", scope.get("scheme", "http").replace("ws", "http").encode()),
        (b"x-forwarded-host", host),
    ]


def target_of(scope: Scope) -> str:
    """Path and query as the client wrote them, where no prefix was taken off."""
    raw = scope.get("raw_path", b"").decode("ascii", "replace")
    path = raw if raw and unquote(raw) == scope["path"] else quote(scope["path"], safe="/:@!$&'()*+,;=~-._")
    query = scope.get("query_string", b"").decode("ascii", "replace")
    return f"{path}?{query}" if query else path


def _head(scope: Scope, private: frozenset[bytes]) -> h11.Request:
    headers = outward(scope, private)
    names = {name for name, _ in scope["headers"]}
    if b"transfer-encoding" in names and b"content-length" not in names:
        headers.append((b"transfer-encoding", b"chunked"))
    headers.append((b"connection", b"close"))
    try:
        return h11.Request(method=scope["method"], target=target_of(scope), headers=headers)
    except h11.LocalProtocolError as error:
        raise errors.InvalidRequest(f"this request cannot be carried to a port: {error}") from None


class _Carried:
    """One request on a connection of its own, as an ASGI application that answers with what comes back."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: h11.Request):
        self._reader = reader
        self._writer = writer
        self._head = head
        self._wire = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answering = asyncio.ensure_future(self._answer(send))
        asking = asyncio.ensure_future(self._ask(receive))
        try:
            await asyncio.wait((answering, asking), return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:  # the answer is whole, or the client has left
            self._writer.close()
            for task in (answering, asking):
                task.cancel()
            await asyncio.gather(answering, asking, return_exceptions=True)

    async def _ask(self, receive: Receive) -> None:
        """Sends the request as it comes. Returns when the client has left."""
        await self._write(self._head)
        while (message := await receive())["type"] == "http.request":
            if message.get("body"):
                await self._write(h11.Data(data=message["body"]))
            if not message.get("more_body"):
                await self._write(h11.EndOfMessage())

    async def _write(self, event: h11.Event) -> None:
        # A program may answer and close before it has read everything: what it said counts, not that we could not.
        with contextlib.suppress(OSError, h11.LocalProtocolError):
            self._writer.write(self._wire.send(event) or b"")
            await self._writer.drain()

    async def _answer(self, send: Send) -> None:
        begun = False
        async with contextlib.aclosing(self._events()) as events:
            async for event in events:
                if isinstance(event, h11.Response):
                    begun = True
                    headers = [pair for pair in event.headers.raw_items() if pair[0].lower() not in HOP_BY_HOP]
                    await send({"type": "http.response.start", "status": event.status_code, "headers": headers})
                elif isinstance(event, h11.Data):
                    await send({"type": "http.response.body", "body": bytes(event.data), "more_body": True})
                elif isinstance(event, h11.EndOfMessage):
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                    return
        if begun:
            raise Dropped
        raise errors.PortNotOpen("the program on this port closed the connection, or does not speak HTTP")

    async def _events(self) -> AsyncGenerator[h11.Event, None]:
        """What the program answers, until it ends or breaks the rules."""
        while True:
            try:
                event = self._wire.next_event()
                if event is h11.NEED_DATA:
                    self._wire.receive_data(await self._reader.read(READ_BYTES))
                    continue
            except (h11.RemoteProtocolError, OSError):
                return
            if event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                return
            assert not isinstance(event, type)
            yield event
