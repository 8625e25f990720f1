"""Detached runs: runs that outlive the connection that began them.

Their events are numbered and stored, and their owner can follow them from any event on, while they go on
and afterwards. A reader gets only stored events: none of them is lost when this process is killed.
"""

from __future__ import annotations

import asyncio
import builtins
import re
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from itertools import islice
from typing import NamedTuple

import msgspec

from cloche import errors
from cloche.config.sections import RunsConfig as Limits
from cloche.engine.executions.execution import RUN_ID_LENGTH, Execution
from cloche.engine.instance import Instance
from cloche.engine.sandboxes.endings import LAST_RUN_ENDED
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import (
    EVENT_OVERHEAD_BYTES,
    AnyEvent,
    Ended,
    Output,
    Run,
    RunFold,
    RunInfo,
    Signal,
    Started,
    Truncated,
    decode_execution_event,
    encode_event,
)
from cloche.store.runs import EventChunk, RunEventsPage, RunRecord, RunStore
from cloche.tasks import TaskSet
from cloche.telemetry import log

# Encoding of a detached run's events between memory and the store. Pure.
#
# An event's number is its position in the run. It is kept as a line of JSON, which most readers want, and
# which takes as much memory as its length: parsed, it can take thirty times that.
#
# Dropped events are reported by Truncated events at the last positions of the gap, so that a reader continues
# from their numbers as from any other.

STORED_CHUNK_BYTES = 64 << 10

_TYPE_PREFIX = b'{"type":"'
_OTHER_STREAM = "display"  # the name in Truncated of all that is not output


class RunEventLine(NamedTuple):
    """An encoded event of a detached run. The first is number 1."""

    number: int
    body: bytes

    @property
    def kind(self) -> bytes:
        """Its type, which is written first."""
        return self.body[len(_TYPE_PREFIX) : self.body.index(b'"', len(_TYPE_PREFIX))]

    @property
    def event(self) -> AnyEvent:
        return decode_execution_event(self.body)


class EncodedEvent(NamedTuple):
    """A line, with the stream and size that are lost if it is dropped."""

    line: RunEventLine
    stream: str
    size: int


def encode_events(events: Iterable[AnyEvent], first: int, max_event_bytes: int) -> list[EncodedEvent]:
    """The events from number `first` on. One that is larger than a whole run may be becomes Truncated."""
    return [_encode_numbered_event(number, event, max_event_bytes) for number, event in enumerate(events, first)]


def _encode_numbered_event(number: int, event: AnyEvent, max_event_bytes: int) -> EncodedEvent:
    body = encode_event(event)
    stream, size = _OTHER_STREAM, len(body)
    if isinstance(event, Output):
        stream, size = event.stream, len(event.text.encode("utf-8", "surrogatepass"))
    if len(body) > max_event_bytes:
        body = encode_event(Truncated(stream=stream, dropped_bytes=size))
    return EncodedEvent(RunEventLine(number, body), stream, size)


def group_into_chunks(events: Sequence[EncodedEvent]) -> Iterator[EventChunk]:
    """Event 1 is a chunk of its own, which is never dropped."""
    begin, size = 0, 0
    for at, (line, _, _) in enumerate(events):
        size += len(line.body)
        if line.number == 1 or size >= STORED_CHUNK_BYTES or at == len(events) - 1:
            yield _make_chunk(events[begin : at + 1])
            begin, size = at + 1, 0


def _make_chunk(events: Sequence[EncodedEvent]) -> EventChunk:
    sizes: dict[str, int] = {}
    for _, stream, size in events:
        sizes[stream] = sizes.get(stream, 0) + size
    body = b"\n".join(line.body for line, _, _ in events)
    return EventChunk(first=events[0].line.number, last=events[-1].line.number, body=body, sizes=sizes)


def page_lines(page: RunEventsPage, after: int) -> list[RunEventLine]:
    """The events of a page that come after number `after`."""
    told: list[RunEventLine] = []
    expected = after + 1
    for chunk in page.chunks:
        if chunk.first > expected:
            told += make_gap_lines(expected, chunk.first - 1, page.record.dropped)
        bodies = enumerate(chunk.body.split(b"\n"), chunk.first)
        told += [RunEventLine(number, body) for number, body in bodies if number > after]
        expected = chunk.last + 1
    return told


