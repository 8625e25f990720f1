"""Commands and processes of a sandbox, by request and answer. Their streams are in `sockets.py`."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Awaitable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from cloche import errors
from cloche.api.http import body_chunks, unless_disconnected
from cloche.api.native.context import Door, body_of, reply
from cloche.engine.commands.commands import Commands as Core
from cloche.engine.commands.program import Program
from cloche.engine.executions.streams import Bell
from cloche.protocol import requests, responses

# Input on its way to a program: a little of it waits here, so that whoever brings it hears other things meanwhile.

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


SHELL = ("/bin/bash", "-c")
SIGNALS = range(1, 65)


class Commands:
    def __init__(self, door: Door):
        self._door = door

    async def run(self, request: Request) -> Response:
        commands = (await self._door.sandbox(request)).commands
        asked = await body_of(request, requests.RunCommand)
        stdin = asked.stdin if asked.stdin_base64 is None else asked.stdin_base64
        running = commands.run(asked.command, **_how(asked), stdin=stdin)
        return reply(await unless_disconnected(request, running))

    async def start(self, request: Request) -> Response:
        commands = (await self._door.sandbox(request)).commands
        process = await started(commands, await body_of(request, requests.StartProcess))
        return reply(responses.ProcessStarted(id=process.id, pid=process.pid), 201)

    async def list(self, request: Request) -> Response:
        return reply(await (await self._door.sandbox(request)).commands.list())

    async def kill(self, request: Request) -> Response:
        (await self._process(request)).kill()
        return Response(status_code=204)

    async def signal(self, request: Request) -> Response:
        process = await self._process(request)
        asked = await body_of(request, requests.Signal)
        check_signal(asked.signal)
        process.kill(asked.signal)
        return Response(status_code=204)

    async def write_stdin(self, request: Request) -> Response:
        process = await self._process(request)
        async with feeding(process) as stdin:
            await stdin.put(b"")  # also to learn whether it has any
            async for chunk in body_chunks(request, self._door.config.server.upload_bytes):
                await stdin.put(chunk)
            await unless_disconnected(request, stdin.drained())
        if stdin.refused is not None:
            raise stdin.refused
        return Response(status_code=204)

    async def close_stdin(self, request: Request) -> Response:
        (await self._process(request)).close_stdin()
        return Response(status_code=204)

    async def _process(self, request: Request) -> Program:
        return (await self._door.sandbox(request)).commands.get(request.path_params["process"])


async def started(commands: Core, asked: requests.StartProcess) -> Program:
    """What has a terminal is heard byte for byte, by as many as listen. Raises InvalidRequest."""
    if asked.terminal is None:
        return await commands.start(asked.command, **_how(asked), stdin=asked.stdin, background=True)
    argv = [*SHELL, asked.command] if isinstance(asked.command, str) else asked.command
    return await commands.launch(argv, **_how(asked), pty=(asked.terminal.rows, asked.terminal.columns))


def _how(asked: requests.RunCommand | requests.StartProcess) -> dict[str, Any]:
    return {
        "user": asked.user,
        "env": asked.env,
        "cwd": asked.cwd,
        "timeout_seconds": asked.timeout_seconds,
    }


def check_signal(number: int) -> None:
    """Raises InvalidRequest unless there is such a signal."""
    if number not in SIGNALS:
        raise errors.InvalidRequest(f"there is no signal {number}: give a number from 1 to 64")
