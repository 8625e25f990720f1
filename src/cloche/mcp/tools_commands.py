"""Tools that run commands: to their end, or in the background."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from cloche import errors
from cloche.events import Exited, Output, ProcessResult
from cloche.mcp.call import McpTool, McpToolCall, McpToolResult
from cloche.mcp.content import ContentBlock, ContentBudget, TextBudget, describe_ending, shorten_text, text_block
from cloche.mcp.schemas import StructuredOutput, ToolArguments
from cloche.mcp.tools_code import NoArguments, Seconds
from cloche.mcp.workspace import BackgroundProcess
from cloche.sdk import backend

DEFAULT_SECONDS = 300.0
MAX_KEPT_CHARS = 4_000_000  # of each stream of a command, until it has ended
KILL_SECONDS = 5.0
MAX_WAIT_SECONDS = 60.0
PACKAGE_PATTERN = r"^[A-Za-z0-9@._][A-Za-z0-9@._/+\-\[\],=<>!~^* ]*$"  # of a package, with a version; never an option

Command = Annotated[str, Meta(description="A shell command.", min_length=1)]
Cwd = Annotated[str | None, Meta(description="By default /mnt/data.")]
Env = Annotated[dict[str, str] | None, Meta(description="More environment variables.")]
ProcessId = Annotated[str, Meta(description="Id returned by start_process.")]


class RunCommandArguments(ToolArguments):
    command: Command
    cwd: Cwd = None
    env: Env = None
    stdin: Annotated[str | None, Meta(description="Its standard input.")] = None
    timeout_seconds: Annotated[Seconds | None, Meta(description="By default 300.")] = None


class CommandOutput(StructuredOutput):
    exit_code: int
    outcome: str
    stdout: str = ""
    stderr: str = ""
    reason: str | None = None


async def run_command(call: McpToolCall, arguments: RunCommandArguments) -> McpToolResult:
    box = await call.workspace.box()
    seconds = arguments.timeout_seconds or DEFAULT_SECONDS
    how = {"cwd": arguments.cwd, "env": arguments.env, "timeout_seconds": seconds}
    done = await run_to_end(call, box, arguments.command, arguments.stdin, **how)  # type: ignore[arg-type]  # of mixed values
    await call.told.resources_changed()
    return McpToolResult(*_command_blocks(call, done), given=_command_output(call, done))


async def run_to_end(
    call: McpToolCall,
    box: backend.BackendSandbox,
    command: str | list[str],
    stdin: str | None = None,
    *,
    cwd: str | None = None,
    env: dict[str, str] | None = None,
    timeout_seconds: float,
) -> ProcessResult:
    """Runs a command to its end, with its output as progress. Cancelling the call kills it."""
    process = await box.commands.start(
        command, cwd=cwd, env=env, timeout_seconds=timeout_seconds, stdin=stdin is not None
    )
    kept = {"stdout": _KeptOutput(), "stderr": _KeptOutput()}
    async with call.progress_report() as report, process:
        if stdin is not None:
            await _feed_stdin(process, stdin)
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


async def _feed_stdin(process: backend.BackendProcess, stdin: str) -> None:
    try:
        await process.send_stdin(stdin.encode("utf-8", "surrogateescape"))
        process.close_stdin()
    except errors.InvalidRequest:
        pass  # it ended without reading all of it, which is its own affair


class _KeptOutput:
    """Output of a stream: its beginning and its end, of which a model is shown still less."""

    def __init__(self) -> None:
        self._head: list[str] = []
        self._chars = 0
        self._tail = ""

    def add(self, text: str) -> None:
        if self._chars < MAX_KEPT_CHARS:
            self._head.append(text)
            self._chars += len(text)
        else:
            self._tail = (self._tail + text)[-MAX_KEPT_CHARS:]

    @property
    def text(self) -> str:
        return "".join(self._head) + self._tail


def _command_blocks(call: McpToolCall, done: ProcessResult) -> list[ContentBlock]:
    room = ContentBudget(call.told.most_bytes)
    blocks = [room.text(f"stderr:\n{done.stderr}")] if done.stderr else []
    if done.stdout:
        blocks.insert(0, room.text(done.stdout))
    ending = describe_ending(done.outcome, done.reason, raised=False)
    if ending or done.exit_code or not blocks:
        blocks.append(text_block(ending or f"[exit code {done.exit_code}]"))
    return blocks


def _command_output(call: McpToolCall, done: ProcessResult) -> CommandOutput:
    room = TextBudget(call.told.most_bytes)
    return CommandOutput(
        exit_code=done.exit_code,
        outcome=done.outcome,
        stderr=room.take(done.stderr, room.left // 2),
        stdout=room.take(done.stdout),
        reason=done.reason,
    )


# -- packages


class InstallPackagesArguments(ToolArguments):
    packages: Annotated[
        list[Annotated[str, Meta(pattern=PACKAGE_PATTERN, max_length=200)]],
        Meta(min_length=1, max_length=100, description='Names, with a version where wanted: "rich", "pandas>=2".'),
    ]
    manager: Annotated[str, Meta(pattern="^(pip|npm)$", description="pip or npm.")] = "pip"


INSTALL_COMMANDS = {
    "pip": ["pip", "install", "--disable-pip-version-check", "--no-input"],
    "npm": ["npm", "install", "--no-audit", "--no-fund"],
}


async def install_packages(call: McpToolCall, arguments: InstallPackagesArguments) -> McpToolResult:
    box = await call.workspace.box()
    done = await run_to_end(
        call, box, [*INSTALL_COMMANDS[arguments.manager], *arguments.packages], timeout_seconds=DEFAULT_SECONDS
    )
    words = "installed" if done.exit_code == 0 else f"{arguments.manager} failed"
    return McpToolResult(
        text_block(f"{words}: {', '.join(arguments.packages)}"),
        *_command_blocks(call, done),
        given=_command_output(call, done),
    )


# -- in the background


class StartProcessArguments(ToolArguments):
    command: Command
    cwd: Cwd = None
    env: Env = None
    timeout_seconds: Annotated[Seconds | None, Meta(description="By default none but the sandbox's end.")] = None


class ReadProcessArguments(ToolArguments):
    process: ProcessId
    wait_seconds: Annotated[float, Meta(ge=0, le=MAX_WAIT_SECONDS, description="Wait for output, or for the end.")] = (
        0.0
    )


class WriteProcessArguments(ToolArguments):
    process: ProcessId
    text: Annotated[str, Meta(description="Written to its stdin unchanged: end a line with a newline.")] = ""
    close: Annotated[bool, Meta(description="Whether to close its stdin afterwards.")] = False


class KillProcessArguments(ToolArguments):
    process: ProcessId


class ProcessOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    process: str
    pid: int
    command: str
    running: bool
    exit_code: int | None = None
    outcome: str | None = None


class OneProcessOutput(StructuredOutput):
    process: ProcessOutput
    output: str = ""
    dropped_characters: int = 0


class ProcessesOutput(StructuredOutput):
    processes: list[ProcessOutput]


async def start_process(call: McpToolCall, arguments: StartProcessArguments) -> McpToolResult:
    box = await call.workspace.box()
    call.workspace.processes.check_room()
    process = await box.commands.start(
        arguments.command,
        cwd=arguments.cwd,
        env=arguments.env,
        timeout_seconds=arguments.timeout_seconds,
        stdin=True,
        background=True,
    )
    found = call.workspace.processes.add(process, arguments.command)
    words = f"process {found.id} runs (pid {found.pid}): read_process returns its output"
    return McpToolResult(text_block(words), given=OneProcessOutput(process=_process_output(found)))


async def read_process(call: McpToolCall, arguments: ReadProcessArguments) -> McpToolResult:
    found = call.workspace.processes.get(arguments.process)
    output, dropped = await found.output(arguments.wait_seconds)
    notice = [text_block(f"[{dropped} characters that came before this were not read in time, and are gone]")]
    shown = [text_block(output)] if output else []
    given = OneProcessOutput(process=_process_output(found), output=shorten_text(output), dropped_characters=dropped)
    return McpToolResult(*(notice if dropped else []), *shown, text_block(_process_state(found)), given=given)


async def write_process(call: McpToolCall, arguments: WriteProcessArguments) -> McpToolResult:
    found = call.workspace.processes.get(arguments.process)
    await found.send(arguments.text, close=arguments.close)
    return McpToolResult(text_block("sent"), given=OneProcessOutput(process=_process_output(found)))


async def kill_process(call: McpToolCall, arguments: KillProcessArguments) -> McpToolResult:
    found = call.workspace.processes.get(arguments.process)
    found.kill()
    await found.wait(KILL_SECONDS)
    return McpToolResult(text_block(_process_state(found)), given=OneProcessOutput(process=_process_output(found)))


async def list_processes(call: McpToolCall, arguments: NoArguments) -> McpToolResult:
    found = call.workspace.processes.list()
    lines = [f"{each.id}: {each.command[:200]} {_process_state(each)}" for each in found] or ["none was started"]
    return McpToolResult(
        text_block("\n".join(lines)), given=ProcessesOutput(processes=[_process_output(each) for each in found])
    )


def _process_state(process: BackgroundProcess) -> str:
    if process.runs:
        return "[it runs]"
    if process.exited is None:
        return f"[it is lost: {process.lost}]"
    ending = describe_ending(process.exited.outcome, process.exited.reason, raised=False)
    return ending or f"[exit code {process.exited.exit_code}]"


def _process_output(process: BackgroundProcess) -> ProcessOutput:
    exited = process.exited
    return ProcessOutput(
        process=process.id,
        pid=process.pid,
        command=shorten_text(process.command, 1000),
        running=process.runs,
        exit_code=None if exited is None else exited.exit_code,
        outcome=None if exited is None else exited.outcome,
    )


TOOLS = (
    McpTool(
        "run_command",
        "Run a command",
        "Run a shell command in the sandbox, to its end. Returns its exit code and output, also of a failure.",
        RunCommandArguments,
        run_command,
        CommandOutput,
    ),
    McpTool(
        "install_packages",
        "Install packages",
        "Install packages from PyPI (pip) or npm into the sandbox, if its operator allows that.",
        InstallPackagesArguments,
        install_packages,
        CommandOutput,
    ),
    McpTool(
        "start_process",
        "Start a process",
        "Start a shell command in the background, such as a server.",
        StartProcessArguments,
        start_process,
        OneProcessOutput,
    ),
    McpTool(
        "read_process",
        "Read a process",
        "Return the output of a process since the last read, and whether it runs.",
        ReadProcessArguments,
        read_process,
        OneProcessOutput,
    ),
    McpTool(
        "write_process",
        "Write to a process",
        "Write to a process's stdin.",
        WriteProcessArguments,
        write_process,
        OneProcessOutput,
    ),
    McpTool(
        "kill_process",
        "Kill a process",
        "End a process.",
        KillProcessArguments,
        kill_process,
        OneProcessOutput,
        destroys=True,
        repeats=True,
    ),
    McpTool(
        "list_processes",
        "List processes",
        "List the processes started by start_process.",
        NoArguments,
        list_processes,
        ProcessesOutput,
        reads_only=True,
    ),
)
