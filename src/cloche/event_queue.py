"""The queue of events of one execution or process, between their source and their consumer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

E = TypeVar("E")

HIGH_WATER_BYTES = 4 << 20
LOW_WATER_BYTES = 1 << 20
EVENT_OVERHEAD_BYTES = 256  # what an event costs beside its content
SANDBOX_QUEUE_BYTES = 32 << 20  # of the queues of one sandbox together; above it each is full at LEAST_QUEUE_BYTES
LEAST_QUEUE_BYTES = 128 << 10


class Signal:
    """Wakes all waiting tasks."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    def heard(self) -> asyncio.Future[None]:
        """A future that is done at the next `wake_all`. Each caller gets its own: cancelling one wakes no other."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting = [future, *(each for each in self._waiting if not each.done())]
        return future

    def wake_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)


class QueueBudget:
    """The bytes that the queues of one sandbox hold together.

    They are in the host's memory, which no limit of a sandbox bounds: hundreds of programs with unread output
    would take megabytes each.
    """

    __slots__ = ("held_bytes",)

    def __init__(self) -> None:
        self.held_bytes = 0

    @property
    def high_bytes(self) -> int:
        """The size at which one of them is full."""
        return HIGH_WATER_BYTES if self.held_bytes <= SANDBOX_QUEUE_BYTES else LEAST_QUEUE_BYTES


class DroppedEvents(Protocol[E]):
    """Takes the place of events that were dropped."""

    def add(self, dropped: E) -> None: ...

    def take(self) -> list[E]:
        """Returns the events that report the dropped ones, once."""


class EventQueue(Generic[E]):
    """Single producer; each event goes to one consumer, and the end to all.

    Calls `pause` above 4 MiB and `resume` below 1 MiB. After `lose(gap)`, until `keep()`, it drops the oldest
    events above 4 MiB instead, and `gap` reports them at their place. `heard(event, size)` gets all events that
    are put in. While the queues of its `share` hold too much together, the limit is lower than 4 MiB.
    """

    def __init__(
        self,
        pause: Callable[[], None] | None = None,
        resume: Callable[[], None] | None = None,
        heard: Callable[[E, int], None] | None = None,
        share: QueueBudget | None = None,
    ):
        self._heard = heard
        self._share = share or QueueBudget()
        self._pause = pause or _do_nothing
        self._resume = resume or _do_nothing
        self._gap: DroppedEvents[E] | None = None
        self._losing = False
        self._events: deque[tuple[E, int]] = deque()
        self._bytes = 0
        self._paused = False
        self._closed = False
        self._bell = Signal()
        self._divert: Callable[[E], None] | None = None

    def put(self, event: E, size: int) -> None:
        if self._heard is not None:
            self._heard(event, size)
        if self._divert is not None:
            self._divert(event)
            return
        self._events.append((event, size + EVENT_OVERHEAD_BYTES))
        self._bytes += size + EVENT_OVERHEAD_BYTES
        self._share.held_bytes += size + EVENT_OVERHEAD_BYTES
        self._check_room()
        self._bell.wake_all()

    def __del__(self) -> None:
        self._share.held_bytes -= self._bytes  # what nobody ever read

    def slow_down(self, pause: Callable[[], None], resume: Callable[[], None], share: QueueBudget) -> None:
        """Sets the callbacks and the budget once the producer is known."""
        self._pause, self._resume = pause, resume
        share.held_bytes += self._bytes
        self._share = share

    def lose(self, gap: DroppedEvents[E]) -> None:
        """From now on the producer is never paused: events over the limit are dropped, the oldest first."""
        self._gap, self._losing = gap, True
        self._check_room()
        self._resume_producer()

    def keep(self) -> None:
        """From now on nothing is dropped: events over the limit pause the producer."""
        self._losing = False
        self._check_room()

    def close(self) -> None:
        """Ends the queue: no more events come, and its references to the producer are dropped."""
        self._closed = True
        self._pause = self._resume = _do_nothing
        self._bell.wake_all()

    def divert_events(self, to: Callable[[E], None]) -> None:
        """From now on events go straight to `to`, first those that wait. `wait_closed` returns at the end."""
        for event in self.take():
            to(event)
        self._divert = to

    async def wait_closed(self) -> None:
        while not self._closed:
            await self._bell.heard()

    async def next_events(self) -> list[E]:
        """All events that are there, at least one; an empty list at the end."""
        while not self._events and not self._closed:
            await self._bell.heard()
        return self.take()

    async def next_event(self) -> E | None:
        """The next event; None at the end."""
        while not self._events and not self._closed:
            await self._bell.heard()
        self._insert_gap()
        if not self._events:
            return None
        event, size = self._events.popleft()
        self._release_bytes(size)
        return event

    def take(self) -> list[E]:
        """The events that are there now."""
        self._insert_gap()
        events = [event for event, _size in self._events]
        self._events.clear()
        self._release_bytes(self._bytes)
        return events

    def _check_room(self) -> None:
        if self._losing and self._gap is not None:
            while self._bytes > self._share.high_bytes:
                event, size = self._events.popleft()
                self._bytes -= size
                self._share.held_bytes -= size
                self._gap.add(event)
        elif self._bytes > self._share.high_bytes and not self._paused:
            self._paused = True
            self._pause()

    def _insert_gap(self) -> None:
        if self._gap is not None:
            self._events.extendleft((event, 0) for event in reversed(self._gap.take()))

    def _release_bytes(self, size: int) -> None:
        self._bytes -= size
        self._share.held_bytes -= size
        if self._bytes < LOW_WATER_BYTES:
            self._resume_producer()

    def _resume_producer(self) -> None:
        if self._paused:
            self._paused = False
            self._resume()


def _do_nothing() -> None:
    """The callback where there is no producer to pause or resume."""
