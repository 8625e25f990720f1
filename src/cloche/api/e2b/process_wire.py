"""envd's process service on the wire: what its messages say, and how the engine's events look in it."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from cloche import errors
from cloche.api.e2b.connect import Message, Refusal
from cloche.engine.commands.jobs import Chunk, Job
from cloche.engine.commands.program import Exited

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
