"""How many programs one user may start in a minute, where the operator sets a limit."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import NamedTuple

from cloche.api.librechat.identity import Caller
from cloche.api.librechat.replies import Refusal, too_many_programs
from cloche.model import Struct

SWEEP_ENTRIES = 10_000  # users of whom something is remembered, before those who paused are forgotten


class _Left(NamedTuple):
    programs: float
    at: float


class Pace:
    """A bucket of `per_minute` programs for each user, which fills evenly. 0: no limit, and nothing is counted."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic):
        self._most = per_minute
        self._clock = clock
        self._left: dict[Caller, _Left] = {}

    def take(self, caller: Caller) -> None:
        """Counts one program of the caller's. Raises Refusal (429) that says when the next is possible."""
        if not self._most:
            return
        now = self._clock()
        left = self._filled(self._left.get(caller), now)
        if left < 1:
            raise _too_fast(self._most, math.ceil((1 - left) * 60 / self._most))
        if len(self._left) >= SWEEP_ENTRIES:
            self._sweep(now)
        self._left[caller] = _Left(left - 1, now)

    def _filled(self, left: _Left | None, now: float) -> float:
        return self._most if left is None else min(self._most, left.programs + (now - left.at) * self._most / 60)

    def _sweep(self, now: float) -> None:
        """Forgets whose bucket is full again."""
        self._left = {who: left for who, left in self._left.items() if self._filled(left, now) < self._most}


def _too_fast(most: int, seconds: int) -> Refusal:
    wait = max(1, seconds)
    unit = "second" if wait == 1 else "seconds"
    return Refusal(
        429,
        "rate_limited",
        f"Too many CodeAPI execution requests. Please retry in {wait} {unit}.",
        {
            "retry-after": str(wait),
            "ratelimit-limit": str(most),
            "ratelimit-remaining": "0",
            "ratelimit-reset": str(wait),
        },
        retry_after_seconds=wait,
    )


# How much memory requests take, from their first byte on: of all, and of one caller's.


class Room:
    """Of the whole server, however programs come. Half of it can be one caller's."""

    def __init__(self, bytes: int):
        self._bytes = bytes
        self._held: Counter[Caller] = Counter()

    @contextlib.contextmanager
    def share(self, caller: Caller) -> Iterator[Share]:
        """For a request that comes now, until it needs none any more."""
        share = Share(self, caller)
        try:
            yield share
        finally:
            share.settle(0)

    def change(self, caller: Caller, more: int) -> None:
        """Less, if it is negative. Raises Refusal (503)."""
        if more > 0 and (self._held[caller] + more > self._bytes / 2 or self._held.total() + more > self._bytes):
            raise too_many_programs("the programs that come, run, or wait for their turn take too much memory")
        self._held[caller] += more
        if not self._held[caller]:
            del self._held[caller]


class Share:
    """What one request takes."""

    def __init__(self, room: Room, caller: Caller):
        self._room = room
        self._caller = caller
        self._bytes = 0

    def grow(self, bytes: int) -> None:
        """So much more of it has come. Raises Refusal (503)."""
        self.settle(self._bytes + bytes)

    def settle(self, bytes: int) -> None:
        """What is kept of it has that size: less than what has come, or more. Raises Refusal (503)."""
        self._room.change(self._caller, bytes - self._bytes)
        self._bytes = bytes


# Whose program runs next where not all can at once, and how many requests may wait for that.

SHARE = 3  # a caller's programs are never more than so many times those that could still be started


class Capacity(Struct):
    """Of the whole server. Half of what may wait can be one caller's."""

    at_once: int = 85  # programs; one caller has 64 of them at most
    waiting: int = 512  # requests


class Ticket:
    """A request, from its first byte to its answer."""

    def __init__(self, turns: Turns, caller: Caller):
        self.caller = caller
        self.waits = True
        self._turns = turns

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncGenerator[None, None]:
        """Waits until the program may run. It does until this is left."""
        await self._turns.take(self.caller)
        self.waits = False
        try:
            yield
        finally:
            self._turns.give_back(self.caller)


class Turns:
    """When a program ends, the one runs next whose caller has the fewest; of those, the one that came first.

    However many programs one caller starts, some turns are left: whoever runs nothing seldom waits for those to end.
    """

    def __init__(self, capacity: Capacity | None = None):
        self._capacity = capacity or Capacity()
        self._tickets: set[Ticket] = set()
        self._running: Counter[Caller] = Counter()
        self._queue: list[tuple[Caller, asyncio.Future[None]]] = []

    @contextlib.contextmanager
    def ticket(self, caller: Caller) -> Iterator[Ticket]:
        """For a request that comes now. Raises Refusal (503) if too many wait."""
        self._check_waiting(caller)
        ticket = Ticket(self, caller)
        self._tickets.add(ticket)
        try:
            yield ticket
        finally:
            self._tickets.discard(ticket)

    async def take(self, caller: Caller) -> None:
        """Whoever is cancelled here has no turn."""
        if not self._queue and self._may_run(caller):
            self._running[caller] += 1
            return
        mine = asyncio.get_running_loop().create_future()
        self._queue.append((caller, mine))
        self._start_next()
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():  # it came at the very moment
                self.give_back(caller)
            elif (caller, mine) in self._queue:  # else a turn was to be given to it, a moment ago
                self._queue.remove((caller, mine))
            raise

    def give_back(self, caller: Caller) -> None:
        self._running[caller] -= 1
        if not self._running[caller]:
            del self._running[caller]
        self._start_next()

    def _start_next(self) -> None:
        while able := [each for each in self._queue if self._may_run(each[0])]:
            caller, chosen = min(able, key=lambda each: self._running[each[0]])  # the first of those
            self._queue.remove((caller, chosen))
            if not chosen.done():  # else whoever waited was cancelled a moment ago
                self._running[caller] += 1
                chosen.set_result(None)

    def _may_run(self, caller: Caller) -> bool:
        free, own = self._capacity.at_once - self._running.total(), self._running[caller]
        return free > 0 and (own == 0 or own < SHARE * free)

    def _check_waiting(self, caller: Caller) -> None:
        waiting = [each for each in self._tickets if each.waits]
        own = sum(1 for each in waiting if each.caller == caller)
        if len(waiting) >= self._capacity.waiting:
            raise too_many_programs(f"{len(waiting)} programs wait for their turn already")
        if own >= self._capacity.waiting / 2:
            raise too_many_programs(f"{own} programs of yours wait for their turn already")
