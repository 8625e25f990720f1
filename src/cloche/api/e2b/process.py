"""envd's process service: holders of the sandbox's token start, follow, feed and end programs."""

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
from cloche.api.e2b.connect import (
    ConnectMessage,
    ConnectRpcError,
    client_stream_handler,
    client_timeout_seconds,
    server_stream_handler,
    service_routes,
    unary_handler,
)
from cloche.api.e2b.context import e2b_sandbox_of
from cloche.api.e2b.envd_schema import calling_user, resolve_user_path
from cloche.api.e2b.port_target import CODE_PORT
from cloche.api.http import Dialect
from cloche.engine.commands.jobs import CommandJob, EndedJob, OutputChunk
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import Exited

# Wire format of envd's process service: its messages, and the engine's events as its events.

DATA_FRAME_BYTES = 32 << 10
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


class ProcessConfigMessage(ConnectMessage):
    cmd: str = ""
    args: tuple[str, ...] = ()
    envs: dict[str, str] = {}
    cwd: str = ""


class TerminalSizeMessage(ConnectMessage):
    cols: int = 0
    rows: int = 0


class TerminalMessage(ConnectMessage):
    size: TerminalSizeMessage = TerminalSizeMessage()


class ProcessSelector(ConnectMessage):
    pid: int | None = None
    tag: str | None = None


class ProcessInput(ConnectMessage):
    stdin: str | None = None
    pty: str | None = None


class EnvdListRequest(ConnectMessage):
    pass


class EnvdStartRequest(ConnectMessage):
    process: ProcessConfigMessage = ProcessConfigMessage()
    pty: TerminalMessage | None = None
    tag: str | None = None
    stdin: bool | None = None


class EnvdProcessRequest(ConnectMessage):
    """Connect and CloseStdin."""

    process: ProcessSelector = ProcessSelector()


class EnvdUpdateRequest(ConnectMessage):
    process: ProcessSelector = ProcessSelector()
    pty: TerminalMessage | None = None


class EnvdSendInputRequest(ConnectMessage):
    process: ProcessSelector = ProcessSelector()
    input: ProcessInput = ProcessInput()


class EnvdSendSignalRequest(ConnectMessage):
    process: ProcessSelector = ProcessSelector()
    signal: str | int = "SIGNAL_UNSPECIFIED"


class InputStart(ConnectMessage):
    process: ProcessSelector = ProcessSelector()


class InputData(ConnectMessage):
    input: ProcessInput = ProcessInput()


class EnvdStreamInputRequest(ConnectMessage):
    """One of these; a keepalive is a message with none of them."""

    start: InputStart | None = None
    data: InputData | None = None


def terminal_size_of(terminal: TerminalMessage) -> tuple[int, int]:
    """Rows and columns."""
    return terminal.size.rows, terminal.size.cols


def decode_signal_number(given: str | int) -> int:
    """Raises ConnectRpcError for an unsupported signal."""
    number = SIGNALS.get(str(given))
    if number is None:
        raise ConnectRpcError(
            "unimplemented", f"invalid signal: {str(given)[:40]}; there are SIGNAL_SIGTERM and SIGNAL_SIGKILL"
        )
    return number


def decode_process_input(given: ProcessInput) -> bytes:
    """Raises InvalidRequest for invalid base64, ConnectRpcError for missing input."""
    data = given.stdin if given.stdin is not None else given.pty
    if data is None:
        raise ConnectRpcError("unimplemented", "invalid input type: give `stdin` or `pty`")
    try:
        # As proto3's JSON: either alphabet, with or without padding.
        plain = data.replace("-", "+").replace("_", "/").rstrip("=")
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise errors.InvalidRequest("the input is not base64: encode its bytes") from None


# -- what we say


def encode_start_event(pid: int) -> dict[str, Any]:
    return {"event": {"start": {"pid": pid}}}


