"""Tool server: the port on which a sandbox's programs call tools.

See "The tools' door" in `cloche.guest.wire`. Any program may connect; it is trusted as far as its token
goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from typing import TYPE_CHECKING, NamedTuple, cast

from cloche import errors
from cloche.engine.sandboxes.init_client import InitClient, take_only_fd

if TYPE_CHECKING:
    from cloche.egress.door import ConnectionAcceptor
    from cloche.engine.executions.tools import ToolOffer

# Listeners on a sandbox's loopback on which the host itself accepts: connections bypass the guest's init.


class GuestListener(NamedTuple):
    socket: socket.socket
    port: int  # on the sandbox's loopback


async def open_guest_listener(guest: InitClient, port: int) -> GuestListener:
    """Raises FileError where a program has that port (0: any that is free), ProtocolViolation, Gone."""
    if guest.cell.passes_descriptors:
        listener = _check_listener(take_only_fd(await guest.request("door_open", port=port)))
        return GuestListener(listener, listener.getsockname()[1])
    name = f"door-{port or secrets.token_hex(8)}"
    listener = guest.cell.open_guest_socket(name)
    try:
        reply = await guest.request("door_open", port=port, relay=name)
    except BaseException:
        listener.close()
        raise
    opened = reply.ok.get("port")
    return GuestListener(listener, opened if type(opened) is int and 0 < opened < 65536 else 0)


def _check_listener(fd: int) -> socket.socket:
    """Raises ProtocolViolation."""
    try:
        listener = socket.socket(fileno=fd)
    except OSError:
        os.close(fd)
        raise errors.ProtocolViolation("the guest's init passed something else than a socket") from None
    is_tcp = listener.family == socket.AF_INET and listener.type == socket.SOCK_STREAM
    if not is_tcp or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        listener.close()
        raise errors.ProtocolViolation("the guest's init passed a socket that does not listen")
    listener.setblocking(False)
    return listener


MAX_CONNECTIONS = 256
SEND_SECONDS = 30.0  # for a program to send its call
LEAVE_SECONDS = 2.0  # for one that was refused to read why
MAX_TOKEN_BYTES = 128
ALL_CALLS = -1  # the place of an answer to all calls of a connection

RawToolCall = tuple[str, bytes]


class ToolServer:
    """Opens when it is first needed. One listener for all programs of a sandbox: the token tells them apart."""

    def __init__(self, guest: InitClient):
        self._guest = guest
        self._arrivals: ConnectionAcceptor | None = None
        self._port = 0
        self._opening = asyncio.Lock()
        self._is_closed = False
        self._hosts: dict[str, ToolOffer] = {}
        self._callers: set[ToolConnection] = set()

    async def open(self) -> int:
        """The port on the sandbox's loopback. Raises NoSpace and other errors of init, Gone."""
        from cloche.egress.door import ConnectionAcceptor

        async with self._opening:
            if self._arrivals is None or self._is_closed:  # then init says so
                listener, self._port = await open_guest_listener(self._guest, 0)
                if self._is_closed:  # the sandbox ended while its init answered
                    listener.close()
                    raise errors.SandboxLost("the sandbox ended before its tools were ready")
                self._arrivals = ConnectionAcceptor(listener, self._admit_connection)
        return self._port

    def add(self, token: str, host: ToolOffer) -> None:
        self._hosts[token] = host

    def remove(self, token: str) -> None:
        """Closes the connections that came with that token."""
        host = self._hosts.pop(token, None)
        for caller in list(self._callers):
            if caller.host is host:
                caller.abort()

    def host(self, token: bytes) -> ToolOffer | None:
        return self._hosts.get(token.decode("ascii", "replace"))

    def unread_bytes(self, host: ToolOffer) -> int:
        """The bytes that were sent to its program, and not read."""
        return sum(caller.unread_bytes for caller in self._callers if caller.host is host)

    def held_bytes(self, host: ToolOffer) -> int:
        """The same, with the bytes of incomplete calls."""
        return sum(caller.unread_bytes + caller.said_bytes for caller in self._callers if caller.host is host)

    def close(self) -> None:
        self._is_closed = True
        if self._arrivals is not None:
            self._arrivals.close()
        for host in list(self._hosts.values()):
            host.close()
        for caller in list(self._callers):
            caller.abort()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def left(self, caller: ToolConnection) -> None:
        self._callers.discard(caller)

    def _admit_connection(self, connection: socket.socket) -> None:
        if len(self._callers) >= MAX_CONNECTIONS:
            connection.close()
            return
        caller = ToolConnection(self)
        self._callers.add(caller)
        loop = asyncio.get_running_loop()
        connecting = loop.create_task(loop.connect_accepted_socket(lambda: caller, connection))
        connecting.add_done_callback(lambda task: self._on_connected(task, caller, connection))

    def _on_connected(self, task: asyncio.Task[object], caller: ToolConnection, connection: socket.socket) -> None:
        if task.cancelled() or task.exception() is not None:
            connection.close()
            self.left(caller)


