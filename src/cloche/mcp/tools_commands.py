"""Tools that run commands: to their end, or beside other calls."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from cloche import errors
from cloche.engine.commands.process import ProcessResult
from cloche.engine.commands.program import Exited
from cloche.events import Output
from cloche.mcp.call import Answer, Call, Tool
from cloche.mcp.content import Content, Room, Words, ending_of, shortened, text
from cloche.mcp.schemas import Arguments, Given
from cloche.mcp.tools_code import Nothing, Seconds
from cloche.mcp.workspace import Background
from cloche.sdk import backend

DEFAULT_SECONDS = 300.0
KEPT_CHARS = 4_000_000  # of each stream of a command, until it has ended
KILL_SECONDS = 5.0
MOST_WAIT_SECONDS = 60.0
NAME = r"^[A-Za-z0-9@._][A-Za-z0-9@._/+\-\[\],=<>!~^* ]*$"  # of a package, with a version; never an option

Command = Annotated[str, Meta(description="A shell command.", min_length=1)]
Cwd = Annotated[str | None, Meta(description="By default /mnt/data.")]
Env = Annotated[dict[str, str] | None, Meta(description="More environment variables.")]
ProcessId = Annotated[str, Meta(description="Id that start_process gave.")]


class RunCommand(Arguments):
    command: Command
    cwd: Cwd = None
    env: Env = None
    stdin: Annotated[str | None, Meta(description="What it reads.")] = None
    timeout_seconds: Annotated[Seconds | None, Meta(description="By default 300.")] = None


class CommandGiven(Given):
    exit_code: int
    outcome: str
    stdout: str = ""
    stderr: str = ""
    reason: str | None = None


async def run_command(call: Call, asked: RunCommand) -> Answer:
    box = await call.workspace.box()
    seconds = asked.timeout_seconds or DEFAULT_SECONDS
    how = {"cwd": asked.cwd, "env": asked.env, "timeout_seconds": seconds}
    done = await ran(call, box, asked.command, asked.stdin, **how)  # type: ignore[arg-type]  # of mixed values
    await call.told.resources_changed()
    return Answer(*_blocks(call, done), given=_given(call, done))


async def ran(
    call: Call,
    box: backend.Sandbox,
    command: str | list[str],
    stdin: str | None = None,
    *,
    cwd: str | None = None,
    env: dict[str, str] | None = None,
    timeout_seconds: float,
) -> ProcessResult:
    """To its end, with what it writes as progress. A call that is cancelled kills it."""
    process = await box.commands.start(
        command, cwd=cwd, env=env, timeout_seconds=timeout_seconds, stdin=stdin is not None
    )
    kept = {"stdout": _Kept(), "stderr": _Kept()}
    async with call.reporting() as report, process:
        if stdin is not None:
            await _feed(process, stdin)
        while events := await process.next_events():
            for event in events:
                if isinstance(event, Output):
                    kept[event.stream].add(event.text)
                    report.put(event.text)
    exited = process.exited or Exited(exit_code=-1, outcome="died")
    return ProcessResult(
        exit_code=exited.exit_code,
        stdout=kept["stdout"].text,
        stderr=kept["stderr"].text,
        outcome=exited.outcome,
        reason=exited.reason,
    )


async def _feed(process: backend.Process, stdin: str) -> None:
    try:
        await process.send_stdin(stdin.encode("utf-8", "surrogateescape"))
        process.close_stdin()
    except errors.InvalidRequest:
        pass  # it ended without reading all of it, which is its own affair


class _Kept:
    """Output: its beginning and its end, of which a model is shown still less."""

    def __init__(self) -> None:
        self._head: list[str] = []
        self._chars = 0
        self._tail = ""

    def add(self, text: str) -> None:
        if self._chars < KEPT_CHARS:
            self._head.append(text)
            self._chars += len(text)
        else:
            self._tail = (self._tail + text)[-KEPT_CHARS:]

    @property
    def text(self) -> str:
        return "".join(self._head) + self._tail


def _blocks(call: Call, done: ProcessResult) -> list[Content]:
    room = Room(call.told.most_bytes)
    blocks = [room.text(f"stderr:\n{done.stderr}")] if done.stderr else []
    if done.stdout:
        blocks.insert(0, room.text(done.stdout))
    ending = ending_of(done.outcome, done.reason, raised=False)
    if ending or done.exit_code or not blocks:
        blocks.append(text(ending or f"[exit code {done.exit_code}]"))
    return blocks


def _given(call: Call, done: ProcessResult) -> CommandGiven:
    room = Words(call.told.most_bytes)
    return CommandGiven(
        exit_code=done.exit_code,
        outcome=done.outcome,
        stderr=room.take(done.stderr, room.left // 2),
        stdout=room.take(done.stdout),
        reason=done.reason,
    )


# -- packages


class InstallPackages(Arguments):
    packages: Annotated[
        list[Annotated[str, Meta(pattern=NAME, max_length=200)]],
        Meta(min_length=1, max_length=100, description='Names, with a version where wanted: "rich", "pandas>=2".'),
    ]
    manager: Annotated[str, Meta(pattern="^(pip|npm)$", description="pip or npm.")] = "pip"


MANAGERS = {
    "pip": ["pip", "install", "--disable-pip-version-check", "--no-input"],
    "npm": ["npm", "install", "--no-audit", "--no-fund"],
}


async def install_packages(call: Call, asked: InstallPackages) -> Answer:
    box = await call.workspace.box()
    done = await ran(call, box, [*MANAGERS[asked.manager], *asked.packages], timeout_seconds=DEFAULT_SECONDS)
    words = "installed" if done.exit_code == 0 else f"{asked.manager} failed"
    return Answer(text(f"{words}: {', '.join(asked.packages)}"), *_blocks(call, done), given=_given(call, done))


# -- in the background


class StartProcess(Arguments):
    command: Command
    cwd: Cwd = None
    env: Env = None
    timeout_seconds: Annotated[Seconds | None, Meta(description="By default none but the sandbox's own end.")] = None


class ReadProcess(Arguments):
    process: ProcessId
    wait_seconds: Annotated[float, Meta(ge=0, le=MOST_WAIT_SECONDS, description="For output, or its end.")] = 0.0


class WriteProcess(Arguments):
    process: ProcessId
    text: Annotated[str, Meta(description="Goes to its stdin as it is: end a line with a newline.")] = ""
    close: Annotated[bool, Meta(description="Whether its stdin ends after that.")] = False


class KillProcess(Arguments):
    process: ProcessId


class ProcessGiven(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    process: str
    pid: int
    command: str
    running: bool
    exit_code: int | None = None
    outcome: str | None = None


class OneProcess(Given):
    process: ProcessGiven
    output: str = ""
    dropped_characters: int = 0


class ProcessesGiven(Given):
    processes: list[ProcessGiven]


async def start_process(call: Call, asked: StartProcess) -> Answer:
    box = await call.workspace.box()
    call.workspace.processes.check_room()
    process = await box.commands.start(
        asked.command,
        cwd=asked.cwd,
        env=asked.env,
        timeout_seconds=asked.timeout_seconds,
        stdin=True,
        background=True,
    )
    found = call.workspace.processes.add(process, asked.command)
    words = f"process {found.id} runs (pid {found.pid}): read_process gives what it writes"
    return Answer(text(words), given=OneProcess(process=_process(found)))


async def read_process(call: Call, asked: ReadProcess) -> Answer:
    found = call.workspace.processes.get(asked.process)
    output, dropped = await found.output(asked.wait_seconds)
    notice = [text(f"[{dropped} characters that came before this were not read in time, and are gone]")]
    shown = [text(output)] if output else []
    given = OneProcess(process=_process(found), output=shortened(output), dropped_characters=dropped)
    return Answer(*(notice if dropped else []), *shown, text(_state(found)), given=given)


async def write_process(call: Call, asked: WriteProcess) -> Answer:
    found = call.workspace.processes.get(asked.process)
    await found.send(asked.text, close=asked.close)
    return Answer(text("sent"), given=OneProcess(process=_process(found)))


async def kill_process(call: Call, asked: KillProcess) -> Answer:
    found = call.workspace.processes.get(asked.process)
    found.kill()
    await found.wait(KILL_SECONDS)
    return Answer(text(_state(found)), given=OneProcess(process=_process(found)))


async def list_processes(call: Call, asked: Nothing) -> Answer:
    found = call.workspace.processes.list()
    lines = [f"{each.id}: {each.command[:200]} {_state(each)}" for each in found] or ["none was started"]
    return Answer(text("\n".join(lines)), given=ProcessesGiven(processes=[_process(each) for each in found]))


def _state(process: Background) -> str:
    if process.runs:
        return "[it runs]"
    if process.exited is None:
        return f"[it is lost: {process.lost}]"
    ending = ending_of(process.exited.outcome, process.exited.reason, raised=False)
    return ending or f"[exit code {process.exited.exit_code}]"


def _process(process: Background) -> ProcessGiven:
    exited = process.exited
    return ProcessGiven(
        process=process.id,
        pid=process.pid,
        command=shortened(process.command, 1000),
        running=process.runs,
        exit_code=None if exited is None else exited.exit_code,
        outcome=None if exited is None else exited.outcome,
    )


TOOLS = (
    Tool("run_command", "Run a command", "Run a shell command in the sandbox, to its end. Its exit code and output are "
         "the answer, whatever they are.", RunCommand, run_command, CommandGiven),
    Tool("install_packages", "Install packages", "Install packages from PyPI (pip) or npm into the sandbox, where its "
         "operator allows that.", InstallPackages, install_packages, CommandGiven),
    Tool("start_process", "Start a process", "Start a shell command that runs beside other calls, such as a server.",
         StartProcess, start_process, OneProcess),
    Tool("read_process", "Read a process", "What a process wrote since it was last asked, and whether it runs.",
         ReadProcess, read_process, OneProcess),
    Tool("write_process", "Write to a process", "Write to a process's stdin.", WriteProcess, write_process, OneProcess),
    Tool("kill_process", "Kill a process", "End a process.", KillProcess, kill_process, OneProcess,
         destroys=True, repeats=True),
    Tool("list_processes", "List processes", "The processes that were started here.", Nothing, list_processes,
         ProcessesGiven, reads_only=True),
)  # fmt: skip
