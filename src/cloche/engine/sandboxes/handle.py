"""The handle of one sandbox: the way to it, wherever it is and however often it is paused.

Dialects, MCP, the console and the library hold handles and never the objects inside, since those change: a sandbox that
was paused without its memory runs in another cell when it is resumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cloche import errors
from cloche.engine.pauses.pause import MAX_FORKS, SandboxSource
from cloche.engine.sandboxes.create import shutting_down_error
from cloche.engine.sandboxes.endings import KILLED_BY_OWNER, not_running_error
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import RunInfo
from cloche.model import SandboxInfo, Snapshot, check_seconds
from cloche.store.base import SandboxRecord

if TYPE_CHECKING:
    from cloche.engine.engine import Engine
    from cloche.engine.executions.execution import Execution


class SandboxHandle:
    """One sandbox of one owner, from its creation until after its end. Made by the engine, which has checked the owner.

    The sandbox is at one of these places, which `Engine.locate` finds:

    - in a cell of this process: a `Sandbox`, running, or paused with its memory;
    - on a disk: its `SandboxRecord`, paused without its memory;
    - in another process of this host: SandboxNotFound says so;
    - nowhere any more: SandboxExpired, SandboxKilled or SandboxLost, with the time and the reason.
    """

    def __init__(self, engine: Engine, id: str, owner: str):
        self.id = id
        self.owner = owner
        self.here: Sandbox | None = None  # as the engine has it in a cell, or had it last
        self._engine = engine

    @property
    def ended(self) -> bool:
        """Whether it is known here that it has ended."""
        return self.here is not None and self.here.record.state not in ("running", "paused")

    async def running(self) -> Sandbox:
        """The sandbox, running. One that is paused with `auto_resume` is resumed.

        Raises SandboxPaused, SandboxNotFound, SandboxExpired, SandboxKilled or SandboxLost, also after a restart.
        """
        here = self.here
        if here is not None and here.record.state == "running":
            return here
        place = await self._locate()
        record = place.record if isinstance(place, Sandbox) else place
        if isinstance(place, Sandbox) and record.state != "paused":
            place.check_running()  # it may be ending
            return place
        if not record.spec.auto_resume:
            raise not_running_error(record)
        return await self._resume_place(place, None)

    async def info(self) -> SandboxInfo:
        """Its info, also long after it has ended."""
        return await self._engine.describe(self.id, self.owner)

    async def pause(self, *, memory: bool = True) -> SandboxInfo:
        """Freezes its programs until it is resumed; without `memory` they end, and only its files are kept.

        Raises SandboxPaused if it is paused already, SandboxNotFound, Gone. Raises InvalidRequest, Unavailable or
        TooLarge where it cannot be done: then it runs as before.
        """
        place = await self._locate()
        if not isinstance(place, Sandbox):
            raise not_running_error(place)
        await self._engine.pauses.pause(place, memory=memory)
        return place.info

    async def resume(self, *, seconds: float | None = None) -> Sandbox:
        """Resumes it, for so many seconds from now or as many as it was first given. Harmless when it runs.

        Raises SandboxNotFound, Gone, and as `Engine.create` where there is no memory to go on from.
        """
        check_seconds("lifetime", seconds)
        return await self._resume_place(await self._locate(), seconds)

    async def kill(self, reason: str = KILLED_BY_OWNER) -> None:
        """Ends one that runs or is paused. Raises SandboxNotFound, Gone."""
        here = self.here
        place = here if here is not None and here.record.state == "running" else await self._locate()
        if isinstance(place, Sandbox):
            await place.kill(reason)
        else:
            await self._engine.pauses.end(place, reason)

    async def snapshot(self, *, name: str | None = None) -> Snapshot:
        """A snapshot of its files and settings, to make new ones from.

        Raises SandboxNotFound, Gone, Unavailable, TooLarge; InvalidRequest for an invalid name, or a template's.
        """
        if name is not None:
            await self._engine.snapshots.check_name(name, self.owner, await self._engine.templates())
        await self._engine.snapshots.check_room(self.owner)
        return await self._engine.pauses.snapshot(await self._source(), name)

    async def fork(self, count: int = 1, *, seconds: float | None = None) -> Sequence[Sandbox | errors.ClocheError]:
        """New sandboxes with its files and settings, and none of its memory; an error for each that failed.

        Raises as `snapshot`.
        """
        if not 1 <= count <= MAX_FORKS:
            raise errors.InvalidRequest(f"a sandbox can be forked into 1 to {MAX_FORKS} at once, not {count}")
        check_seconds("lifetime", seconds)
        return await self._engine.pauses.fork(await self._source(), count, seconds)

    async def detach(self, execution: Execution, context: str) -> RunInfo:
        """Lets the execution go on without a consumer. Raises as `DetachedRuns.start` does."""
        return await self._engine.runs.start(await self.running(), context, execution)

    async def _locate(self) -> Sandbox | SandboxRecord:
        return await self._engine.locate(self.id, self.owner)

    async def _resume_place(self, place: Sandbox | SandboxRecord, seconds: float | None) -> Sandbox:
        if self._engine.closing:
            raise shutting_down_error()
        seconds = None if seconds is None else min(seconds, self._engine.config.lifetime.max_seconds)
        while isinstance(place, Sandbox):
            try:
                return await self._engine.pauses.resume(place, seconds)
            except errors.SandboxPaused:  # it has left its cell at this very moment
                place = await self._locate_after(place)
        return await self._engine.pauses.wake_from_disk(place, seconds)

    async def _locate_after(self, sandbox: Sandbox) -> Sandbox | SandboxRecord:
        """Its place after a pause without memory. Raises SandboxPaused if it has not moved, Gone."""
        place = await self._locate()
        if place is sandbox:
            raise not_running_error(sandbox.record)
        return place

    async def _source(self) -> SandboxSource:
        place = await self._locate()
        while isinstance(place, Sandbox):
            try:
                return await self._engine.pauses.source_of(place)
            except errors.SandboxPaused:  # as above
                place = await self._locate_after(place)
        return await self._engine.pauses.source_on_disk(place)
