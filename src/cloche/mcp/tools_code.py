"""Tools that run code: in the session's sandbox, whose contexts keep their state from call to call."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from cloche.events import Error, Folding, Output, Result, Run
from cloche.mcp.call import Answer, Call, Tool
from cloche.mcp.content import MOST_PATH_CHARS, Words, blocks_of, shortened, text
from cloche.mcp.schemas import Arguments, Given
from cloche.mcp.uris import uri_of
from cloche.model import FileInfo
from cloche.sdk import backend

TABLE_ROWS = 100
TABLE_COLUMNS = 100
MOST_FORMATS = 20
MOST_FILES = 50
MOST_RESULTS = 40
MOST_VARIABLES = 300

Language = Literal["python", "javascript", "typescript", "bash"]
Seconds = Annotated[float, Meta(gt=0, le=86400)]
ContextId = Annotated[str, Meta(description="Id of a context; by default the one that run_code uses for Python.")]


class RunCode(Arguments):
    code: Annotated[str, Meta(description="The program, as it is.")]
    language: Annotated[Language | None, Meta(description="By default Python, or what the context speaks.")] = None
    context: Annotated[str | None, Meta(description="Id of a context; by default the language's own.")] = None
    timeout_seconds: Annotated[Seconds | None, Meta(description="By default 300.")] = None
    input: Annotated[list[str] | None, Meta(description="Lines for input(), one for each call of it.")] = None
    env: Annotated[dict[str, str] | None, Meta(description="Environment variables of this run only.")] = None


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    value: str
    traceback: str


class Table(msgspec.Struct, frozen=True, kw_only=True):
    columns: list[str]
    rows: list[list[Any]]


class Shown(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    formats: list[str]
    text: str | None = None
    table: Table | None = None  # of a DataFrame: its first rows


class File(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    uri: str
    size_bytes: int


class Ran(Given):
    outcome: str
    sandbox: str
    context: str
    stdout: str = ""
    stderr: str = ""
    text: str | None = None
    error: Failure | None = None
    results: list[Shown] = []
    files: list[File] = []
    reason: str | None = None
    seconds: float = 0.0


async def run_code(call: Call, asked: RunCode) -> Answer:
    box = await call.workspace.box()
    context = await call.workspace.context(box, asked.language, asked.context)
    run = await (_reported if call.told.wants_progress else _awaited)(call, context, asked)
    if run.files:
        await call.told.resources_changed()
    most_bytes = call.told.most_bytes
    blocks = blocks_of(run, most_bytes, links=call.told.knows_links)
    return Answer(*blocks, given=_ran(run, box.id, context.id, Words(most_bytes)))


async def _awaited(call: Call, context: backend.Context, asked: RunCode) -> Run:
    return await context.run(asked.code, env=asked.env, timeout_seconds=asked.timeout_seconds, input=asked.input)


async def _reported(call: Call, context: backend.Context, asked: RunCode) -> Run:
    """The same, with what it prints as progress."""
    folding = Folding()
    execution = await context.execute(
        asked.code, env=asked.env, timeout_seconds=asked.timeout_seconds, input=asked.input
    )
    async with call.reporting() as report, execution:
        while events := await execution.next_events():
            for event in events:
                folding.feed(event)
                if isinstance(event, Output):
                    report.put(event.text)
    return folding.run()


def _ran(run: Run, sandbox: str, context: str, room: Words) -> Ran:
    error = run.error
    return Ran(
        outcome=run.outcome,
        sandbox=sandbox,
        context=context,
        error=None if error is None else _failure(error, room),
        stdout=room.take(run.stdout),
        stderr=room.take(run.stderr),
        text=None if run.text is None else room.take(run.text),
        results=[_shown(each, room) for each in run.results[:MOST_RESULTS]],
        files=[file_of(each) for each in run.files[:MOST_FILES] if len(each.path) <= MOST_PATH_CHARS],
        reason=run.reason,
        seconds=round(run.usage.wall_seconds, 4),
    )


def _failure(error: Error, room: Words) -> Failure:
    traceback = room.take(error.traceback, 20_000)
    return Failure(name=room.take(error.name, 1000), value=room.take(error.value, 10_000), traceback=traceback)


def file_of(info: FileInfo) -> File:
    return File(path=info.path, uri=uri_of(info.path), size_bytes=info.size_bytes)


def _shown(result: Result, room: Words) -> Shown:
    words = None if result.text is None else room.take(result.text)
    formats = [shortened(each, 100) for each in result.formats()[:MOST_FORMATS]]
    return Shown(formats=formats, text=words, table=_table(result.data, room))


def _table(data: Any, room: Words) -> Table | None:
    """The first rows of a DataFrame's data, as the guest says them: its columns may be of any kind and length."""
    if not isinstance(data, dict) or not all(isinstance(each, list) for each in data.values()):
        return None
    columns = {str(name)[:1000]: values for name, values in list(data.items())[:TABLE_COLUMNS]}
    rows = [list(row) for row in zip(*(each[:TABLE_ROWS] for each in columns.values()), strict=False)]
    size = sum(map(len, columns)) + sum(len(str(row)) for row in rows)
    if size > room.left:
        return None
    room.left -= size
    return Table(columns=list(columns), rows=rows)


# -- contexts


class Nothing(Arguments):
    pass