class ToolConnection(asyncio.Protocol):
    """One connection: its calls, all at once, and the answers in any order."""

    def __init__(self, door: ToolServer):
        self.host: ToolOffer | None = None
        self.said_bytes = 0  # that are kept, since there is more to come
        self._door = door
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._buffer = bytearray()
        self._seen = 0  # up to there the buffer has no end of a field
        self._fields: list[bytes] = []
        self._wanted = 2  # fields, as far as is known yet
        self._is_complete = False
        self._unanswered = 0

    # -- as the host has it

    def answer(self, place: int, *, success: bool, content: bytes) -> None:
        """Answers the call at that place. After the last answer the connection is closed."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        verdict = "ok" if success else "error"
        transport.write(f"{place} {verdict} {len(content) + 1}\n".encode() + content + b"\n")
        self._unanswered -= 1
        if place == ALL_CALLS:
            self._finish_writing()
        elif self._unanswered <= 0:
            transport.close()  # once all is read

    @property
    def unread_bytes(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def abort(self) -> None:
        self._door.left(self)
        if self._transport is not None:
            self._transport.abort()

    # -- as the loop has it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its class
        self._start_timer(SEND_SECONDS)
        if self._door.is_closed:
            self.abort()

    def data_received(self, data: bytes) -> None:
        if self._is_complete:
            return  # it has said all that there is to say
        self._buffer += data
        self.said_bytes += len(data)
        if self.host is not None and (problem := self.host.admit(len(data))) is not None:
            self._refuse_calls(problem)
            return
        while not self._is_complete and (field := self._next_field()) is not None:
            self._fields.append(field)
            self._handle_field()
        if self.host is None and not self._is_complete and len(self._buffer) > MAX_TOKEN_BYTES:
            self._refuse_calls("invalid tool call: this socket takes calls of tools only")

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._cancel_timer()
        self._door.left(self)
        if self.host is not None:
            self.host.leave(self)

    # -- inside

    def _next_field(self) -> bytes | None:
        end = self._buffer.find(0, self._seen)
        if end < 0:
            self._seen = len(self._buffer)
            return None
        field = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._seen = 0
        return field

    def _handle_field(self) -> None:
        if len(self._fields) == 1:
            self._check_token(self._fields[0])
        elif len(self._fields) == 2:
            self._read_call_count(self._fields[1])
        elif len(self._fields) == self._wanted:
            self._complete_calls()

    def _check_token(self, token: bytes) -> None:
        self.host = self._door.host(token)
        if self.host is None:
            self._refuse_calls("no tools are offered to this program, or no longer")
        elif (problem := self.host.admit(len(self._buffer))) is not None:
            self._refuse_calls(problem)

    def _read_call_count(self, count: bytes) -> None:
        if not count.isdigit() or len(count) > 4 or (count != b"0" and int(count) == 0):
            self._refuse_calls("invalid tool call: it does not say how many calls it is")
            return
        calls = max(int(count), 1)
        self._wanted = 2 + 2 * calls
        assert self.host is not None
        if (problem := self.host.expect(calls)) is not None:
            self._refuse_calls(problem)

    def _complete_calls(self) -> None:
        self._is_complete = True
        self._cancel_timer()
        alone = self._fields[1] == b"0"
        names, inputs = self._fields[2::2], self._fields[3::2]
        self._drop_buffer()
        self._unanswered = len(names)
        assert self.host is not None
        said = [(name.decode("utf-8", "replace"), input) for name, input in zip(names, inputs, strict=True)]
        self.host.take(self, said, alone=alone)

    def _refuse_calls(self, why: str) -> None:
        self._is_complete = True
        self._drop_buffer()
        self.answer(ALL_CALLS, success=False, content=why.encode())

    def _drop_buffer(self) -> None:
        """Drops the received bytes."""
        self._fields, self._buffer, self.said_bytes = [], bytearray(), 0

    def _finish_writing(self) -> None:
        """Ends the sending side. Further input is read and dropped: else the last answer would be lost with it."""
        self._is_complete = True
        if self._transport is not None:
            with contextlib.suppress(OSError):
                self._transport.write_eof()
        self._start_timer(LEAVE_SECONDS)

    def _start_timer(self, seconds: float) -> None:
        self._cancel_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.abort)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