def make_gap_lines(first: int, last: int, dropped: dict[str, int]) -> list[RunEventLine]:
    """The lines that stand for the dropped events `first` to `last`."""
    events = [Truncated(stream=name, dropped_bytes=size) for name, size in dropped.items()]
    events = events or [Truncated(stream=_OTHER_STREAM, dropped_bytes=0)]  # it could not be written: the disk was full
    places = range(last - len(events) + 1, last + 1)
    told = zip(places, events, strict=True)
    return [RunEventLine(number, encode_event(event)) for number, event in told if number >= first]


def fold_with_notice(folding: RunFold, dropped: dict[str, int]) -> Run:
    """The folded run; its stderr begins with a notice of the dropped bytes."""
    run = folding.run()
    if not dropped:
        return run
    parts = ", ".join(f"{size} bytes of {name}" for name, size in dropped.items())
    notice = f"[cloche] the events of this run were too many to be kept; the oldest are missing: {parts}\n"
    return msgspec.structs.replace(run, stderr=notice + run.stderr)


# One detached run while it goes on.

PACE_SECONDS = 0.05  # between two transactions: events that come meanwhile are written together
TAIL_BYTES = 1 << 20  # of the newest events, which most readers want, in memory
PAGE_BYTES = 256 << 10  # of older ones, that a reader holds at once
RETRY_SECONDS = 1.0  # after which the end of a run is written once more, where it could not be

INTERRUPTED_BEFORE_START = "it was interrupted before it began"


