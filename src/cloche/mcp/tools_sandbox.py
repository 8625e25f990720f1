"""Tools for sandboxes as a whole: a new one, a copy, a snapshot to begin from."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from cloche.mcp.call import Answer, Call, Tool
from cloche.mcp.content import text
from cloche.mcp.schemas import Arguments, Given
from cloche.mcp.tools_code import Done, Nothing
from cloche.model import SnapshotInfo
from cloche.sdk import backend

SandboxId = Annotated[str, Meta(description="Id of a sandbox; current is the one that is in use.", min_length=1)]


class NewSandbox(Arguments):
    template: Annotated[
        str | None, Meta(description="A template, or the id or name of a snapshot; by default the session's own.")
    ] = None


class OneSandbox(Arguments):
    sandbox: SandboxId


class ForkSandbox(Arguments):
    use: Annotated[bool, Meta(description="Whether the copy is the one in use from now on.")] = False


class MakeSnapshot(Arguments):
    name: Annotated[str | None, Meta(description="What it is called; it has an id in any case.")] = None


class OneSnapshot(Arguments):
    snapshot: Annotated[str, Meta(description="Its id or name.", min_length=1)]


class SandboxGiven(Given):
    sandbox: str
    template: str
    state: str
    ends_with_session: bool
    others: list[str] = []  # that this session has beside it


class Forked(Given):
    sandbox: str
    in_use: str


class SnapshotGiven(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: str
    template: str
    size_bytes: int
    name: str | None = None


class OneSnapshotGiven(Given):
    snapshot: SnapshotGiven


class SnapshotsGiven(Given):
    snapshots: list[SnapshotGiven]


async def sandbox_info(call: Call, asked: Nothing) -> Answer:
    return await _about(call, await call.workspace.box())


async def new_sandbox(call: Call, asked: NewSandbox) -> Answer:
    box = await call.workspace.replace(asked.template)
    await call.told.resources_changed()
    return await _about(call, box)


async def use_sandbox(call: Call, asked: OneSandbox) -> Answer:
    box = await call.workspace.switch(asked.sandbox)
    await call.told.resources_changed()
    return await _about(call, box)


async def fork_sandbox(call: Call, asked: ForkSandbox) -> Answer:
    box = await call.workspace.fork()
    if asked.use:
        await call.workspace.switch(box.id)
        await call.told.resources_changed()
    current = call.workspace.current
    in_use = box.id if current is None else current.id
    words = f"sandbox {box.id} has the same files; {in_use} is in use (use_sandbox changes that)"
    return Answer(text(words), given=Forked(sandbox=box.id, in_use=in_use))


async def end_sandbox(call: Call, asked: OneSandbox) -> Answer:
    await call.workspace.end(asked.sandbox)
    await call.told.resources_changed()
    return Answer(text("it has ended, and all that was in it is gone"), given=Done(done=True))


async def _about(call: Call, box: backend.Sandbox) -> Answer:
    info, made = await box.describe(), call.workspace.made
    given = SandboxGiven(
        sandbox=box.id,
        template=info.template,
        state=info.state,
        ends_with_session=box.id in made,
        others=[each for each in made if each != box.id],
    )
    beside = f"; this session also has {', '.join(given.others)}" if given.others else ""
    return Answer(text(f"sandbox {box.id} of {info.template} is in use, and is {info.state}{beside}"), given=given)


# -- snapshots


async def snapshot_sandbox(call: Call, asked: MakeSnapshot) -> Answer:
    made = await (await call.workspace.box()).snapshot(asked.name)
    words = f"snapshot {made.id} has the files as they are now: new_sandbox with it as the template begins from them"
    return Answer(text(words), given=OneSnapshotGiven(snapshot=_snapshot(made)))


async def list_snapshots(call: Call, asked: Nothing) -> Answer:
    found = await call.workspace.place.snapshots.list()
    lines = [f"{each.id}{f' {each.name}' if each.name else ''}: {each.size_bytes} bytes" for each in found]
    given = SnapshotsGiven(snapshots=[_snapshot(each) for each in found])
    return Answer(text("\n".join(lines) or "there are none"), given=given)


async def remove_snapshot(call: Call, asked: OneSnapshot) -> Answer:
    await call.workspace.place.snapshots.remove(asked.snapshot)
    return Answer(text("it is gone"), given=Done(done=True))


def _snapshot(info: SnapshotInfo) -> SnapshotGiven:
    return SnapshotGiven(id=info.id, template=info.template, size_bytes=info.size_bytes, name=info.name)


TOOLS = (
    Tool("sandbox_info", "About the sandbox", "Say which sandbox is in use.", Nothing, sandbox_info, SandboxGiven,
         reads_only=True),
    Tool("new_sandbox", "A new sandbox", "Begin in a new, empty sandbox, or in one with a snapshot's files. The one "
         "that was in use ends.", NewSandbox, new_sandbox, SandboxGiven, destroys=True),
    Tool("fork_sandbox", "Fork the sandbox", "Make one more sandbox with the same files, to try something in.",
         ForkSandbox, fork_sandbox, Forked),
    Tool("use_sandbox", "Use another sandbox", "From now on, use another sandbox of yours.", OneSandbox, use_sandbox,
         SandboxGiven, repeats=True),
    Tool("end_sandbox", "End a sandbox", "End a sandbox that this session has made.", OneSandbox, end_sandbox, Done,
         destroys=True),
    Tool("snapshot_sandbox", "Take a snapshot", "Keep the sandbox's files beyond its end, to begin from again.",
         MakeSnapshot, snapshot_sandbox, OneSnapshotGiven),
    Tool("list_snapshots", "List snapshots", "The snapshots that you have.", Nothing, list_snapshots, SnapshotsGiven,
         reads_only=True),
    Tool("remove_snapshot", "Remove a snapshot", "Remove a snapshot.", OneSnapshot, remove_snapshot, Done,
         destroys=True),
)  # fmt: skip