def encode_data_events(chunk: OutputChunk, terminal: bool) -> list[dict[str, Any]]:
    """The bytes unchanged: the client decodes them, including characters split between frames."""
    name, data = "pty" if terminal else chunk.stream, chunk.data
    parts = (data[start : start + DATA_FRAME_BYTES] for start in range(0, len(data), DATA_FRAME_BYTES))
    return [{"event": {"data": {name: base64.b64encode(part).decode()}}} for part in parts]


def encode_end_event(exited: Exited) -> dict[str, Any]:
    """Go's description of a process state. A process that a signal ended has exit code -1."""
    code = -1 if exited.signal is not None else exited.exit_code
    status = f"exit status {code}" if exited.signal is None else f"signal: {_signal_name(exited.signal)}"
    end: dict[str, Any] = {"exitCode": code, "exited": exited.signal is None, "status": status}
    return {"event": {"end": {**end, "error": status} if code else end}}


def _signal_name(number: int) -> str:
    return _SIGNAL_NAMES.get(number, f"signal {number}")


def encode_listed_process(job: CommandJob) -> dict[str, Any]:
    argv = job.ask.argv or ()
    config = {"cmd": argv[0] if argv else "", "args": argv[1:], "envs": job.ask.env, "cwd": job.ask.cwd}
    return {"config": config, "pid": job.pid, **({} if job.tag is None else {"tag": job.tag})}


INPUT_SECONDS = 60.0  # for input that a program does not read, where the client sets no time
KILL_SECONDS = 5.0  # how long the answer to a signal that kills waits for the end

Reply = dict[str, Any]


def process_routes(dialect: Dialect) -> list[BaseRoute]:
    return service_routes(
        "process.Process",
        dialect,
        {
            "List": unary_handler(EnvdListRequest, list_processes),
            "Start": server_stream_handler(EnvdStartRequest, start_process, keepalive=KEEPALIVE),
            "Connect": server_stream_handler(EnvdProcessRequest, connect_process, keepalive=KEEPALIVE),
            "Update": unary_handler(EnvdUpdateRequest, update_process),
            "SendInput": unary_handler(EnvdSendInputRequest, send_input),
            "StreamInput": client_stream_handler(EnvdStreamInputRequest, stream_input),
            "SendSignal": unary_handler(EnvdSendSignalRequest, send_signal),
            "CloseStdin": unary_handler(EnvdProcessRequest, close_stdin),
        },
    )


async def list_processes(request: Request, _: EnvdListRequest) -> Reply:
    return {"processes": [encode_listed_process(job) for job in e2b_sandbox_of(request).sandbox.commands.jobs.list()]}


async def start_process(request: Request, message: EnvdStartRequest) -> AsyncGenerator[Reply, None]:
    """Starts a program. The client's timeout is the program's: then the program is killed."""
    sandbox, user = e2b_sandbox_of(request).sandbox, calling_user(request)
    if not message.process.cmd:
        raise errors.InvalidRequest("there is no program to start: give `process.cmd`")
    cwd = resolve_user_path(message.process.cwd, user) if message.process.cwd else sandbox.spec.cwd
    if e2b_sandbox_of(request).sealed:
        await sandbox.health_port.open(CODE_PORT)
    try:
        job = await sandbox.commands.launch(
            (message.process.cmd, *message.process.args),
            user=user,
            env=message.process.envs,
            cwd=cwd,
            timeout_seconds=client_timeout_seconds(request),
            stdin=message.stdin is not False and message.pty is None,
            pty=None if message.pty is None else terminal_size_of(message.pty),
            tag=message.tag,
        )
    except errors.FileNotFound:
        raise errors.InvalidRequest(f"cwd '{cwd}' does not exist") from None
    except errors.NotADirectory:
        raise errors.InvalidRequest(f"cwd '{cwd}' is not a directory") from None
    return _stream_process_events(sandbox, job, starter=True)


