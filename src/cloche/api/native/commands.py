"""Commands and processes of a sandbox, by request and answer. Their streams are in `sockets.py`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from cloche import errors
from cloche.api.http import body_chunks, unless_disconnected
from cloche.api.native.door import Door, body_of, reply
from cloche.api.native.stdin import feeding
from cloche.engine.commands.commands import Commands as Core
from cloche.engine.commands.program import Program
from cloche.protocol import requests, responses

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
