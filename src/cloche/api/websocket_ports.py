"""A WebSocket between a client of the server and a program inside a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage, InvalidStatus, InvalidURI
from websockets.typing import Subprotocol

from cloche import errors
from cloche.api.forwarding import RawHeaders, target_of
from cloche.engine.sandboxes.sandbox import Sandbox

MAX_MESSAGE_BYTES = 16 << 20
OPEN_SECONDS = 10.0
_OURS = frozenset(b"host connection upgrade content-length".split())


class Refusal(Exception):
    """A program's no to a WebSocket."""

    def __init__(self, status: int, body: bytes):
        super().__init__(status)
        self.status = status
        self.body = body


async def carry_websocket(scope: Scope, receive: Receive, send: Send, headers: RawHeaders) -> None:
    """Opens it inside first, and accepts the client only then. Raises PortNotOpen before that."""
    await receive()  # websocket.connect
    try:
        inside = await _open(scope, headers)
    except Refusal as refusal:
        await Response(refusal.body, refusal.status)(scope, receive, send)
        return
    async with inside:
        await send({"type": "websocket.accept", "subprotocol": inside.subprotocol})
        carrying = [asyncio.ensure_future(work) for work in (_inward(receive, inside), _outward(inside, send))]
        try:
            await asyncio.wait(carrying, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in carrying:
                task.cancel()
            await asyncio.gather(*carrying, return_exceptions=True)
    with contextlib.suppress(RuntimeError, OSError):  # the client may have closed it
        await send(
            {"type": "websocket.close", "code": _sendable(inside.close_code), "reason": inside.close_reason or ""}
        )


async def _open(scope: Scope, headers: RawHeaders) -> ClientConnection:
    sandbox: Sandbox = scope["state"]["sandbox"]
    connection = await sandbox.connect_port(scope["state"]["port"])
    try:
        return await _shake_hands(scope, headers, connection)
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


async def _shake_hands(scope: Scope, headers: RawHeaders, connection: socket.socket) -> ClientConnection:
    """Raises Refusal if the program says no, and what `websockets` does."""
    host = next((value.decode("latin-1") for name, value in headers if name == b"host"), "localhost")
    own = [(name, value) for name, value in headers if name not in _OURS and not name.startswith(b"sec-websocket-")]
    try:
        return await connect(
            f"ws://{host}{target_of(scope)}",
            sock=connection,
            additional_headers=[(name.decode("latin-1"), value.decode("latin-1")) for name, value in own],
            subprotocols=[Subprotocol(name) for name in scope.get("subprotocols", ())] or None,
            compression=None,
            proxy=None,
            open_timeout=OPEN_SECONDS,
            ping_interval=None,  # pings are between the two programs
            max_size=MAX_MESSAGE_BYTES,
            user_agent_header=None,
        )
    except InvalidStatus as refused:
        raise Refusal(refused.response.status_code, bytes(refused.response.body or b"")) from None


async def _inward(receive: Receive, inside: ClientConnection) -> None:
    with contextlib.suppress(ConnectionClosed):
        while (message := await receive())["type"] == "websocket.receive":
            text = message.get("text")
            await inside.send(text if text is not None else message.get("bytes") or b"")
        await inside.close(_sendable(message.get("code")), str(message.get("reason") or "")[:100])


async def _outward(inside: ClientConnection, send: Send) -> None:
    with contextlib.suppress(ConnectionClosed):
        while True:
            message = await inside.recv()
            content: dict[str, Any] = {"text": message} if isinstance(message, str) else {"bytes": message}
            await send({"type": "websocket.send", **content})


def _sendable(code: int | None) -> int:
    """A code that may stand in a close frame: 1005 and 1006 only say that there was none."""
    return (
        code
        if code is not None and (code in (1000, 1001, 1003) or 1007 <= code <= 1014 or 3000 <= code < 5000)
        else 1000
    )
