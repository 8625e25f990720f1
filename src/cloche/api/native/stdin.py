"""Input on its way to a program: a little of it waits here, so that whoever brings it hears other things meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Awaitable

from cloche import errors
from cloche.engine.commands.program import Program
from cloche.engine.executions.streams import Bell

MAX_WAITING_BYTES = 1 << 20
PIECE_BYTES = 1 << 16
LAST_SECONDS = 1.0


class Stdin:
    """Single producer. What the program does not read any more is forgotten, as by a pipe; `refused` says why."""

    def __init__(self, program: Program):
        self.refused: errors.InvalidRequest | None = None
        self._program = program
        self._waiting: deque[bytes] = deque()
        self._bytes = 0  # of those that wait, and of the one that is on its way
        self._carries = False
        self._ended = False
        self._bell = Bell()

    async def put(self, data: bytes, patience_seconds: float | None = None) -> None:
        """Waits until less than 1 MiB waits; then data of any size is taken.

        Raises InvalidRequest where the program has read nothing for so long.
        """
        while self._bytes >= MAX_WAITING_BYTES and self.refused is None:
            try:
                async with asyncio.timeout(patience_seconds):
                    await self._bell.heard()
            except TimeoutError:
                raise errors.InvalidRequest(
                    f"{self._bytes} bytes of input wait, and the process has read none for {patience_seconds:g} s"
                ) from None
        if self.refused is None:
            self._waiting.append(data)
            self._bytes += len(data)
            self._bell.ring()

    def end(self) -> None:
        """There is no more: the program is told after all that waits."""
        self._ended = True
        self._bell.ring()

    async def drained(self) -> None:
        """Waits until the program has all of it, or wants no more."""
        while (self._waiting or self._carries or self._ended) and self.refused is None:
            await self._bell.heard()

    async def carry(self) -> None:
        """Feeds the program, until it is cancelled."""
        while True:
            while not self._waiting and not self._ended:
                await self._bell.heard()
            if self._waiting:
                self._carries = True
                await self._carry(self._waiting.popleft())
                self._carries = False
            else:
                self._program.close_stdin()
                self._ended = False
            self._bell.ring()

    async def _carry(self, data: bytes) -> None:
        for at in range(0, max(len(data), 1), PIECE_BYTES):
            piece = data[at : at + PIECE_BYTES]
            try:
                if self.refused is None:
                    await self._program.send_stdin(piece)
            except errors.InvalidRequest as error:
                self.refused = error
            self._bytes -= len(piece)
            self._bell.ring()


@contextlib.asynccontextmanager
async def feeding(program: Program) -> AsyncGenerator[Stdin, None]:
    """A program's input. What it has not taken a second after the end of the block is forgotten."""
    stdin = Stdin(program)
    carrying = asyncio.create_task(stdin.carry())
    try:
        yield stdin
    finally:
        try:
            await _within(LAST_SECONDS, stdin.drained())
        finally:
            carrying.cancel()
            await asyncio.wait([carrying])


async def _within(seconds: float, work: Awaitable[None]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await work
