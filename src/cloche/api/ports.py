"""The proxy to programs that listen inside a sandbox: HTTP and WebSocket.

The responses of such a program are untrusted: they are parsed strictly and forwarded as they arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any, Protocol
from urllib.parse import quote, unquote

import h11
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage, InvalidStatus, InvalidURI
from websockets.typing import Subprotocol

from cloche import errors
from cloche.api.auth import API_KEY_HEADERS, SESSION_COOKIES, key_from_headers
from cloche.api.http import DialectEndpoint, DropConnection
from cloche.engine.sandboxes.sandbox import Sandbox

# The headers of a request that is forwarded to a program inside a sandbox, and those withheld from it.

RawHeaders = list[tuple[bytes, bytes]]

# Said between two neighbours only, and so said anew on each side.
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)
# Orders to a proxy in front of the server, which would take them from a program as from the server.
_PROXY_ORDERS = frozenset(b"x-accel-redirect x-accel-expires x-sendfile x-lighttpd-send-file".split())
_API_KEY_HEADER_NAMES = frozenset(name.encode() for name in (*API_KEY_HEADERS, "authorization"))


class ForwardedHeaders:
    """Builds the headers for programs. Secrets that open a sandbox or the server are withheld.

    `private` are the dialect's own header names; `is_key` recognizes the server's keys, which users send by
    mistake when their programs have keys of their own under the same names.
    """

    def __init__(self, private: Iterable[bytes], is_key: Callable[[str], bool]):
        self._withheld = frozenset(private) | HOP_BY_HOP
        self._is_key = is_key

    def headers(self, scope: Scope) -> RawHeaders:
        """The forwarded headers, with the client's address and the requested host.

        `state["host"]`, if set, replaces the Host header that the program receives.
        """
        given = (_strip_session_cookies(*pair) for pair in scope["headers"] if pair[0] not in self._withheld)
        own = [pair for pair in given if not self._carries_server_key(*pair)]
        client = (scope.get("client") or ("", 0))[0]
        host = next((value for name, value in own if name == b"host"), b"")
        mask = scope["state"].get("host")
        if mask is not None:
            own = [(b"host", mask.encode()), *(pair for pair in own if pair[0] != b"host")]
        return [
            *(pair for pair in own if not pair[0].startswith(b"x-forwarded-")),
            (b"x-forwarded-for", client.encode()),
            (b"x-forwarded-proto", scope.get("scheme", "http").replace("ws", "http").encode()),
            (b"x-forwarded-host", host),
        ]

    def _carries_server_key(self, name: bytes, value: bytes) -> bool:
        return name in _API_KEY_HEADER_NAMES and self._is_key(
            key_from_headers({name.decode(): value.decode("latin-1")})
        )


def _strip_session_cookies(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    """The header, without the console's session cookies."""
    if name != b"cookie" or not any(each.encode() in value for each in SESSION_COOKIES):
        return name, value
    pairs = [pair.strip() for pair in value.split(b";")]
    return name, b"; ".join(pair for pair in pairs if pair.partition(b"=")[0].decode("latin-1") not in SESSION_COOKIES)


def request_target_of(scope: Scope) -> str:
    """Path and query as the client wrote them, where no prefix was taken off."""
    raw = scope.get("raw_path", b"").decode("ascii", "replace")
    path = raw if raw and unquote(raw) == scope["path"] else quote(scope["path"], safe="/:@!$&'()*+,;=~-._")
    query = scope.get("query_string", b"").decode("ascii", "replace")
    return f"{path}?{query}" if query else path


# The WebSocket proxy between a client of the server and a program inside a sandbox.

MAX_WEBSOCKET_MESSAGE_BYTES = 16 << 20
HANDSHAKE_SECONDS = 10.0
_HANDSHAKE_HEADERS = frozenset(b"host connection upgrade content-length".split())


class HandshakeRefused(Exception):
    """The program refused the WebSocket handshake."""

    def __init__(self, status: int, body: bytes):
        super().__init__(status)
        self.status = status
        self.body = body


