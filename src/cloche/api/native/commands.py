"""Commands and processes of a sandbox, by request and response. Their streams are in `sockets.py`."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Awaitable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from cloche import errors
from cloche.api.dialect import json_reply
from cloche.api.http import read_body_chunks, run_unless_disconnected
from cloche.api.native.context import NativeContext, decode_request_body
from cloche.engine.commands.commands import SandboxCommands as Core
from cloche.engine.commands.program import SandboxProgram
from cloche.events import Signal
from cloche.protocol import requests, responses

# A queue for a program's input: buffers a little, so that the sender stays responsive meanwhile.

MAX_WAITING_BYTES = 1 << 20
STDIN_PIECE_BYTES = 1 << 16
DRAIN_SECONDS = 1.0


class StdinQueue:
    """The input queue of one program, with one producer.

    Input that the program no longer reads is dropped, as by a pipe; `refused` has the reason.
    """

    def __init__(self, program: SandboxProgram):
        self.refused: errors.InvalidRequest | None = None
        self._program = program
        self._waiting: deque[bytes] = deque()
        self._bytes = 0  # of those that wait, and of the one that is on its way
        self._carries = False
        self._ended = False
        self._bell = Signal()

    async def put(self, data: bytes, patience_seconds: float | None = None) -> None:
        """Waits until less than 1 MiB is queued; then accepts data of any size.

        Raises InvalidRequest if the program has read nothing for `patience_seconds`.
        """
        while self._bytes >= MAX_WAITING_BYTES and self.refused is None:
            try:
                async with asyncio.timeout(patience_seconds):
                    await self._bell.wait()
            except TimeoutError:
                raise errors.InvalidRequest(
                    f"{self._bytes} bytes of input wait, and the process has read none for {patience_seconds:g} s"
                ) from None
        if self.refused is None:
            self._waiting.append(data)
            self._bytes += len(data)
            self._bell.wake_all()

    def end(self) -> None:
        """Ends the input: the program's stdin closes after all queued data."""
        self._ended = True
        self._bell.wake_all()

    async def wait_drained(self) -> None:
        """Waits until the program has received everything, or refuses more."""
        while (self._waiting or self._carries or self._ended) and self.refused is None:
            await self._bell.wait()

    async def pump_to_program(self) -> None:
        """Sends queued input to the program, until cancelled."""
        while True:
            while not self._waiting and not self._ended:
                await self._bell.wait()
            if self._waiting:
                self._carries = True
                await self._send_in_pieces(self._waiting.popleft())
                self._carries = False
            else:
                self._program.close_stdin()
                self._ended = False
            self._bell.wake_all()

    async def _send_in_pieces(self, data: bytes) -> None:
        for at in range(0, max(len(data), 1), STDIN_PIECE_BYTES):
            piece = data[at : at + STDIN_PIECE_BYTES]
            try:
                if self.refused is None:
                    await self._program.send_stdin(piece)
            except errors.InvalidRequest as error:
                self.refused = error
            self._bytes -= len(piece)
            self._bell.wake_all()


@contextlib.asynccontextmanager
async def open_stdin_queue(program: SandboxProgram) -> AsyncGenerator[StdinQueue, None]:
    """The input queue of a program. Input not received a second after the end of the block is dropped."""
    stdin = StdinQueue(program)
    carrying = asyncio.create_task(stdin.pump_to_program())
    try:
        yield stdin
    finally:
        try:
            await _wait_at_most(DRAIN_SECONDS, stdin.wait_drained())
        finally:
            carrying.cancel()
            await asyncio.wait([carrying])


async def _wait_at_most(seconds: float, work: Awaitable[None]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await work


SHELL_COMMAND = ("/bin/bash", "-c")
SIGNAL_NUMBERS = range(1, 65)


class NativeCommands:
    def __init__(self, api: NativeContext):
        self._api = api

    async def run(self, request: Request) -> Response:
        commands = (await self._api.sandbox(request)).commands
        message = await decode_request_body(request, requests.RunCommandRequest)
        stdin = message.stdin if message.stdin_base64 is None else message.stdin_base64
        running = commands.run(message.command, **_launch_options(message), stdin=stdin)
        return json_reply(await run_unless_disconnected(request, running))

    async def start(self, request: Request) -> Response:
        commands = (await self._api.sandbox(request)).commands
        process = await start_requested_process(
            commands, await decode_request_body(request, requests.StartProcessRequest)
        )
        return json_reply(responses.ProcessStartedResponse(id=process.id, pid=process.pid), 201)

    async def list(self, request: Request) -> Response:
        return json_reply(await (await self._api.sandbox(request)).commands.list())

    async def kill(self, request: Request) -> Response:
        (await self._process_from_path(request)).kill()
        return Response(status_code=204)

    async def signal(self, request: Request) -> Response:
        process = await self._process_from_path(request)
        message = await decode_request_body(request, requests.SignalRequest)
        check_signal_number(message.signal)
        process.kill(message.signal)
        return Response(status_code=204)

    async def write_stdin(self, request: Request) -> Response:
        process = await self._process_from_path(request)
        async with open_stdin_queue(process) as stdin:
            await stdin.put(b"")  # also to learn whether it has any
            async for chunk in read_body_chunks(request, self._api.config.server.upload_bytes):
                await stdin.put(chunk)
            await run_unless_disconnected(request, stdin.wait_drained())
        if stdin.refused is not None:
            raise stdin.refused
        return Response(status_code=204)

    async def close_stdin(self, request: Request) -> Response:
        (await self._process_from_path(request)).close_stdin()
        return Response(status_code=204)

    async def _process_from_path(self, request: Request) -> SandboxProgram:
        return (await self._api.sandbox(request)).commands.get(request.path_params["process"])


async def start_requested_process(commands: Core, request: requests.StartProcessRequest) -> SandboxProgram:
    """Starts a process. One with a terminal sends its raw bytes to any number of listeners.

    Raises InvalidRequest.
    """
    if request.terminal is None:
        return await commands.start(request.command, **_launch_options(request), stdin=request.stdin, background=True)
    argv = [*SHELL_COMMAND, request.command] if isinstance(request.command, str) else request.command
    return await commands.launch(
        argv, **_launch_options(request), pty=(request.terminal.rows, request.terminal.columns)
    )


def _launch_options(request: requests.RunCommandRequest | requests.StartProcessRequest) -> dict[str, Any]:
    return {
        "user": request.user,
        "env": request.env,
        "cwd": request.cwd,
        "timeout_seconds": request.timeout_seconds,
    }


def check_signal_number(number: int) -> None:
    """Raises InvalidRequest unless there is such a signal."""
    if number not in SIGNAL_NUMBERS:
        raise errors.InvalidRequest(f"there is no signal {number}: give a number from 1 to 64")
