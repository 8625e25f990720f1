"""Tools that run code in the session's sandbox; its contexts keep their state from call to call."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from cloche.events import Error, Output, Result, Run, RunFold
from cloche.languages import LANGUAGE_NAMES, LanguageName, list_titles
from cloche.mcp.call import McpTool, McpToolCall, McpToolResult
from cloche.mcp.content import MAX_PATH_CHARS, TextBudget, run_blocks, shorten_text, text_block
from cloche.mcp.schemas import StructuredOutput, ToolArguments
from cloche.mcp.uris import path_to_uri
from cloche.model import FileInfo
from cloche.sdk import backend

TABLE_ROWS = 100
TABLE_COLUMNS = 100
MAX_FORMATS = 20
MAX_FILES = 50
MAX_RESULTS = 40
MAX_VARIABLES = 300
OTHER_LANGUAGES = [name for name in LANGUAGE_NAMES if name != "python"]

Seconds = Annotated[float, Meta(gt=0, le=86400)]
ContextId = Annotated[str, Meta(description="Id of a context; by default the one that run_code uses for Python.")]


class RunCodeArguments(ToolArguments):
    code: Annotated[str, Meta(description="The program.")]
    language: Annotated[LanguageName | None, Meta(description="By default Python, or the context's language.")] = None
    context: Annotated[str | None, Meta(description="Id of a context; by default the language's own.")] = None
    timeout_seconds: Annotated[Seconds | None, Meta(description="By default 300.")] = None
    input: Annotated[list[str] | None, Meta(description="Lines for input(), one for each call of it.")] = None
    env: Annotated[dict[str, str] | None, Meta(description="Environment variables of this run only.")] = None


class CodeFailure(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    value: str
    traceback: str


class ResultTable(msgspec.Struct, frozen=True, kw_only=True):
    columns: list[str]
    rows: list[list[Any]]


class ShownResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    formats: list[str]
    text: str | None = None
    table: ResultTable | None = None  # of a DataFrame: its first rows


class ToolFile(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    uri: str
    size_bytes: int


class RunCodeOutput(StructuredOutput):
    outcome: str
    sandbox: str
    context: str
    stdout: str = ""
    stderr: str = ""
    text: str | None = None
    error: CodeFailure | None = None
    results: list[ShownResult] = []
    files: list[ToolFile] = []
    reason: str | None = None
    seconds: float = 0.0


async def run_code(call: McpToolCall, arguments: RunCodeArguments) -> McpToolResult:
    box = await call.workspace.box()
    context = await call.workspace.context(box, arguments.language, arguments.context)
    run = await (_run_with_progress if call.told.wants_progress else _run_quietly)(call, context, arguments)
    if run.files:
        await call.told.resources_changed()
    most_bytes = call.told.most_bytes
    blocks = run_blocks(run, most_bytes, links=call.told.knows_links)
    return McpToolResult(*blocks, given=_run_output(run, box.id, context.id, TextBudget(most_bytes)))


async def _run_quietly(call: McpToolCall, context: backend.BackendContext, arguments: RunCodeArguments) -> Run:
    return await context.run(
        arguments.code, env=arguments.env, timeout_seconds=arguments.timeout_seconds, input=arguments.input
    )


async def _run_with_progress(call: McpToolCall, context: backend.BackendContext, arguments: RunCodeArguments) -> Run:
    """Runs the code, with its output as progress."""
    folding = RunFold()
    execution = await context.execute(
        arguments.code, env=arguments.env, timeout_seconds=arguments.timeout_seconds, input=arguments.input
    )
    async with call.progress_report() as report, execution:
        while events := await execution.next_events():
            for event in events:
                folding.feed(event)
                if isinstance(event, Output):
                    report.put(event.text)
    return folding.run()


def _run_output(run: Run, sandbox: str, context: str, room: TextBudget) -> RunCodeOutput:
    error = run.error
    return RunCodeOutput(
        outcome=run.outcome,
        sandbox=sandbox,
        context=context,
        error=None if error is None else _code_failure(error, room),
        stdout=room.take(run.stdout),
        stderr=room.take(run.stderr),
        text=None if run.text is None else room.take(run.text),
        results=[_shown_result(each, room) for each in run.results[:MAX_RESULTS]],
        files=[to_tool_file(each) for each in run.files[:MAX_FILES] if len(each.path) <= MAX_PATH_CHARS],
        reason=run.reason,
        seconds=round(run.usage.wall_seconds, 4),
    )


def _code_failure(error: Error, room: TextBudget) -> CodeFailure:
    traceback = room.take(error.traceback, 20_000)
    return CodeFailure(name=room.take(error.name, 1000), value=room.take(error.value, 10_000), traceback=traceback)


def to_tool_file(info: FileInfo) -> ToolFile:
    return ToolFile(path=info.path, uri=path_to_uri(info.path), size_bytes=info.size_bytes)


def _shown_result(result: Result, room: TextBudget) -> ShownResult:
    words = None if result.text is None else room.take(result.text)
    formats = [shorten_text(each, 100) for each in result.formats()[:MAX_FORMATS]]
    return ShownResult(formats=formats, text=words, table=_result_table(result.data, room))


def _result_table(data: Any, room: TextBudget) -> ResultTable | None:
    """The first rows of a DataFrame's data as the guest encodes it: columns may have any type and length."""
    if not isinstance(data, dict) or not all(isinstance(each, list) for each in data.values()):
        return None
    columns = {str(name)[:1000]: values for name, values in list(data.items())[:TABLE_COLUMNS]}
    rows = [list(row) for row in zip(*(each[:TABLE_ROWS] for each in columns.values()), strict=False)]
    size = sum(map(len, columns)) + sum(len(str(row)) for row in rows)
    if size > room.left:
        return None
    room.left -= size
    return ResultTable(columns=list(columns), rows=rows)


