"""A port on a sandbox's own loopback at which the host answers `GET /health`.

Programs written for another vendor's sandboxes, and that vendor's tests, ask there whether its code server is up. The
server for code is the host's own, and nothing listens inside: this answers for it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from cloche import errors
from cloche.engine.executions.tool_server import open_guest_listener
from cloche.engine.sandboxes.init_client import InitClient

if TYPE_CHECKING:
    from cloche.egress.door import ConnectionAcceptor

MAX_HEALTH_CONNECTIONS = 16  # of one sandbox
MAX_HEAD_BYTES = 8192
HEALTH_SECONDS = 5.0  # for the whole of a connection
_HEALTHY = (b"200 OK", b'"OK"')
_UNKNOWN = (b"404 Not Found", b'{"detail":"Not Found"}')


class HealthPort:
    """Opens when it is first needed, unless a program of the sandbox has the port."""

    def __init__(self, guest: InitClient):
        self._guest = guest
        self._acceptor: ConnectionAcceptor | None = None
        self._port: int | None = None
        self._connections: set[HealthConnection] = set()
        self._begun = self._is_closed = False

    async def open(self, port: int) -> None:
        """Raises the errors of init, Gone."""
        from cloche.egress.door import ConnectionAcceptor

        if self._begun:
            return
        self._begun = True
        try:
            listener, opened = await open_guest_listener(self._guest, port)
        except errors.FileError:
            return  # a program of the sandbox has it, and answers as it likes
        if self._is_closed:  # the sandbox ended while its init answered
            listener.close()
            return
        self._acceptor, self._port = ConnectionAcceptor(listener, self._admit_connection), opened

    @property
    def port(self) -> int | None:
        return self._port

    def close(self) -> None:
        self._is_closed = True
        if self._acceptor is not None:
            self._acceptor.close()
        for each in list(self._connections):
            each.abort()

    def _admit_connection(self, connection: socket.socket) -> None:
        if len(self._connections) >= MAX_HEALTH_CONNECTIONS:
            connection.close()
            return
        answering = HealthConnection(self._connections.discard)
        self._connections.add(answering)
        loop = asyncio.get_running_loop()
        connecting = loop.create_task(loop.connect_accepted_socket(lambda: answering, connection))
        connecting.add_done_callback(lambda task: self._on_connected(task, answering, connection))

    def _on_connected(self, task: asyncio.Task[object], own: HealthConnection, connection: socket.socket) -> None:
        if task.cancelled() or task.exception() is not None:
            connection.close()
            self._connections.discard(own)


class HealthConnection(asyncio.Protocol):
    """One request and its answer, which is a constant."""

    def __init__(self, left: Callable[[HealthConnection], None]):
        self._left = left
        self._head = bytearray()
        self._is_answered = False
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its class
        self._timer = asyncio.get_running_loop().call_later(HEALTH_SECONDS, self.abort)

    def data_received(self, data: bytes) -> None:
        if self._is_answered or self._transport is None:
            return
        self._head += data[:MAX_HEAD_BYTES]
        if len(self._head) > MAX_HEAD_BYTES:
            self.abort()
        elif b"\r\n\r\n" in self._head:
            self._is_answered = True
            self._transport.write(_encode_answer(bytes(self._head)))
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        self._left(self)


def _encode_answer(head: bytes) -> bytes:
    method, _, rest = head.partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0]
    status, body = _HEALTHY if path == b"/health" and method in (b"GET", b"HEAD") else _UNKNOWN
    fields = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close" % len(body)
    return b"HTTP/1.1 %s\r\n%s\r\n\r\n%s" % (status, fields, b"" if method == b"HEAD" else body)
