"""One connection of a program to the door, and those that were opened for it: whoever ends, nothing stays open."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import TYPE_CHECKING

from cloche.egress import refusal
from cloche.egress.destination import Address, Destination
from cloche.egress.journal import Attempt
from cloche.egress.refusal import Refusal
from cloche.egress.streams import BUFFER_BYTES, accepted

if TYPE_CHECKING:
    from cloche.egress.door import Door

LEAVE_SECONDS = 5.0  # for what was written last to be taken
LINGER_SECONDS = 1.0
LINGER_BYTES = 1 << 20
_RESET = struct.pack("ii", 1, 0)


class Visit:
    """What a program says and is told, and its line in the log."""

    def __init__(self, door: Door, connection: socket.socket):
        self.door = door
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter
        self.attempt = Attempt(door.journal)
        self.say_no: refusal.Say = refusal.in_http  # how a refusal is said, where it can be
        self._connection = connection
        self._transport: asyncio.Transport | None = None
        self._opened: list[tuple[socket.socket, asyncio.StreamWriter]] = []
        self._bound_for: Destination | None = None
        self._reached: Address | None = None
        self._has_left = False

    async def enter(self) -> None:
        self.reader, self.writer = await accepted(self._connection, self._entered)

    def _entered(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def set_out(self, asked: Destination) -> None:
        """From here on a new policy is asked whether that may still be done."""
        self.attempt.asked = self._bound_for = asked

    def head_for(self, address: Address) -> None:
        """And whether it may go there."""
        self._reached = address

    def arrived(self, connection: socket.socket, writer: asyncio.StreamWriter) -> None:
        """A connection was opened for it, which ends with it."""
        still = [(each, its) for each, its in self._opened if not its.transport.is_closing()]
        self._opened = [*still, (connection, writer)]
        self.attempt.let_through = True

    def check_again(self) -> None:
        """Raises Denied where the rules of today do not allow it."""
        if self._bound_for is not None:
            self.door.rulebooks.check_again(self._bound_for, self._reached)

    async def refuse(self, why: Refusal) -> None:
        """Written down first, then said, and then waited for: unread bytes would make a reset of it, and lose it."""
        self.attempt.end(why.verdict, str(why))
        if self.attempt.asked is not None:
            why.host = self.attempt.asked.host
        said = self.say_no(why)
        if not said:
            return self.reset()
        self.writer.write(said)
        await self._linger()
        return None

    async def _linger(self) -> None:
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(LINGER_SECONDS):
                await self.writer.drain()
                self.writer.write_eof()
                left = LINGER_BYTES
                while left > 0 and (part := await self.reader.read(BUFFER_BYTES)):
                    left -= len(part)

    async def leave(self) -> None:
        """What was written is given some time to be taken."""
        await self._linger()
        writers = [self.writer, *(writer for _, writer in self._opened)]
        for writer in writers:
            writer.close()
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(LEAVE_SECONDS):
                await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)
                self._has_left = True

    def reset(self) -> None:
        """The program, and whoever it speaks to, see that it broke off and did not end, unless it did."""
        if self._has_left:
            return
        for connection in (self._connection, *(connection for connection, _ in self._opened)):
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.abort()

    def abort(self) -> None:
        """At once. It can be said again."""
        if self._transport is None:
            self._connection.close()
        else:
            self._transport.abort()
        for _, writer in self._opened:
            writer.transport.abort()