# -- contexts


class NoArguments(ToolArguments):
    pass


class CreateContextArguments(ToolArguments):
    language: Annotated[LanguageName, Meta(description="Its language.")] = "python"
    cwd: Annotated[str | None, Meta(description="Its working directory; by default /mnt/data.")] = None


class ContextArguments(ToolArguments):
    context: ContextId = "default"


class ContextOutput(StructuredOutput):
    id: str
    language: str
    cwd: str


class ContextsOutput(StructuredOutput):
    contexts: list[ContextOutput]


class VariableOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    kind: str
    type: str
    preview: str = ""
    shape: list[int] | None = None
    length: int | None = None
    dtype: str | None = None
    columns: list[str] | None = None


class VariablesOutput(StructuredOutput):
    variables: list[VariableOutput]
    more: int = 0


class DoneOutput(StructuredOutput):
    done: bool


async def list_contexts(call: McpToolCall, arguments: NoArguments) -> McpToolResult:
    box = await call.workspace.box()
    found = [_describe_context(each) for each in await box.list_contexts()]
    lines = [f"{each.id}: {each.language}, in {each.cwd}" for each in found]
    return McpToolResult(text_block("\n".join(lines)), given=ContextsOutput(contexts=found))


async def create_context(call: McpToolCall, arguments: CreateContextArguments) -> McpToolResult:
    box = await call.workspace.box()
    made = _describe_context(await box.create_context(language=arguments.language, cwd=arguments.cwd))
    return McpToolResult(text_block(f"context {made.id} speaks {made.language}: give its id to run_code"), given=made)


async def remove_context(call: McpToolCall, arguments: ContextArguments) -> McpToolResult:
    await (await call.workspace.box()).remove_context(arguments.context)
    return McpToolResult(text_block(f"context {arguments.context} is gone"), given=DoneOutput(done=True))


async def restart_context(call: McpToolCall, arguments: ContextArguments) -> McpToolResult:
    await (await _find_context(call, arguments.context)).restart()
    words = f"context {arguments.context} was restarted: its variables are gone, files are kept"
    return McpToolResult(text_block(words), given=DoneOutput(done=True))


async def interrupt_context(call: McpToolCall, arguments: ContextArguments) -> McpToolResult:
    done = await (await _find_context(call, arguments.context)).interrupt()
    words = "the code was interrupted" if done else "nothing runs there"
    return McpToolResult(text_block(words), given=DoneOutput(done=done))


