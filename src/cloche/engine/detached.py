"""One run without a connection, while it goes on."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import islice

from cloche import errors
from cloche.engine.execution import Execution
from cloche.engine.kept_events import Line, chunks_of, gap, lines_in, written
from cloche.engine.queue import EVENT_BYTES, Bell
from cloche.events import AnyEvent, Ended, Started
from cloche.store.runs import Chunk, RunRecord, RunStore
from cloche.telemetry import log

PACE_SECONDS = 0.05  # between two transactions: what comes meanwhile is written together
TAIL_BYTES = 1 << 20  # of the newest events, which most readers want, in memory
PAGE_BYTES = 256 << 10  # of older ones, that a reader holds at once
RETRY_SECONDS = 1.0  # after which the end of a run is written once more, where it could not be

NOT_BEGUN = "it was interrupted before it began"


class DetachedRun:
    """Takes the events of an execution, keeps them, and tells them to any number of readers, each at its own pace."""

    def __init__(self, record: RunRecord, execution: Execution, store: RunStore, max_event_bytes: int):
        self.id, self.owner = record.id, record.owner
        self.last = 0  # the number of the last event that is kept
        self.ended = False
        self._execution = execution
        self._store = store
        self._max_event_bytes = max_event_bytes
        self._tail: deque[Line] = deque()
        self._tail_bytes = 0
        self._unwritten: list[Chunk] = []  # what could not be, so far
        self._news = Bell()
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> asyncio.Task[None]:
        self._task = asyncio.create_task(self._go())
        return self._task

    def interrupt(self) -> bool:
        """As `Execution.interrupt`; one that waits for its turn ends. False if it has ended."""
        if self.ended or self._task is None:
            return False
        # A moment later: a task that is called off before its first step would never say that it ended.
        asyncio.get_running_loop().call_soon(self._stop, self._task)
        return True

    def _stop(self, task: asyncio.Task[None]) -> None:
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

    async def follow(self, after: int) -> AsyncGenerator[list[Line], None]:
        """The events with greater numbers, as they come, until the last. Raises RunNotFound if it is removed."""
        while True:
            if after < self.last:
                batch = self._recent(after) or await self._older(after)
                after = batch[-1].number
                yield batch
            elif self.ended:
                return
            else:
                await self._news.heard()

    def _recent(self, after: int) -> list[Line]:
        """From memory, if all of it is there."""
        if not self._tail or self._tail[0].number > after + 1:
            return []
        return list(islice(self._tail, after + 1 - self._tail[0].number, None))

    async def _older(self, after: int) -> list[Line]:
        page = await self._store.page(self.id, after, PAGE_BYTES)
        if page is None:
            raise errors.RunNotFound(f"run {self.id} was removed")
        if not page.chunks:  # they could not be written
            return gap(after + 1, self._tail[0].number - 1 if self._tail else self.last, page.record.dropped)
        return lines_in(page, after)

    # -- its life

    async def _go(self) -> None:
        ending = Ended(outcome="died", reason="a fault of Cloche's ended it")
        try:
            await self._take_all()
        except asyncio.CancelledError:
            ending = Ended(outcome="interrupted", reason=NOT_BEGUN)
        except errors.ClocheError as error:  # its sandbox ended before its turn came, or no kernel could be started
            ending = Ended(outcome="died", reason=str(error))
        finally:
            if not self.ended:
                await self._keep_end(self._execution.ended or ending)

    async def _keep_end(self, ended: Ended) -> None:
        await self._keep([ended] if self.last else [Started(execution=self.id, count=0), ended])

    async def _take_all(self) -> None:
        async with aclosing(self._execution):
            while events := await self._execution.next_events():
                await self._keep(events)
                if not self.ended and self.last > 1:
                    await asyncio.sleep(PACE_SECONDS)

    async def _keep(self, events: Sequence[AnyEvent]) -> None:
        numbered = written(events, self.last + 1, self._max_event_bytes)
        ended = events[-1] if isinstance(events[-1], Ended) else None
        self._unwritten += chunks_of(numbered)
        written_by_now = await self._write(ended)
        if ended is not None and not written_by_now:
            await asyncio.sleep(RETRY_SECONDS)
            await self._write(ended)
        self._show([each.line for each in numbered])
        self.ended = ended is not None
        self._news.ring()

    async def _write(self, ended: Ended | None) -> bool:
        """Whether it could be. What could not is tried again with what comes next: a disk may be full for a while.

        Readers are told nevertheless. If too much waits, it is given up: there is a gap then.
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

    def _show(self, lines: Sequence[Line]) -> None:
        self._tail.extend(lines)
        self._tail_bytes += sum(len(line.body) + EVENT_BYTES for line in lines)
        self.last = lines[-1].number
        while self._tail_bytes > TAIL_BYTES:
            self._tail_bytes -= len(self._tail.popleft().body) + EVENT_BYTES
