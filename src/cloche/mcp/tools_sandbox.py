"""Tools for whole sandboxes: create, fork, switch, end and snapshot."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from cloche.mcp.call import McpTool, McpToolCall, McpToolResult
from cloche.mcp.content import text_block
from cloche.mcp.schemas import StructuredOutput, ToolArguments
from cloche.mcp.tools_code import DoneOutput, NoArguments
from cloche.model import SnapshotInfo
from cloche.sdk import backend

SandboxId = Annotated[str, Meta(description="Id of a sandbox; `current` is the one in use.", min_length=1)]


class NewSandboxArguments(ToolArguments):
    template: Annotated[
        str | None, Meta(description="A template, or the id or name of a snapshot; by default the session's own.")
    ] = None


class SandboxArguments(ToolArguments):
    sandbox: SandboxId


class ForkSandboxArguments(ToolArguments):
    use: Annotated[bool, Meta(description="Whether to switch to the copy.")] = False


class MakeSnapshotArguments(ToolArguments):
    name: Annotated[str | None, Meta(description="An optional name; every snapshot has an id.")] = None


class SnapshotArguments(ToolArguments):
    snapshot: Annotated[str, Meta(description="Its id or name.", min_length=1)]


class SandboxOutput(StructuredOutput):
    sandbox: str
    template: str
    state: str
    ends_with_session: bool
    others: list[str] = []  # that this session has beside it


class ForkedSandboxOutput(StructuredOutput):
    sandbox: str
    in_use: str


class SnapshotOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: str
    template: str
    size_bytes: int
    name: str | None = None


class OneSnapshotOutput(StructuredOutput):
    snapshot: SnapshotOutput


class SnapshotsOutput(StructuredOutput):
    snapshots: list[SnapshotOutput]


async def sandbox_info(call: McpToolCall, arguments: NoArguments) -> McpToolResult:
    return await _describe_sandbox(call, await call.workspace.box())


async def new_sandbox(call: McpToolCall, arguments: NewSandboxArguments) -> McpToolResult:
    box = await call.workspace.replace(arguments.template)
    await call.told.resources_changed()
    return await _describe_sandbox(call, box)


async def use_sandbox(call: McpToolCall, arguments: SandboxArguments) -> McpToolResult:
    box = await call.workspace.switch_sandbox(arguments.sandbox)
    await call.told.resources_changed()
    return await _describe_sandbox(call, box)


async def fork_sandbox(call: McpToolCall, arguments: ForkSandboxArguments) -> McpToolResult:
    box = await call.workspace.fork()
    if arguments.use:
        await call.workspace.switch_sandbox(box.id)
        await call.told.resources_changed()
    current = call.workspace.current_sandbox
    in_use = box.id if current is None else current.id
    words = f"sandbox {box.id} has the same files; {in_use} is in use (use_sandbox changes that)"
    return McpToolResult(text_block(words), given=ForkedSandboxOutput(sandbox=box.id, in_use=in_use))


async def end_sandbox(call: McpToolCall, arguments: SandboxArguments) -> McpToolResult:
    await call.workspace.end(arguments.sandbox)
    await call.told.resources_changed()
    return McpToolResult(text_block("it has ended, and all that was in it is gone"), given=DoneOutput(done=True))


async def _describe_sandbox(call: McpToolCall, box: backend.BackendSandbox) -> McpToolResult:
    info, made = await box.describe(), call.workspace.made
    given = SandboxOutput(
        sandbox=box.id,
        template=info.template,
        state=info.state,
        ends_with_session=box.id in made,
        others=[each for each in made if each != box.id],
    )
    beside = f"; this session also has {', '.join(given.others)}" if given.others else ""
    return McpToolResult(
        text_block(f"sandbox {box.id} of {info.template} is in use, and is {info.state}{beside}"), given=given
    )


# -- snapshots


async def snapshot_sandbox(call: McpToolCall, arguments: MakeSnapshotArguments) -> McpToolResult:
    made = await (await call.workspace.box()).snapshot(arguments.name)
    words = f"snapshot {made.id} has the files as they are now: new_sandbox with it as the template begins from them"
    return McpToolResult(text_block(words), given=OneSnapshotOutput(snapshot=_describe_snapshot(made)))


async def list_snapshots(call: McpToolCall, arguments: NoArguments) -> McpToolResult:
    found = await call.workspace.place.snapshots.list()
    lines = [f"{each.id}{f' {each.name}' if each.name else ''}: {each.size_bytes} bytes" for each in found]
    given = SnapshotsOutput(snapshots=[_describe_snapshot(each) for each in found])
    return McpToolResult(text_block("\n".join(lines) or "there are none"), given=given)


async def remove_snapshot(call: McpToolCall, arguments: SnapshotArguments) -> McpToolResult:
    await call.workspace.place.snapshots.remove(arguments.snapshot)
    return McpToolResult(text_block("it is gone"), given=DoneOutput(done=True))


def _describe_snapshot(info: SnapshotInfo) -> SnapshotOutput:
    return SnapshotOutput(id=info.id, template=info.template, size_bytes=info.size_bytes, name=info.name)


TOOLS = (
    McpTool(
        "sandbox_info",
        "About the sandbox",
        "Describe the sandbox in use.",
        NoArguments,
        sandbox_info,
        SandboxOutput,
        reads_only=True,
    ),
    McpTool(
        "new_sandbox",
        "A new sandbox",
        "Switch to a new, empty sandbox, or to one with a snapshot's files. The previous one ends.",
        NewSandboxArguments,
        new_sandbox,
        SandboxOutput,
        destroys=True,
    ),
    McpTool(
        "fork_sandbox",
        "Fork the sandbox",
        "Create a sandbox with the same files, to try something.",
        ForkSandboxArguments,
        fork_sandbox,
        ForkedSandboxOutput,
    ),
    McpTool(
        "use_sandbox",
        "Use another sandbox",
        "Switch to another of your sandboxes.",
        SandboxArguments,
        use_sandbox,
        SandboxOutput,
        repeats=True,
    ),
    McpTool(
        "end_sandbox",
        "End a sandbox",
        "End a sandbox that this session created.",
        SandboxArguments,
        end_sandbox,
        DoneOutput,
        destroys=True,
    ),
    McpTool(
        "snapshot_sandbox",
        "Take a snapshot",
        "Save the sandbox's files beyond its end, as a start for new sandboxes.",
        MakeSnapshotArguments,
        snapshot_sandbox,
        OneSnapshotOutput,
    ),
    McpTool(
        "list_snapshots",
        "List snapshots",
        "List your snapshots.",
        NoArguments,
        list_snapshots,
        SnapshotsOutput,
        reads_only=True,
    ),
    McpTool(
        "remove_snapshot",
        "Remove a snapshot",
        "Remove a snapshot.",
        SnapshotArguments,
        remove_snapshot,
        DoneOutput,
        destroys=True,
    ),
)
