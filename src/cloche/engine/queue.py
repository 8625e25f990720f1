"""The events of one execution or process between the guest and whoever consumes them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

E = TypeVar("E")

HIGH_BYTES = 4 << 20
LOW_BYTES = 1 << 20
EVENT_BYTES = 256  # what an event costs beside its content
ALL_BYTES = 32 << 20  # of the queues of one sandbox together; beyond that each of them is full with LEAST_BYTES
LEAST_BYTES = 128 << 10


class Bell:
    """Wakes everybody who waits for it."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    def heard(self) -> asyncio.Future[None]:
        """Done when it rings next. Each caller gets one of its own, so that cancelling one wakes nobody else."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting = [future, *(each for each in self._waiting if not each.done())]
        return future

    def ring(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)


class Share:
    """What the queues of one sandbox hold together. It is the host's memory, which no limit of a sandbox bounds:
    whoever starts hundreds of programs there, and reads none of them, would have megabytes for each."""

    __slots__ = ("held_bytes",)

    def __init__(self) -> None:
        self.held_bytes = 0

    @property
    def high_bytes(self) -> int:
        """When one of them is full."""
        return HIGH_BYTES if self.held_bytes <= ALL_BYTES else LEAST_BYTES


class Gap(Protocol[E]):
    """What stands where events were dropped."""

    def add(self, dropped: E) -> None: ...

    def take(self) -> list[E]:
        """Says it, once."""


class EventQueue(Generic[E]):
    """Single producer; each event goes to one consumer, and the end to all.

    Calls `pause` above 4 MiB and `resume` below 1 MiB. After `lose(gap)`, until `keep()`, it drops the oldest events
    above 4 MiB instead, and has `gap` say so where they were. `heard(event, size)` is told of all that is put in.
    Where it has a `share` with others that hold too much together, it is a smaller number than 4 MiB.
    """

    def __init__(
        self,
        pause: Callable[[], None] | None = None,
        resume: Callable[[], None] | None = None,
        heard: Callable[[E, int], None] | None = None,
        share: Share | None = None,
    ):
        self._heard = heard
        self._share = share or Share()
        self._pause = pause or _nothing
        self._resume = resume or _nothing
        self._gap: Gap[E] | None = None
        self._losing = False
        self._events: deque[tuple[E, int]] = deque()
        self._bytes = 0
        self._paused = False
        self._closed = False
        self._bell = Bell()
        self._divert: Callable[[E], None] | None = None

    def put(self, event: E, size: int) -> None:
        if self._heard is not None:
            self._heard(event, size)
        if self._divert is not None:
            self._divert(event)
            return
        self._events.append((event, size + EVENT_BYTES))
        self._bytes += size + EVENT_BYTES
        self._share.held_bytes += size + EVENT_BYTES
        self._check_room()
        self._bell.ring()

    def __del__(self) -> None:
        self._share.held_bytes -= self._bytes  # what nobody ever read

    def slow_down(self, pause: Callable[[], None], resume: Callable[[], None], share: Share) -> None:
        """From now on it is these that are called: what writes is known only now."""
        self._pause, self._resume = pause, resume
        share.held_bytes += self._bytes
        self._share = share

    def lose(self, gap: Gap[E]) -> None:
        """From now on nothing is paused: what is too much is lost, the oldest first."""
        self._gap, self._losing = gap, True
        self._check_room()
        self._let_resume()

    def keep(self) -> None:
        """From now on nothing is lost: what is too much pauses whoever writes it."""
        self._losing = False
        self._check_room()

    def close(self) -> None:
        """No more events will come, and nobody is paused or resumed any more: whoever made it can be forgotten."""
        self._closed = True
        self._pause = self._resume = _nothing
        self._bell.ring()

    def divert(self, to: Callable[[E], None]) -> None:
        """From now on events go straight to `to`, first those that wait. `wait_closed` tells the end."""
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
        self._tell_gap()
        if not self._events:
            return None
        event, size = self._events.popleft()
        self._freed(size)
        return event

    def take(self) -> list[E]:
        """What is there now."""
        self._tell_gap()
        events = [event for event, _size in self._events]
        self._events.clear()
        self._freed(self._bytes)
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

    def _tell_gap(self) -> None:
        if self._gap is not None:
            self._events.extendleft((event, 0) for event in reversed(self._gap.take()))

    def _freed(self, size: int) -> None:
        self._bytes -= size
        self._share.held_bytes -= size
        if self._bytes < LOW_BYTES:
            self._let_resume()

    def _let_resume(self) -> None:
        if self._paused:
            self._paused = False
            self._resume()


def _nothing() -> None:
    """There is nobody to pause or resume."""