class DetachedExecution:
    """Stores the events of an execution, and sends them to any number of readers, each at its own pace."""

    def __init__(self, record: RunRecord, execution: Execution, store: RunStore, max_event_bytes: int):
        self.id, self.owner = record.id, record.owner
        self.last = 0  # the number of the last event that is kept
        self.ended = False
        self._execution = execution
        self._store = store
        self._max_event_bytes = max_event_bytes
        self._tail: deque[RunEventLine] = deque()
        self._tail_bytes = 0
        self._unwritten: list[EventChunk] = []  # chunks that could not be written so far
        self._news = Signal()
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> asyncio.Task[None]:
        self._task = asyncio.create_task(self._run_to_end())
        return self._task

    def interrupt(self) -> bool:
        """As `Execution.interrupt`; one that waits for its turn ends. False if it has ended."""
        if self.ended or self._task is None:
            return False
        # A moment later: a task that is called off before its first step would never say that it ended.
        asyncio.get_running_loop().call_soon(self._stop_execution, self._task)
        return True

    def _stop_execution(self, task: asyncio.Task[None]) -> None:
        if self._execution.begun:
            self._execution.interrupt()
        else:
            task.cancel()

    async def end(self) -> None:
        """Interrupts it, and kills it where that does not help. Returns when it has ended."""
        if self.interrupt() and self._task is not None:
            await asyncio.sleep(0)
            await self._execution.aclose()
            await asyncio.wait((self._task,))

    async def follow(self, after: int) -> AsyncGenerator[list[RunEventLine], None]:
        """The events with greater numbers, as they come, until the last. Raises RunNotFound if it is removed."""
        while True:
            if after < self.last:
                batch = self._recent_lines(after) or await self._read_stored_lines(after)
                after = batch[-1].number
                yield batch
            elif self.ended:
                return
            else:
                await self._news.wait()

    def _recent_lines(self, after: int) -> list[RunEventLine]:
        """From memory, if all of it is there; else empty."""
        if not self._tail or self._tail[0].number > after + 1:
            return []
        return list(islice(self._tail, after + 1 - self._tail[0].number, None))

    async def _read_stored_lines(self, after: int) -> list[RunEventLine]:
        page = await self._store.page(self.id, after, PAGE_BYTES)
        if page is None:
            raise errors.RunNotFound(f"run {self.id} was removed")
        if not page.chunks:  # they could not be written
            return make_gap_lines(after + 1, self._tail[0].number - 1 if self._tail else self.last, page.record.dropped)
        return page_lines(page, after)

    # -- its life

    async def _run_to_end(self) -> None:
        ending = Ended(outcome="died", reason="an internal error ended it")
        try:
            await self._take_all_events()
        except asyncio.CancelledError:
            ending = Ended(outcome="interrupted", reason=INTERRUPTED_BEFORE_START)
        except errors.ClocheError as error:  # its sandbox ended before its turn came, or no kernel could be started
            ending = Ended(outcome="died", reason=str(error))
        finally:
            if not self.ended:
                await self._keep_end(self._execution.ended or ending)

    async def _keep_end(self, ended: Ended) -> None:
        await self._keep_events([ended] if self.last else [Started(execution=self.id, count=0), ended])

    async def _take_all_events(self) -> None:
        async with aclosing(self._execution):
            while events := await self._execution.next_events():
                await self._keep_events(events)
                if not self.ended and self.last > 1:
                    await asyncio.sleep(PACE_SECONDS)

    async def _keep_events(self, events: Sequence[AnyEvent]) -> None:
        numbered = encode_events(events, self.last + 1, self._max_event_bytes)
        ended = events[-1] if isinstance(events[-1], Ended) else None
        self._unwritten += group_into_chunks(numbered)
        written_by_now = await self._write_chunks(ended)
        if ended is not None and not written_by_now:
            await asyncio.sleep(RETRY_SECONDS)
            await self._write_chunks(ended)
        self._publish_lines([each.line for each in numbered])
        self.ended = ended is not None
        self._news.wake_all()

    async def _write_chunks(self, ended: Ended | None) -> bool:
        """Whether the chunks were stored. Failed ones are tried again with the next: a disk may be full a while.

        Readers get them nevertheless. If too much is unwritten, it is given up: there is a gap then.
        """
        try:
            await self._store.write(self.id, self._unwritten, ended)
        except errors.Unavailable as error:
            log.error("run.not_written", run=self.id, error=str(error))
            if sum(chunk.bytes for chunk in self._unwritten) > self._max_event_bytes:
                self._unwritten = []
            return False
        self._unwritten = []
        return True

    def _publish_lines(self, lines: Sequence[RunEventLine]) -> None:
        self._tail.extend(lines)
        self._tail_bytes += sum(len(line.body) + EVENT_OVERHEAD_BYTES for line in lines)
        self.last = lines[-1].number
        while self._tail_bytes > TAIL_BYTES:
            self._tail_bytes -= len(self._tail.popleft().body) + EVENT_OVERHEAD_BYTES


POLL_SECONDS = 0.5  # how often a run of another process is looked at
PRUNE_RUNS_SECONDS = 3600.0
CLOSE_SECONDS = 5.0

_RUN_ID = re.compile(rf"x[0-9a-f]{{{RUN_ID_LENGTH}}}")