async def list_variables(call: McpToolCall, arguments: ContextArguments) -> McpToolResult:
    found = await (await _find_context(call, arguments.context)).variables()
    told = [
        VariableOutput(
            name=each.name,
            kind=each.kind,
            type=each.type,
            preview=shorten_text(each.preview, 1000),
            shape=None if each.shape is None else list(each.shape),
            length=each.length,
            dtype=each.dtype,
            columns=None if each.columns is None else list(each.columns),
        )
        for each in found[:MAX_VARIABLES]
    ]
    return McpToolResult(
        text_block(repr(found)), given=VariablesOutput(variables=told, more=found.more + len(found) - len(told))
    )


async def _find_context(call: McpToolCall, id: str) -> backend.BackendContext:
    return await call.workspace.context(await call.workspace.box(), None, id)


def _describe_context(context: backend.BackendContext) -> ContextOutput:
    return ContextOutput(id=context.id, language=context.language, cwd=context.cwd)


# -- going back


class RollbackArguments(ToolArguments):
    checkpoint: Annotated[str, Meta(description="Id returned by checkpoint.")]
    context: ContextId = "default"


class CheckpointOutput(StructuredOutput):
    checkpoint: str
    context: str


async def checkpoint(call: McpToolCall, arguments: ContextArguments) -> McpToolResult:
    mark = await (await _find_context(call, arguments.context)).checkpoint()
    words = f"checkpoint {mark.id}: rollback takes the context's memory back to this moment"
    return McpToolResult(text_block(words), given=CheckpointOutput(checkpoint=mark.id, context=arguments.context))


async def rollback(call: McpToolCall, arguments: RollbackArguments) -> McpToolResult:
    await (await _find_context(call, arguments.context)).rollback(arguments.checkpoint)
    words = f"context {arguments.context} has the variables of {arguments.checkpoint}; files are unchanged"
    return McpToolResult(text_block(words), given=DoneOutput(done=True))


TOOLS = (
    McpTool(
        "run_code",
        "Run code",
        "Run a program in a sealed sandbox of your own. Variables, imports and files stay for the next call. Python "
        "(as in Jupyter: the value of the last expression is shown, matplotlib figures come back as images, DataFrames "
        f"as tables), {list_titles(OTHER_LANGUAGES)}. Files that are written below /mnt/data are named in the answer. "
        "An exception of the program is part of the answer, not an error of this tool.",
        RunCodeArguments,
        run_code,
        RunCodeOutput,
    ),
    McpTool(
        "list_contexts",
        "List contexts",
        "List the contexts: each has its own variables and one language.",
        NoArguments,
        list_contexts,
        ContextsOutput,
        reads_only=True,
    ),
    McpTool(
        "create_context",
        "Create a context",
        "Create a context with its own variables.",
        CreateContextArguments,
        create_context,
        ContextOutput,
    ),
    McpTool(
        "remove_context",
        "Remove a context",
        "End a context, and the code that runs in it.",
        ContextArguments,
        remove_context,
        DoneOutput,
        destroys=True,
    ),
    McpTool(
        "restart_context",
        "Restart a context",
        "Restart a context without variables. Files are kept.",
        ContextArguments,
        restart_context,
        DoneOutput,
        destroys=True,
    ),
    McpTool(
        "interrupt_context",
        "Interrupt",
        "Interrupt the code that another call of run_code runs in a context; its variables are kept.",
        ContextArguments,
        interrupt_context,
        DoneOutput,
    ),
    McpTool(
        "list_variables",
        "List variables",
        "List the variables of a context, with types, shapes and previews.",
        ContextArguments,
        list_variables,
        VariablesOutput,
        reads_only=True,
    ),
    McpTool(
        "checkpoint",
        "Set a checkpoint",
        "Save the current memory of a Python context, for rollback.",
        ContextArguments,
        checkpoint,
        CheckpointOutput,
    ),
    McpTool(
        "rollback",
        "Go back to a checkpoint",
        "Restore a context's variables from a checkpoint. Files are unchanged.",
        RollbackArguments,
        rollback,
        DoneOutput,
        destroys=True,
        repeats=True,
    ),
)