async def proxy_websocket(scope: Scope, receive: Receive, send: Send, headers: RawHeaders) -> None:
    """Connects to the program first, and accepts the client only then. Raises PortNotOpen before that."""
    await receive()  # websocket.connect
    try:
        inside = await _open_inner_websocket(scope, headers)
    except HandshakeRefused as refusal:
        await Response(refusal.body, refusal.status)(scope, receive, send)
        return
    async with inside:
        await send({"type": "websocket.accept", "subprotocol": inside.subprotocol})
        carrying = [
            asyncio.ensure_future(work)
            for work in (_forward_client_messages(receive, inside), _forward_program_messages(inside, send))
        ]
        try:
            await asyncio.wait(carrying, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in carrying:
                task.cancel()
            await asyncio.gather(*carrying, return_exceptions=True)
    with contextlib.suppress(RuntimeError, OSError):  # the client may have closed it
        await send(
            {
                "type": "websocket.close",
                "code": _sendable_close_code(inside.close_code),
                "reason": inside.close_reason or "",
            }
        )


async def _open_inner_websocket(scope: Scope, headers: RawHeaders) -> ClientConnection:
    sandbox: Sandbox = scope["state"]["sandbox"]
    connection = await sandbox.connect_port(scope["state"]["port"])
    try:
        return await _handshake_with_program(scope, headers, connection)
    except (InvalidHandshake, InvalidMessage, OSError, TimeoutError):
        connection.close()
        sandbox.check_running()
        raise errors.PortNotOpen("the program on this port does not speak WebSocket") from None
    except (InvalidURI, ValueError):
        connection.close()
        raise errors.InvalidRequest("this WebSocket's Host, address or protocols make no sense") from None
    except BaseException:
        connection.close()
        raise


async def _handshake_with_program(scope: Scope, headers: RawHeaders, connection: socket.socket) -> ClientConnection:
    """Raises HandshakeRefused if the program refuses, and everything that `websockets` raises."""
    host = next((value.decode("latin-1") for name, value in headers if name == b"host"), "localhost")
    own = [
        (name, value)
        for name, value in headers
        if name not in _HANDSHAKE_HEADERS and not name.startswith(b"sec-websocket-")
    ]
    try:
        return await connect(
            f"ws://{host}{request_target_of(scope)}",
            sock=connection,
            additional_headers=[(name.decode("latin-1"), value.decode("latin-1")) for name, value in own],
            subprotocols=[Subprotocol(name) for name in scope.get("subprotocols", ())] or None,
            compression=None,
            proxy=None,
            open_timeout=HANDSHAKE_SECONDS,
            ping_interval=None,  # pings are between the two programs
            max_size=MAX_WEBSOCKET_MESSAGE_BYTES,
            user_agent_header=None,
        )
    except InvalidStatus as refused:
        raise HandshakeRefused(refused.response.status_code, bytes(refused.response.body or b"")) from None


async def _forward_client_messages(receive: Receive, inside: ClientConnection) -> None:
    with contextlib.suppress(ConnectionClosed):
        while (message := await receive())["type"] == "websocket.receive":
            text = message.get("text")
            await inside.send(text if text is not None else message.get("bytes") or b"")
        await inside.close(_sendable_close_code(message.get("code")), str(message.get("reason") or "")[:100])


async def _forward_program_messages(inside: ClientConnection, send: Send) -> None:
    with contextlib.suppress(ConnectionClosed):
        while True:
            message = await inside.recv()
            content: dict[str, Any] = {"text": message} if isinstance(message, str) else {"bytes": message}
            await send({"type": "websocket.send", **content})


def _sendable_close_code(code: int | None) -> int:
    """A code that a close frame may carry: 1005 and 1006 only mean that there was none."""
    return (
        code
        if code is not None and (code in (1000, 1001, 1003) or 1007 <= code <= 1014 or 3000 <= code < 5000)
        else 1000
    )


READ_BYTES = 1 << 16
MAX_HEAD_BYTES = 1 << 18
STALLED_SECONDS = 60.0  # a program that takes nothing of a body for so long will not
_BODILESS_STATUSES = (204, 304)


class PortErrorRenderer(Protocol):
    """The dialect's error format for a port that cannot be reached."""

    def render_error(self, error: errors.ClocheError, request: HTTPConnection) -> Response: ...


class PortProxy:
    """Forwards requests to the port `state["port"]` of the sandbox `state["sandbox"]`."""

    def __init__(self, dialect: PortErrorRenderer, outward: ForwardedHeaders):
        self._dialect = dialect
        self._outward = outward
        self._http = DialectEndpoint(dialect, self._proxy_http_request)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await self._http(scope, receive, send)
            return
        try:
            await proxy_websocket(scope, receive, send, self._outward.headers(scope))
        except errors.ClocheError as error:
            await self._dialect.render_error(error, HTTPConnection(scope))(scope, receive, send)

    async def _proxy_http_request(self, request: Request) -> ASGIApp:
        sandbox: Sandbox = request.scope["state"]["sandbox"]
        head = _build_request_head(request.scope, self._outward.headers(request.scope))
        return _ProxiedRequest(sandbox, await sandbox.connect_port(request.scope["state"]["port"]), head)


def _build_request_head(scope: Scope, headers: RawHeaders) -> h11.Request:
    names = {name for name, _ in scope["headers"]}
    if b"transfer-encoding" in names and b"content-length" not in names:
        headers.append((b"transfer-encoding", b"chunked"))
    headers.append((b"connection", b"close"))
    headers = [(b"Host" if name == b"host" else name, value) for name, value in headers]  # some look for it so
    try:
        return h11.Request(method=scope["method"], target=request_target_of(scope), headers=headers)
    except h11.LocalProtocolError as error:
        raise errors.InvalidRequest(f"this request cannot be carried to a port: {error}") from None


class _ProxiedRequest:
    """One proxied request on its own connection, as an ASGI application that forwards the program's response.

    It reads and writes the socket itself: asyncio's streams drop received data once a write has failed, and a
    program may respond and close before it has read everything.
    """

    def __init__(self, sandbox: Sandbox, connection: socket.socket, head: h11.Request):
        self._sandbox = sandbox
        self._connection = connection
        self._head = head
        self._wire = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._loop = asyncio.get_running_loop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["answered_inside"] = True  # its status is a program's, and no word of ours
        answering = asyncio.ensure_future(self._relay_program_response(send))
        asking = asyncio.ensure_future(self._send_client_request(receive))
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

    async def _send_client_request(self, receive: Receive) -> None:
        """Forwards the request as it arrives. Returns when the client has disconnected."""
        await self._write_http_event(self._head)
        while (message := await receive())["type"] == "http.request":
            if message.get("body"):
                await self._write_http_event(h11.Data(data=message["body"]))
            if not message.get("more_body"):
                await self._write_http_event(h11.EndOfMessage())

    async def _write_http_event(self, event: h11.Event) -> None:
        """Writes an event, ignoring a closed connection: a program may respond before it has read everything."""
        with contextlib.suppress(ConnectionError, h11.LocalProtocolError):
            data = self._wire.send(event)
            try:
                async with asyncio.timeout(STALLED_SECONDS):  # `wait_for` of Python 3.11 swallows a cancellation
                    await self._loop.sock_sendall(self._connection, data or b"")
            except TimeoutError:
                raise errors.PortNotOpen(f"the program took nothing for {STALLED_SECONDS:g} s") from None

    async def _relay_program_response(self, send: Send) -> None:
        begun = False
        async with contextlib.aclosing(self._read_http_events()) as events:
            async for event in events:
                if isinstance(event, h11.Response):
                    begun = True
                    head = {"status": event.status_code, "headers": _filter_response_headers(event)}
                    await send({"type": "http.response.start", **head})
                elif isinstance(event, h11.Data):
                    await send({"type": "http.response.body", "body": bytes(event.data), "more_body": True})
                elif isinstance(event, h11.EndOfMessage):
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                    return
        if begun:
            raise DropConnection
        self._sandbox.check_running()
        raise errors.PortNotOpen("the program on this port closed the connection, or does not speak HTTP")

    async def _read_http_events(self) -> AsyncGenerator[h11.Event, None]:
        """The program's response events, until it closes or violates HTTP."""
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


def _filter_response_headers(response: h11.Response) -> RawHeaders:
    """The program's headers, without orders to proxies and a Content-Length that the forwarded body does not match."""
    withheld = HOP_BY_HOP | _PROXY_ORDERS
    headers = [(name, value) for name, value in response.headers.raw_items() if name.lower() not in withheld]
    chunked = any(name.lower() == b"transfer-encoding" for name, _ in response.headers.raw_items())
    if response.status_code in _BODILESS_STATUSES or chunked:
        return [pair for pair in headers if pair[0].lower() != b"content-length"]
    return headers