class DetachedRuns:
    """All detached runs. An owner of None sees those of all; another owner's run is reported as not found."""

    def __init__(self, store: RunStore, instance: Instance, limits: Limits):
        self._store = store
        self._instance = instance
        self._limits = limits
        self._live: dict[str, DetachedExecution] = {}
        self._tasks = TaskSet()
        self._pruning: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Removes runs that are too old, now and every hour."""
        self._store.prune_old(lambda name: name != self._instance.name and not self._instance.is_live(name))
        self._pruning = asyncio.get_running_loop().call_later(PRUNE_RUNS_SECONDS, self.open)

    async def start(self, sandbox: Sandbox, context: str, execution: Execution, *, last: bool = False) -> RunInfo:
        """The execution goes on by itself from now on. Returns when the run is stored, so that it survives a crash.

        After the `last` one its sandbox ends.
        Raises InvalidRequest where too many of the owner's go on, and Unavailable where it cannot be stored.
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
        run = self._live[record.id] = DetachedExecution(record, execution, self._store, self._limits.events_bytes)
        try:
            await self._store.add(record)
        except BaseException:
            del self._live[record.id]
            self._store.remove_later(record.id)
            raise
        self._tasks.start(self._remove_when_ended(run.id, run.begin(), sandbox if last else None))
        return run_info(record)

    async def info(self, id: str, owner: str | None) -> RunInfo:
        """Raises RunNotFound."""
        return run_info(await self._find_record(id, owner))

    async def list(self, owner: str | None, sandbox: str | None = None) -> list[RunInfo]:
        """The stored runs, the newest first."""
        found = await self._store.list(owner, sandbox)
        left = [each for each in found if self._is_orphaned(each)]
        for each in left:
            await self._mark_lost(each)
        if left:
            found = await self._store.list(owner, sandbox)
        return [run_info(each) for each in found]

    async def attach(
        self, id: str, owner: str | None, after: int = 0
    ) -> AsyncGenerator[builtins.list[RunEventLine], None]:
        """The events with numbers greater than `after`, as they come, until `Ended`.

        Raises RunNotFound, also later if it is removed; and InvalidRequest if it has not that many events.
        """
        record = await self._find_record(id, owner)
        run = self._live.get(id)
        last = run.last if run is not None else record.events
        if not 0 <= after <= last:
            raise errors.InvalidRequest(
                f"after must be the number of an event of run {id}, 0 to {last} so far, not {after}: the events "
                "after that one are sent"
            )
        return run.follow(after) if run is not None else self._read_stored_lines(id, owner, after)

    async def result(self, id: str, owner: str | None) -> Run:
        """Its result, when it has ended. Raises RunNotFound."""
        async for _ in await self.attach(id, owner, (await self._find_record(id, owner)).events):
            pass
        folding = RunFold()
        async for batch in self._read_stored_lines(id, owner, 0):
            for line in batch:
                folding.feed(line.event)
        return fold_with_notice(folding, (await self._find_record(id, owner)).dropped)

    async def interrupt(self, id: str, owner: str | None) -> bool:
        """False if it has ended. Raises RunNotFound, and InvalidRequest if it goes on in another process."""
        record = await self._find_record(id, owner)
        run = self._live.get(id)
        if run is None and record.instance is not None:
            raise errors.InvalidRequest(f"run {id} goes on in another process of this host: interrupt it there")
        return run is not None and run.interrupt()

    async def remove(self, id: str, owner: str | None) -> None:
        """Ends it if it goes on, and removes it. Raises as `interrupt` does."""
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

    async def _remove_when_ended(self, id: str, life: asyncio.Task[None], ends: Sandbox | None) -> None:
        try:
            await life
        finally:
            self._live.pop(id, None)
        if ends is not None:
            await ends.kill(LAST_RUN_ENDED)

    async def _find_record(self, id: str, owner: str | None) -> RunRecord:
        found = await self._store.get(id, owner) if isinstance(id, str) and _RUN_ID.fullmatch(id) else None
        if found is not None and self._is_orphaned(found):
            await self._mark_lost(found)
            found = await self._store.get(id)
        if found is None:
            raise errors.RunNotFound(f"there is no run {str(id)[:100]!r}: it never was, or is not kept any more")
        return found

    def _is_orphaned(self, record: RunRecord) -> bool:
        """Whether its host process ended without recording the run's end."""
        if record.instance is None or record.id in self._live:
            return False
        return record.instance == self._instance.name or not self._instance.is_live(record.instance)

    async def _mark_lost(self, record: RunRecord) -> None:
        assert record.instance is not None
        await self._store.lose(record.id, record.instance)

    async def _read_stored_lines(
        self, id: str, owner: str | None, after: int
    ) -> AsyncGenerator[builtins.list[RunEventLine], None]:
        """The lines of a run that has ended, or goes on in another process."""
        while True:
            record = await self._find_record(id, owner)
            while after < record.events:
                page = await self._store.page(id, after, PAGE_BYTES)
                if page is None or not page.chunks:
                    raise errors.RunNotFound(f"run {id} was removed")
                batch = page_lines(page, after)
                after = batch[-1].number
                yield batch
            if record.instance is None:
                return
            await asyncio.sleep(POLL_SECONDS)


def run_info(record: RunRecord) -> RunInfo:
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