async def connect_process(request: Request, message: EnvdProcessRequest) -> AsyncGenerator[Reply, None]:
    jobs, selected = e2b_sandbox_of(request).sandbox.commands.jobs, _check_selector(message.process)
    return _stream_process_events(
        e2b_sandbox_of(request).sandbox, jobs.recall(selected.pid, selected.tag), starter=False
    )


async def update_process(request: Request, message: EnvdUpdateRequest) -> Reply:
    job = _find_selected_job(request, message.process)
    if message.pty is not None:
        job.resize(*terminal_size_of(message.pty))
    return {}


async def send_input(request: Request, message: EnvdSendInputRequest) -> Reply:
    await _send_process_input(request, _find_selected_job(request, message.process), message.input)
    return {}


async def stream_input(request: Request, coming: AsyncIterator[EnvdStreamInputRequest]) -> Reply:
    job: CommandJob | None = None
    async for message in coming:
        if message.start is not None:
            job = _find_selected_job(request, message.start.process)
        elif message.data is not None:
            if job is None:
                raise errors.InvalidRequest("input came before it was said for which process: send `start` first")
            await _send_process_input(request, job, message.data.input)
    return {}


async def send_signal(request: Request, message: EnvdSendSignalRequest) -> Reply:
    job, number = _find_selected_job(request, message.process), decode_signal_number(message.signal)
    job.kill(number)
    if number == signal.SIGKILL:  # clients look at once whether it is gone
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_SECONDS):
                await job.wait()
    return {}


async def close_stdin(request: Request, message: EnvdProcessRequest) -> Reply:
    job = _find_selected_job(request, message.process)
    if job.ask.pty is not None:
        raise ConnectRpcError(
            "unknown", "error closing stdin: a terminal's input has no end: send Ctrl+D (0x04) instead"
        )
    job.close_stdin()
    return {}


def _find_selected_job(request: Request, selected: ProcessSelector) -> CommandJob:
    return e2b_sandbox_of(request).sandbox.commands.jobs.find(_check_selector(selected).pid, selected.tag)


def _check_selector(selected: ProcessSelector) -> ProcessSelector:
    if selected.pid is None and selected.tag is None:
        raise errors.InvalidRequest("no process is named: give its pid or its tag")
    return selected


async def _send_process_input(request: Request, job: CommandJob, given: ProcessInput) -> None:
    """Waits until the program accepts the input, or the client's timeout."""
    data = decode_process_input(given)
    if (given.pty is not None) != (job.ask.pty is not None):
        raise ConnectRpcError(
            "internal",
            f"process {job.pid} has {'a' if job.ask.pty else 'no'} terminal: send `{_input_field_name(job)}`",
        )
    try:
        async with asyncio.timeout(client_timeout_seconds(request) or INPUT_SECONDS):
            await job.send_stdin(data)
    except TimeoutError:
        raise ConnectRpcError("deadline_exceeded", f"process {job.pid} does not read its input in time") from None
    except errors.InvalidRequest as error:
        raise ConnectRpcError("internal", f"error writing to {_input_field_name(job)}: {error}") from None


def _input_field_name(job: CommandJob) -> str:
    return "stdin" if job.ask.pty is None else "pty"


async def _stream_process_events(
    sandbox: Sandbox, job: CommandJob | EndedJob, *, starter: bool
) -> AsyncGenerator[Reply, None]:
    """Raises Gone or SandboxPaused when the cell ends: then the program's outcome is unknown."""
    in_terminal = isinstance(job, CommandJob) and job.ask.pty is not None
    async with job.listen() as listener:
        yield encode_start_event(job.pid)
        while events := await listener.next_events():
            for event in events:
                if isinstance(event, OutputChunk):
                    for reply in encode_data_events(event, in_terminal):
                        yield reply
                    continue
                if sandbox.ending is not None:
                    sandbox.check_running()
                if starter and event.outcome == "timed_out":
                    raise ConnectRpcError("deadline_exceeded", f"the process was killed: {event.reason}")
                yield encode_end_event(event)
