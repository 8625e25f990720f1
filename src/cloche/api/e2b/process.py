"""envd's process service: programs that anybody with the sandbox's token may start, listen to, feed and end."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.routing import BaseRoute

from cloche import errors
from cloche.api.e2b.connect import Message, Refusal, client_stream, server_stream, service, timeout_seconds, unary
from cloche.api.e2b.envd_schema import absolute, caller
from cloche.api.http import Dialect
from cloche.engine.commands.jobs import Chunk, Job, PastJob
from cloche.engine.commands.program import Exited
from cloche.engine.sandboxes.sandbox import Sandbox

# envd's process service on the wire: what its messages say, and how the engine's events look in it.

CHUNK_BYTES = 32 << 10
SIGNALS = {"SIGNAL_SIGTERM": 15, "SIGNAL_SIGKILL": 9, "15": 15, "9": 9}
KEEPALIVE: dict[str, Any] = {"event": {"keepalive": {}}}

# As Go's syscall.Signal has them, which is what clients of envd see.
_SIGNAL_NAMES = {
    1: "hangup",
    2: "interrupt",
    3: "quit",
    4: "illegal instruction",
    5: "trace/breakpoint trap",
    6: "aborted",
    7: "bus error",
    8: "floating point exception",
    9: "killed",
    10: "user defined signal 1",
    11: "segmentation fault",
    12: "user defined signal 2",
    13: "broken pipe",
    14: "alarm clock",
    15: "terminated",
}


# -- what clients say


class ProcessConfig(Message):
    cmd: str = ""
    args: tuple[str, ...] = ()
    envs: dict[str, str] = {}
    cwd: str = ""


class Size(Message):
    cols: int = 0
    rows: int = 0


class Terminal(Message):
    size: Size = Size()


class Selector(Message):
    pid: int | None = None
    tag: str | None = None


class Input(Message):
    stdin: str | None = None
    pty: str | None = None


class ListRequest(Message):
    pass


class StartRequest(Message):
    process: ProcessConfig = ProcessConfig()
    pty: Terminal | None = None
    tag: str | None = None
    stdin: bool | None = None


class ProcessRequest(Message):
    """Connect and CloseStdin."""

    process: Selector = Selector()


class UpdateRequest(Message):
    process: Selector = Selector()
    pty: Terminal | None = None


class SendInputRequest(Message):
    process: Selector = Selector()
    input: Input = Input()


class SendSignalRequest(Message):
    process: Selector = Selector()
    signal: str | int = "SIGNAL_UNSPECIFIED"


class InputStart(Message):
    process: Selector = Selector()


class InputData(Message):
    input: Input = Input()


class StreamInputRequest(Message):
    """One of these; a keepalive is a message with none of them."""

    start: InputStart | None = None
    data: InputData | None = None


def size_of(terminal: Terminal) -> tuple[int, int]:
    """Rows and columns."""
    return terminal.size.rows, terminal.size.cols


def signal_of(given: str | int) -> int:
    """Raises Refusal for one that cannot be sent."""
    number = SIGNALS.get(str(given))
    if number is None:
        raise Refusal(
            "unimplemented", f"invalid signal: {str(given)[:40]}; there are SIGNAL_SIGTERM and SIGNAL_SIGKILL"
        )
    return number


def input_of(given: Input) -> bytes:
    """Raises InvalidRequest for what is not base64, Refusal for no input at all."""
    data = given.stdin if given.stdin is not None else given.pty
    if data is None:
        raise Refusal("unimplemented", "invalid input type: give `stdin` or `pty`")
    try:
        # As proto3's JSON: either alphabet, with or without padding.
        plain = data.replace("-", "+").replace("_", "/").rstrip("=")
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise errors.InvalidRequest("the input is not base64: encode its bytes") from None


# -- what we say


def started(pid: int) -> dict[str, Any]:
    return {"event": {"start": {"pid": pid}}}


def data_frames(chunk: Chunk, terminal: bool) -> list[dict[str, Any]]:
    """The bytes as they are: whoever decodes them knows what to do with a character that was cut in two."""
    name, data = "pty" if terminal else chunk.stream, chunk.data
    parts = (data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES))
    return [{"event": {"data": {name: base64.b64encode(part).decode()}}} for part in parts]


def ended(exited: Exited) -> dict[str, Any]:
    """As Go describes the state of a process. One that a signal ended has exit code -1."""
    code = -1 if exited.signal is not None else exited.exit_code
    status = f"exit status {code}" if exited.signal is None else f"signal: {_signal_name(exited.signal)}"
    end: dict[str, Any] = {"exitCode": code, "exited": exited.signal is None, "status": status}
    return {"event": {"end": {**end, "error": status} if code else end}}


def _signal_name(number: int) -> str:
    return _SIGNAL_NAMES.get(number, f"signal {number}")


def listed(job: Job) -> dict[str, Any]:
    argv = job.ask.argv or ()
    config = {"cmd": argv[0] if argv else "", "args": argv[1:], "envs": job.ask.env, "cwd": job.ask.cwd}
    return {"config": config, "pid": job.pid, **({} if job.tag is None else {"tag": job.tag})}


INPUT_SECONDS = 60.0  # for input that a program does not read, where the client sets no time
KILL_SECONDS = 5.0  # how long the answer to a signal that kills waits for the end

Reply = dict[str, Any]


def routes(dialect: Dialect) -> list[BaseRoute]:
    return service(
        "process.Process",
        dialect,
        {
            "List": unary(ListRequest, list_),
            "Start": server_stream(StartRequest, start, keepalive=KEEPALIVE),
            "Connect": server_stream(ProcessRequest, connect, keepalive=KEEPALIVE),
            "Update": unary(UpdateRequest, update),
            "SendInput": unary(SendInputRequest, send_input),
            "StreamInput": client_stream(StreamInputRequest, stream_input),
            "SendSignal": unary(SendSignalRequest, send_signal),
            "CloseStdin": unary(ProcessRequest, close_stdin),
        },
    )


async def list_(request: Request, _: ListRequest) -> Reply:
    return {"processes": [listed(job) for job in _sandbox(request).commands.jobs.list()]}


async def start(request: Request, asked: StartRequest) -> AsyncGenerator[Reply, None]:
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
            pty=None if asked.pty is None else size_of(asked.pty),
            tag=asked.tag,
        )
    except errors.FileNotFound:
        raise errors.InvalidRequest(f"cwd '{cwd}' does not exist") from None
    except errors.NotADirectory:
        raise errors.InvalidRequest(f"cwd '{cwd}' is not a directory") from None
    return _events(sandbox, job, starter=True)


async def connect(request: Request, asked: ProcessRequest) -> AsyncGenerator[Reply, None]:
    jobs, selected = _sandbox(request).commands.jobs, _named(asked.process)
    return _events(_sandbox(request), jobs.recall(selected.pid, selected.tag), starter=False)


async def update(request: Request, asked: UpdateRequest) -> Reply:
    job = _job(request, asked.process)
    if asked.pty is not None:
        job.resize(*size_of(asked.pty))
    return {}


async def send_input(request: Request, asked: SendInputRequest) -> Reply:
    await _feed(request, _job(request, asked.process), asked.input)
    return {}


async def stream_input(request: Request, coming: AsyncIterator[StreamInputRequest]) -> Reply:
    job: Job | None = None
    async for message in coming:
        if message.start is not None:
            job = _job(request, message.start.process)
        elif message.data is not None:
            if job is None:
                raise errors.InvalidRequest("input came before it was said for which process: send `start` first")
            await _feed(request, job, message.data.input)
    return {}


async def send_signal(request: Request, asked: SendSignalRequest) -> Reply:
    job, number = _job(request, asked.process), signal_of(asked.signal)
    job.kill(number)
    if number == signal.SIGKILL:  # clients look at once whether it is gone
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_SECONDS):
                await job.wait()
    return {}


async def close_stdin(request: Request, asked: ProcessRequest) -> Reply:
    job = _job(request, asked.process)
    if job.ask.pty is not None:
        raise Refusal("unknown", "error closing stdin: a terminal's input has no end: send Ctrl+D (0x04) instead")
    job.close_stdin()
    return {}


def _sandbox(request: Request) -> Sandbox:
    sandbox: Sandbox = request.scope["state"]["resident"].sandbox
    return sandbox


def _job(request: Request, selected: Selector) -> Job:
    return _sandbox(request).commands.jobs.find(_named(selected).pid, selected.tag)


def _named(selected: Selector) -> Selector:
    if selected.pid is None and selected.tag is None:
        raise errors.InvalidRequest("no process is named: give its pid or its tag")
    return selected


async def _feed(request: Request, job: Job, given: Input) -> None:
    """Waits until the program has room for it, as long as the client does."""
    data = input_of(given)
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
        yield started(job.pid)
        while events := await listener.next_events():
            for event in events:
                if isinstance(event, Chunk):
                    for reply in data_frames(event, in_terminal):
                        yield reply
                    continue
                if sandbox.ending is not None:
                    sandbox.check_running()
                if starter and event.outcome == "timed_out":
                    raise Refusal("deadline_exceeded", f"the process was killed: {event.reason}")
                yield ended(event)