class CreateContext(Arguments):
    language: Annotated[Language, Meta(description="What it speaks.")] = "python"
    cwd: Annotated[str | None, Meta(description="Its working directory; by default /mnt/data.")] = None


class OneContext(Arguments):
    context: ContextId = "default"


class ContextGiven(Given):
    id: str
    language: str
    cwd: str


class ContextsGiven(Given):
    contexts: list[ContextGiven]


class VariableGiven(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    kind: str
    type: str
    preview: str = ""
    shape: list[int] | None = None
    length: int | None = None
    dtype: str | None = None
    columns: list[str] | None = None


class VariablesGiven(Given):
    variables: list[VariableGiven]
    more: int = 0


class Done(Given):
    done: bool


async def list_contexts(call: Call, asked: Nothing) -> Answer:
    box = await call.workspace.box()
    found = [_described(each) for each in await box.list_contexts()]
    lines = [f"{each.id}: {each.language}, in {each.cwd}" for each in found]
    return Answer(text("\n".join(lines)), given=ContextsGiven(contexts=found))


async def create_context(call: Call, asked: CreateContext) -> Answer:
    box = await call.workspace.box()
    made = _described(await box.create_context(language=asked.language, cwd=asked.cwd))
    return Answer(text(f"context {made.id} speaks {made.language}: give its id to run_code"), given=made)


async def remove_context(call: Call, asked: OneContext) -> Answer:
    await (await call.workspace.box()).remove_context(asked.context)
    return Answer(text(f"context {asked.context} is gone"), given=Done(done=True))


async def restart_context(call: Call, asked: OneContext) -> Answer:
    await (await _context(call, asked.context)).restart()
    words = f"context {asked.context} begins anew: its variables are gone, files are still there"
    return Answer(text(words), given=Done(done=True))


async def interrupt_context(call: Call, asked: OneContext) -> Answer:
    done = await (await _context(call, asked.context)).interrupt()
    words = "what ran there was interrupted" if done else "nothing runs there"
    return Answer(text(words), given=Done(done=done))


async def list_variables(call: Call, asked: OneContext) -> Answer:
    found = await (await _context(call, asked.context)).variables()
    told = [
        VariableGiven(
            name=each.name,
            kind=each.kind,
            type=each.type,
            preview=shortened(each.preview, 1000),
            shape=None if each.shape is None else list(each.shape),
            length=each.length,
            dtype=each.dtype,
            columns=None if each.columns is None else list(each.columns),
        )
        for each in found[:MOST_VARIABLES]
    ]
    return Answer(text(repr(found)), given=VariablesGiven(variables=told, more=found.more + len(found) - len(told)))


async def _context(call: Call, id: str) -> backend.Context:
    return await call.workspace.context(await call.workspace.box(), None, id)


def _described(context: backend.Context) -> ContextGiven:
    return ContextGiven(id=context.id, language=context.language, cwd=context.cwd)


# -- going back


class Rollback(Arguments):
    checkpoint: Annotated[str, Meta(description="Id that checkpoint gave.")]
    context: ContextId = "default"


class CheckpointGiven(Given):
    checkpoint: str
    context: str


async def checkpoint(call: Call, asked: OneContext) -> Answer:
    mark = await (await _context(call, asked.context)).checkpoint()
    words = f"checkpoint {mark.id}: rollback takes the context's memory back to this moment"
    return Answer(text(words), given=CheckpointGiven(checkpoint=mark.id, context=asked.context))


async def rollback(call: Call, asked: Rollback) -> Answer:
    await (await _context(call, asked.context)).rollback(asked.checkpoint)
    words = f"context {asked.context} is as it was at {asked.checkpoint}; files are as they are now"
    return Answer(text(words), given=Done(done=True))


TOOLS = (
    Tool(
        "run_code",
        "Run code",
        "Run a program in a sealed sandbox of your own. Variables, imports and files stay for the next call. Python "
        "(as in Jupyter: the value of the last expression is shown, matplotlib figures come back as images, DataFrames "
        "as tables), JavaScript, TypeScript or bash. Files that are written below /mnt/data are named in the answer. "
        "An exception of the program is part of the answer, not an error of this tool.",
        RunCode,
        run_code,
        Ran,
    ),
    Tool("list_contexts", "List contexts", "Say which contexts there are: each has own variables and one language.",
         Nothing, list_contexts, ContextsGiven, reads_only=True),
    Tool("create_context", "Create a context", "Make one more context with variables of its own.",
         CreateContext, create_context, ContextGiven),
    Tool("remove_context", "Remove a context", "End a context, and what runs in it.",
         OneContext, remove_context, Done, destroys=True),
    Tool("restart_context", "Restart a context", "Begin anew with no variables. Files stay.",
         OneContext, restart_context, Done, destroys=True),
    Tool("interrupt_context", "Interrupt", "Stop what another call of run_code runs in a context; its variables stay.",
         OneContext, interrupt_context, Done),
    Tool("list_variables", "List variables", "Say which variables a context has, with types, shapes and previews.",
         OneContext, list_variables, VariablesGiven, reads_only=True),
    Tool("checkpoint", "Set a checkpoint", "Remember a Python context's memory as it is now, for rollback.",
         OneContext, checkpoint, CheckpointGiven),
    Tool("rollback", "Go back to a checkpoint", "Take a context's variables back to a checkpoint. Files stay.",
         Rollback, rollback, Done, destroys=True, repeats=True),
)  # fmt: skip
