"""envd's process service: programs that anybody with the sandbox's token may start, listen to, feed and end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.routing import BaseRoute

from cloche import errors
from cloche.api.e2b import process_wire as wire
from cloche.api.e2b.connect import Refusal, client_stream, server_stream, service, timeout_seconds, unary
from cloche.api.e2b.envd_wire import absolute, caller
from cloche.api.http import Dialect
from cloche.engine.commands.jobs import Chunk, Job, PastJob
from cloche.engine.sandboxes.sandbox import Sandbox

INPUT_SECONDS = 60.0  # for input that a program does not read, where the client sets no time
KILL_SECONDS = 5.0  # how long the answer to a signal that kills waits for the end

Reply = dict[str, Any]


def routes(dialect: Dialect) -> list[BaseRoute]:
    return service(
        "process.Process",
        dialect,
        {
            "List": unary(wire.ListRequest, list_),
            "Start": server_stream(wire.StartRequest, start, keepalive=wire.KEEPALIVE),
            "Connect": server_stream(wire.ProcessRequest, connect, keepalive=wire.KEEPALIVE),
            "Update": unary(wire.UpdateRequest, update),
            "SendInput": unary(wire.SendInputRequest, send_input),
            "StreamInput": client_stream(wire.StreamInputRequest, stream_input),
            "SendSignal": unary(wire.SendSignalRequest, send_signal),
            "CloseStdin": unary(wire.ProcessRequest, close_stdin),
        },
    )


async def list_(request: Request, _: wire.ListRequest) -> Reply:
    return {"processes": [wire.listed(job) for job in _sandbox(request).commands.jobs.list()]}


async def start(request: Request, asked: wire.StartRequest) -> AsyncGenerator[Reply, None]:
    """The client's time limit is the program's: at its end the program is killed."""
    sandbox, user = _sandbox(request), caller(request)
    if not asked.process.cmd:
        raise errors.InvalidRequest("there is no program to start: give `process.cmd`")
    cwd = absolute(asked.process.cwd, user) if asked.process.cwd else sandbox.spec.cwd
    try:
        job = await sandbox.commands.launch(
            (asked.process.cmd, *asked.process.args),
            user=user,
            env=asked.process.envs,
            cwd=cwd,
            timeout_seconds=timeout_seconds(request),
            stdin=asked.stdin is not False and asked.pty is None,
            pty=None if asked.pty is None else wire.size_of(asked.pty),
            tag=asked.tag,
        )
    except errors.FileNotFound:
        raise errors.InvalidRequest(f"cwd '{cwd}' does not exist") from None
    except errors.NotADirectory:
        raise errors.InvalidRequest(f"cwd '{cwd}' is not a directory") from None
    return _events(sandbox, job, starter=True)


async def connect(request: Request, asked: wire.ProcessRequest) -> AsyncGenerator[Reply, None]:
    jobs, selected = _sandbox(request).commands.jobs, _named(asked.process)
    return _events(_sandbox(request), jobs.recall(selected.pid, selected.tag), starter=False)


async def update(request: Request, asked: wire.UpdateRequest) -> Reply:
    job = _job(request, asked.process)
    if asked.pty is not None:
        job.resize(*wire.size_of(asked.pty))
    return {}


async def send_input(request: Request, asked: wire.SendInputRequest) -> Reply:
    await _feed(request, _job(request, asked.process), asked.input)
    return {}


async def stream_input(request: Request, coming: AsyncIterator[wire.StreamInputRequest]) -> Reply:
    job: Job | None = None
    async for message in coming:
        if message.start is not None:
            job = _job(request, message.start.process)
        elif message.data is not None:
            if job is None:
                raise errors.InvalidRequest("input came before it was said for which process: send `start` first")
            await _feed(request, job, message.data.input)
    return {}


async def send_signal(request: Request, asked: wire.SendSignalRequest) -> Reply:
    job, number = _job(request, asked.process), wire.signal_of(asked.signal)
    job.kill(number)
    if number == signal.SIGKILL:  # clients look at once whether it is gone
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_SECONDS):
                await job.wait()
    return {}


async def close_stdin(request: Request, asked: wire.ProcessRequest) -> Reply:
    job = _job(request, asked.process)
    if job.ask.pty is not None:
        raise Refusal("unknown", "error closing stdin: a terminal's input has no end: send Ctrl+D (0x04) instead")
    job.close_stdin()
    return {}


def _sandbox(request: Request) -> Sandbox:
    sandbox: Sandbox = request.scope["state"]["resident"].sandbox
    return sandbox


def _job(request: Request, selected: wire.Selector) -> Job:
    return _sandbox(request).commands.jobs.find(_named(selected).pid, selected.tag)


def _named(selected: wire.Selector) -> wire.Selector:
    if selected.pid is None and selected.tag is None:
        raise errors.InvalidRequest("no process is named: give its pid or its tag")
    return selected


async def _feed(request: Request, job: Job, given: wire.Input) -> None:
    """Waits until the program has room for it, as long as the client does."""
    data = wire.input_of(given)
    if (given.pty is not None) != (job.ask.pty is not None):
        raise Refusal("internal", f"process {job.pid} has {'a' if job.ask.pty else 'no'} terminal: send `{_way(job)}`")
    try:
        async with asyncio.timeout(timeout_seconds(request) or INPUT_SECONDS):
            await job.send_stdin(data)
    except TimeoutError:
        raise Refusal("deadline_exceeded", f"process {job.pid} does not read its input in time") from None
    except errors.InvalidRequest as error:
        raise Refusal("internal", f"error writing to {_way(job)}: {error}") from None


def _way(job: Job) -> str:
    return "stdin" if job.ask.pty is None else "pty"


async def _events(sandbox: Sandbox, job: Job | PastJob, *, starter: bool) -> AsyncGenerator[Reply, None]:
    """Raises Gone or SandboxPaused when the cell ends: then nobody can say how the program did."""
    in_terminal = isinstance(job, Job) and job.ask.pty is not None
    async with job.listen() as listener:
        yield wire.started(job.pid)
        while events := await listener.next_events():
            for event in events:
                if isinstance(event, Chunk):
                    for reply in wire.data_frames(event, in_terminal):
                        yield reply
                    continue
                if sandbox.ending is not None:
                    sandbox.check_running()
                if starter and event.outcome == "timed_out":
                    raise Refusal("deadline_exceeded", f"the process was killed: {event.reason}")
                yield wire.ended(event)
