"""Whose program runs next where not all can at once, and how many requests may wait for that."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Iterator

from cloche.api.librechat.identity import Caller
from cloche.api.librechat.replies import too_many_programs
from cloche.model import Struct

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
