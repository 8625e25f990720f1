"""The rate limit of programs that one user may start in a minute, where the operator sets one."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import NamedTuple

from cloche.api.librechat.identity import LibreChatCaller
from cloche.api.librechat.replies import LibreChatRefusal, too_many_programs
from cloche.model import Struct

SWEEP_ENTRIES = 10_000  # remembered users, before those that paused are removed


class _ProgramAllowance(NamedTuple):
    programs: float
    at: float


class ProgramRateLimit:
    """A token bucket of `per_minute` programs for each user, refilled evenly. 0: no limit, nothing is counted."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic):
        self._most = per_minute
        self._clock = clock
        self._left: dict[LibreChatCaller, _ProgramAllowance] = {}

    def take(self, caller: LibreChatCaller) -> None:
        """Counts one program of the caller. Raises LibreChatRefusal (429) with the time until the next is possible."""
        if not self._most:
            return
        now = self._clock()
        left = self._refilled_programs(self._left.get(caller), now)
        if left < 1:
            raise _rate_limited(self._most, math.ceil((1 - left) * 60 / self._most))
        if len(self._left) >= SWEEP_ENTRIES:
            self._sweep_full(now)
        self._left[caller] = _ProgramAllowance(left - 1, now)

    def _refilled_programs(self, left: _ProgramAllowance | None, now: float) -> float:
        return self._most if left is None else min(self._most, left.programs + (now - left.at) * self._most / 60)

    def _sweep_full(self, now: float) -> None:
        """Removes users with a full bucket."""
        self._left = {
            user: left for user, left in self._left.items() if self._refilled_programs(left, now) < self._most
        }


def _rate_limited(most: int, seconds: int) -> LibreChatRefusal:
    wait = max(1, seconds)
    unit = "second" if wait == 1 else "seconds"
    return LibreChatRefusal(
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


# Memory of requests, from their first byte on: of all callers, and of each.


class RequestMemory:
    """The limit for the whole server, for all kinds of programs. One caller can have half of it."""

    def __init__(self, bytes: int):
        self._bytes = bytes
        self._held: Counter[LibreChatCaller] = Counter()

    @contextlib.contextmanager
    def share(self, caller: LibreChatCaller) -> Iterator[RequestMemoryShare]:
        """Holds a request's share until the request needs no memory any more."""
        share = RequestMemoryShare(self, caller)
        try:
            yield share
        finally:
            share.settle(0)

    def change(self, caller: LibreChatCaller, more: int) -> None:
        """Takes more bytes, or gives them back if negative. Raises LibreChatRefusal (503)."""
        if more > 0 and (self._held[caller] + more > self._bytes / 2 or self._held.total() + more > self._bytes):
            raise too_many_programs("the programs that come, run, or wait for their turn take too much memory")
        self._held[caller] += more
        if not self._held[caller]:
            del self._held[caller]


class RequestMemoryShare:
    """The memory of one request."""

    def __init__(self, room: RequestMemory, caller: LibreChatCaller):
        self._room = room
        self._caller = caller
        self._bytes = 0

    def add_bytes(self, bytes: int) -> None:
        """Adds bytes that have arrived. Raises LibreChatRefusal (503)."""
        self.settle(self._bytes + bytes)

    def settle(self, bytes: int) -> None:
        """Sets the size that is kept: less than has arrived, or more. Raises LibreChatRefusal (503)."""
        self._room.change(self._caller, bytes - self._bytes)
        self._bytes = bytes


# A fair queue of programs where not all can run at once, with a limit of waiting requests.

MAX_CALLER_SHARE = 3  # a caller's programs are never more than so many times those that could still be started


class ProgramQueueLimits(Struct):
    """The limits of the whole server. One caller can have half of the waiting requests."""

    at_once: int = 85  # programs; one caller has 64 of them at most
    waiting: int = 512  # requests


class ProgramTicket:
    """A request, from its first byte to its answer."""

    def __init__(self, turns: ProgramQueue, caller: LibreChatCaller):
        self.caller = caller
        self.waits = True
        self._turns = turns

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncGenerator[None, None]:
        """Waits until the program may run; the turn ends with the block."""
        await self._turns.take(self.caller)
        self.waits = False
        try:
            yield
        finally:
            self._turns.give_back(self.caller)


class ProgramQueue:
    """The next program is that of the caller with the fewest running; among equals, the first that came.

    Some turns stay free however many programs one caller starts: a caller with none seldom waits for them to end.
    """

    def __init__(self, capacity: ProgramQueueLimits | None = None):
        self._capacity = capacity or ProgramQueueLimits()
        self._tickets: set[ProgramTicket] = set()
        self._running: Counter[LibreChatCaller] = Counter()
        self._queue: list[tuple[LibreChatCaller, asyncio.Future[None]]] = []

    @contextlib.contextmanager
    def hold_ticket(self, caller: LibreChatCaller) -> Iterator[ProgramTicket]:
        """Registers a new request. Raises LibreChatRefusal (503) if too many wait."""
        self._check_waiting(caller)
        ticket = ProgramTicket(self, caller)
        self._tickets.add(ticket)
        try:
            yield ticket
        finally:
            self._tickets.discard(ticket)

    async def take(self, caller: LibreChatCaller) -> None:
        """Waits for a turn. A cancelled caller has none."""
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

    def give_back(self, caller: LibreChatCaller) -> None:
        self._running[caller] -= 1
        if not self._running[caller]:
            del self._running[caller]
        self._start_next()

    def _start_next(self) -> None:
        while able := [each for each in self._queue if self._may_run(each[0])]:
            caller, chosen = min(able, key=lambda each: self._running[each[0]])  # the first of those
            self._queue.remove((caller, chosen))
            if not chosen.done():  # else its request was cancelled a moment ago
                self._running[caller] += 1
                chosen.set_result(None)

    def _may_run(self, caller: LibreChatCaller) -> bool:
        free, own = self._capacity.at_once - self._running.total(), self._running[caller]
        return free > 0 and (own == 0 or own < MAX_CALLER_SHARE * free)

    def _check_waiting(self, caller: LibreChatCaller) -> None:
        waiting = [each for each in self._tickets if each.waits]
        own = sum(1 for each in waiting if each.caller == caller)
        if len(waiting) >= self._capacity.waiting:
            raise too_many_programs(f"{len(waiting)} programs wait for their turn already")
        if own >= self._capacity.waiting / 2:
            raise too_many_programs(f"{own} programs of yours wait for their turn already")
