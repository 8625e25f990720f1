"""Runs that outlive the connection that began them.

Their events are numbered and kept, and whoever owns them can follow them from any event on, while they go on and
afterwards. A reader is told only what is kept: what it has seen is not forgotten when this process is killed.
"""

from __future__ import annotations

import asyncio
import builtins
import re
import time
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

from cloche import errors
from cloche.config.sections import Runs as Limits
from cloche.engine.detached import PAGE_BYTES, DetachedRun
from cloche.engine.execution import Execution
from cloche.engine.instance import Instance
from cloche.engine.kept_events import Line, lines_in, with_notice
from cloche.engine.orders import RUN_LENGTH
from cloche.engine.sandbox import Sandbox
from cloche.events import Folding, Run, RunInfo
from cloche.store.runs import RunRecord, RunStore

POLL_SECONDS = 0.5  # how often a run of another process is looked at
PRUNE_SECONDS = 3600.0
CLOSE_SECONDS = 5.0

_ID = re.compile(rf"x[0-9a-f]{{{RUN_LENGTH}}}")


class Runs:
    """All detached runs. An owner of None sees those of all; a foreign run is answered for as one that never was."""

    def __init__(self, store: RunStore, instance: Instance, limits: Limits):
        self._store = store
        self._instance = instance
        self._limits = limits
        self._live: dict[str, DetachedRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._pruning: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Removes what is too old, now and every hour."""
        self._store.prune(lambda name: name != self._instance.name and not self._instance.is_live(name))
        self._pruning = asyncio.get_running_loop().call_later(PRUNE_SECONDS, self.open)

    async def start(self, sandbox: Sandbox, context: str, execution: Execution, *, last: bool = False) -> RunInfo:
        """The execution goes on by itself from now on. Returns when the run would be found after a crash, too.

        After the `last` one its sandbox ends.
        Raises InvalidRequest where too many of the owner's go on, and Unavailable where it cannot be kept.
        """
        record = RunRecord(
            id=execution.id,
            owner=sandbox.spec.owner,
            sandbox=sandbox.id,
            context=context,
            instance=self._instance.name,
            created_at=time.time(),
        )
        self._check_room(record.owner)
        run = self._live[record.id] = DetachedRun(record, execution, self._store, self._limits.events_bytes)
        try:
            await self._store.add(record)
        except BaseException:
            del self._live[record.id]
            self._store.remove_later(record.id)
            raise
        self._keep_task(self._lived(run.id, run.begin(), sandbox if last else None))
        return info_of(record)

    async def info(self, id: str, owner: str | None) -> RunInfo:
        """Raises RunNotFound."""
        return info_of(await self._record(id, owner))

    async def list(self, owner: str | None, sandbox: str | None = None) -> list[RunInfo]:
        """Those that are kept, the newest first."""
        found = await self._store.list(owner, sandbox)
        left = [each for each in found if self._is_left(each)]
        for each in left:
            await self._lose(each)
        if left:
            found = await self._store.list(owner, sandbox)
        return [info_of(each) for each in found]

    async def attach(self, id: str, owner: str | None, after: int = 0) -> AsyncGenerator[builtins.list[Line], None]:
        """The events with numbers greater than `after`, as they come, until `Ended`.

        Raises RunNotFound, also later if it is removed; and InvalidRequest if it has not that many events.
        """
        record = await self._record(id, owner)
        run = self._live.get(id)
        last = run.last if run is not None else record.events
        if not 0 <= after <= last:
            raise errors.InvalidRequest(
                f"after must be the number of an event of run {id}, 0 to {last} so far, not {after}: what comes after "
                "that one is told"
            )
        return run.follow(after) if run is not None else self._stored(id, owner, after)

    async def result(self, id: str, owner: str | None) -> Run:
        """What it did, when it has ended. Raises RunNotFound."""
        async for _ in await self.attach(id, owner, (await self._record(id, owner)).events):
            pass
        folding = Folding()
        async for batch in self._stored(id, owner, 0):
            for line in batch:
                folding.feed(line.event)
        return with_notice(folding, (await self._record(id, owner)).dropped)

    async def interrupt(self, id: str, owner: str | None) -> bool:
        """False if it has ended. Raises RunNotFound, and InvalidRequest if it goes on in another process."""
        record = await self._record(id, owner)
        run = self._live.get(id)
        if run is None and record.instance is not None:
            raise errors.InvalidRequest(f"run {id} goes on in another process of this host: interrupt it there")
        return run is not None and run.interrupt()

    async def remove(self, id: str, owner: str | None) -> None:
        """Ends it if it goes on, and forgets it. Raises as `interrupt` does."""
        await self.interrupt(id, owner)
        if (run := self._live.get(id)) is not None:
            await run.end()
        await self._store.remove(id)

    async def aclose(self) -> None:
        """When all sandboxes have ended, so have the runs; this waits until all of it is kept."""
        if self._pruning is not None:
            self._pruning.cancel()
        if self._tasks:
            _, stuck = await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
            for task in stuck:
                task.cancel()

    # -- inside

    def _check_room(self, owner: str) -> None:
        if sum(run.owner == owner for run in self._live.values()) >= self._limits.at_once:
            raise errors.InvalidRequest(
                f"{self._limits.at_once} detached runs go on, the most that one owner can have (runs.at_once): "
                "wait for one to end, or interrupt one"
            )

    def _keep_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _lived(self, id: str, life: asyncio.Task[None], ends: Sandbox | None) -> None:
        try:
            await life
        finally:
            self._live.pop(id, None)
        if ends is not None:
            await ends.kill("its last run ended")

    async def _record(self, id: str, owner: str | None) -> RunRecord:
        found = await self._store.get(id, owner) if isinstance(id, str) and _ID.fullmatch(id) else None
        if found is not None and self._is_left(found):
            await self._lose(found)
            found = await self._store.get(id)
        if found is None:
            raise errors.RunNotFound(f"there is no run {str(id)[:100]!r}: it never was, or is not kept any more")
        return found

    def _is_left(self, record: RunRecord) -> bool:
        """Whether nobody runs it any more, though somebody did when it was looked at."""
        if record.instance is None or record.id in self._live:
            return False
        return record.instance == self._instance.name or not self._instance.is_live(record.instance)

    async def _lose(self, record: RunRecord) -> None:
        assert record.instance is not None
        await self._store.lose(record.id, record.instance)

    async def _stored(self, id: str, owner: str | None, after: int) -> AsyncGenerator[builtins.list[Line], None]:
        """Of one that has ended, or goes on in another process."""
        while True:
            record = await self._record(id, owner)
            while after < record.events:
                page = await self._store.page(id, after, PAGE_BYTES)
                if page is None or not page.chunks:
                    raise errors.RunNotFound(f"run {id} was removed")
                batch = lines_in(page, after)
                after = batch[-1].number
                yield batch
            if record.instance is None:
                return
            await asyncio.sleep(POLL_SECONDS)


def info_of(record: RunRecord) -> RunInfo:
    return RunInfo(
        id=record.id,
        sandbox=record.sandbox,
        context=record.context,
        state="ended" if record.instance is None else "running",
        events=record.events,
        created_at=record.created_at,
        ended_at=record.ended_at,
        outcome=record.outcome,
        reason=record.reason,
    )
