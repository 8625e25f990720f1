"""A gate with a number of places, and the lines of those who wait for one.

Each owner has a line of its own. A place that is given back goes to the owner who has the fewest, so that whoever has a
thousand requests waiting delays nobody else's first. Where there is room, entering is a comparison and a count.
"""

from __future__ import annotations

import asyncio
import math
import os
import resource
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence

from cloche import errors
from cloche.config.sections import Capacity
from cloche.engine.quotas.occupancy import Occupancy
from cloche.linux.host_memory import available_bytes, directories, number_in
from cloche.model import MIB, Struct
from cloche.telemetry import Histogram

# How many sandboxes and executions a host can have at once, worked out from what it has.

SANDBOX_BYTES = 8 * MIB  # one that has run something small; those that use more meet the reserve
SANDBOX_DESCRIPTORS = 12
SANDBOX_PROCESSES = 8  # with a few that its programs start
OWN_DESCRIPTORS = 512  # for connections, files and the server itself
EXECUTIONS_PER_CORE = 64  # most of a program's time passes with waiting
LEAST_EXECUTIONS = 256


class Room(Struct):
    """`because`: what it is that there is no more of."""

    places: int
    because: str


def sandboxes_at_once(config: Capacity) -> Room:
    if config.sandboxes:
        return Room(places=config.sandboxes, because="configured")
    return min(_rooms(config), key=lambda room: room.places)


def executions_at_once(config: Capacity) -> Room:
    if config.executions:
        return Room(places=config.executions, because="configured")
    cores = len(os.sched_getaffinity(0))
    return Room(places=max(EXECUTIONS_PER_CORE * cores, LEAST_EXECUTIONS), because="cores")


def _rooms(config: Capacity) -> Iterator[Room]:
    left = available_bytes()
    if left is not None:
        yield _room((left - config.memory_reserve_bytes) // SANDBOX_BYTES, "memory")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY:
        yield _room((files - OWN_DESCRIPTORS) // SANDBOX_DESCRIPTORS, "descriptors")
    yield _room(_most_processes() * 3 // 4 // SANDBOX_PROCESSES, "processes")


def _room(places: int, because: str) -> Room:
    return Room(places=max(places, 1), because=because)


def _most_processes() -> int:
    """That this host, or this user on it, or the cgroups that this process is in, can have."""
    known = [number_in("/proc/sys/kernel", name) for name in ("pid_max", "threads-max")]
    known += [number_in(each, "pids.max") for each in directories("pids")]
    own = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    return min([each for each in (*known, own) if each is not None and each > 0], default=32768)


LOOK_SECONDS = 0.1  # how often it is looked whether there is memory again, while somebody waits
BURST = 4  # that begin at one such look: what they take shows only at the next
MAX_RETRY_SECONDS = 300.0
WAIT_SECONDS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0)
_SMOOTHING = 0.2  # what the newest interval counts for, among those between two ends
_KEPT_FOR_OTHERS = 10  # the part of all places that an owner with more than its share leaves free: one in so many
_LEAST_TO_SHARE = 2  # places: of these one is kept, and of a single one none can be


class Waiter:
    """One who waits at a gate."""

    __slots__ = ("_gate", "_timer", "_turn", "owner", "since")

    def __init__(self, gate: Gate, owner: str, seconds: float):
        loop = asyncio.get_running_loop()
        self.owner = owner
        self.since = loop.time()
        self._gate = gate
        self._turn: asyncio.Future[bool] = loop.create_future()
        self._timer = loop.call_later(seconds, gate.on_overdue, self)

    async def turn(self) -> bool:
        """Whether its place has come; False if it was withdrawn. Raises Busy, ShuttingDown."""
        try:
            return await self._turn
        except asyncio.CancelledError:
            if self._turn.done() and not self._turn.cancelled() and self._turn.exception() is None:
                if self._turn.result():  # at this very moment: the next one may have it
                    self._gate.leave(self.owner)
            else:
                self._gate.forget(self)
            raise
        finally:
            self._timer.cancel()

    def withdraw(self) -> None:
        """It is of no use any more. Harmless when its place has come."""
        if not self._turn.done():
            self._gate.forget(self)
            self._turn.set_result(False)

    def admit(self) -> None:
        self._turn.set_result(True)

    def refuse(self, error: errors.ClocheError) -> None:
        if self.waits:
            self._turn.set_exception(error)

    @property
    def waits(self) -> bool:
        return not self._turn.done()


class Gate:
    """`capacity` places for `what`. Whose owner is the empty string, the engine itself, never waits.

    `enough()` says whether there is enough of what does not depend on places; while it says no, nobody enters.
    """

    def __init__(self, what: str, room: Room, config: Capacity, enough: Callable[[], bool] | None = None):
        self.what = what
        self.room = room
        self.in_use = 0
        self.waiting = 0
        self.refused: Counter[str] = Counter()  # by the error's code
        self.waited_seconds = Histogram(WAIT_SECONDS)  # of those who had to
        self._config = config
        self._enough = enough
        self._held: dict[str, int] = {}  # places, by owner
        self._lines: dict[str, deque[Waiter]] = {}  # who had a place last is the last
        self._known = ""  # the first owner that came
        self._is_shared = False  # whether there was another one, ever, or can be
        self._looking: asyncio.TimerHandle | None = None
        self._full_since = time.monotonic()  # or since a place was last given back while it was
        self._interval_seconds = 0.0  # between two that were, lately
        self._closed = False

    # -- to enter, and to leave

    def enter_now(self, owner: str) -> bool:
        """Takes a place if there is one, and nobody who came before waits for it."""
        if not owner or (owner not in self._lines and self._looking is None and self._has_room(owner)):
            self._take(owner)
            return True
        return False

    def check(self, owner: str) -> None:
        """Raises as `line_up` does, if that would."""
        if owner and self._is_full and not self._has_place(owner):
            self._check_line(owner)

    def line_up(self, owner: str) -> Waiter:
        """Raises QuotaExceeded where that owner has too many waiting already, Busy where all have, ShuttingDown."""
        if self._closed:
            raise errors.ShuttingDown("the host is shutting down")
        self._check_line(owner)
        if self.waiting >= self._config.queued:
            self._displace()
        waiter = Waiter(self, owner, self._config.queue_seconds)
        self._lines.setdefault(owner, deque()).append(waiter)
        self.waiting += 1
        self._admit(1)  # there may be a place that those who wait cannot have
        return waiter

    async def enter(self, owner: str) -> Place:
        """Waits for a place. Raises as `line_up` does, and Busy after a time."""
        if not self.enter_now(owner):
            await self.line_up(owner).turn()
        return Place(self, owner)

    def leave(self, owner: str) -> None:
        """Gives one place back."""
        if self._is_full:
            self._keep_pace()
        self.in_use -= 1
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
        if self._lines:
            self._postpone(owner)
            self._admit(BURST)

    def take_back(self, owner: str, count: int) -> None:
        """So many places at once, without waiting. Raises Busy where there are not so many that they may have."""
        all_free = not self.in_use and count <= self.room.places  # then also who had more before there were others
        if count and owner and not all_free and not self._has_place(owner, count):
            raise self._refused(self._full(owner))
        for _ in range(count):
            self._take(owner)

    def share(self) -> None:
        """There are several owners, or can be: from now on some places are kept for those who come later."""
        self._is_shared = True

    def turn_away(self, owner: str, why: Callable[[], errors.ClocheError]) -> None:
        """None of that owner's waits any more."""
        for waiter in list(self._lines.get(owner, ())):
            self.forget(waiter)
            waiter.refuse(why())

    def close(self) -> None:
        """Nobody waits any more."""
        self._closed = True
        for waiter in list(self._everybody()):
            self.forget(waiter)
            waiter.refuse(errors.ShuttingDown("the host is shutting down"))

    # -- what is told

    @property
    def occupancy(self) -> Occupancy:
        return Occupancy(
            capacity=self.room.places,
            because=self.room.because,
            in_use=self.in_use,
            waiting=self.waiting,
            owners_waiting=len(self._lines),
        )

    @property
    def crowded(self) -> bool:
        """Whether some who come now would have to wait."""
        return self._is_full or self.waiting > 0 or (self._enough is not None and not self._enough())

    def held_by(self, owner: str) -> int:
        return self._held.get(owner, 0)

    # -- for those who wait

    def forget(self, waiter: Waiter) -> None:
        line = self._lines.get(waiter.owner)
        if line is not None and waiter in line:
            line.remove(waiter)
            self.waiting -= 1
            if not line:
                del self._lines[waiter.owner]
            self._look_later()

    def on_overdue(self, waiter: Waiter) -> None:
        if waiter.waits:
            self.forget(waiter)
            self.waited_seconds.observe(asyncio.get_running_loop().time() - waiter.since)
            waiter.refuse(self._refused(self._full(waiter.owner)))

    # -- inside

    def _take(self, owner: str) -> None:
        self.in_use += 1
        self._held[owner] = self._held.get(owner, 0) + 1
        if self.in_use == self.room.places:
            self._full_since = time.monotonic()
        if owner != self._known and owner and not self._is_shared:
            self._is_shared = bool(self._known)
            self._known = self._known or owner

    def _has_room(self, owner: str) -> bool:
        return self._has_place(owner) and (self._enough is None or self._enough())

    def _has_place(self, owner: str, count: int = 1) -> bool:
        """Whether there are so many. The last ones are for owners who have less than their share: else one could keep
        all the others out."""
        free = self.room.places - self.in_use - (count - 1)  # when it comes to the last of them
        if free > self._kept_for_others:
            return True
        if free <= 0 or not self._kept_for_others:
            return free > 0
        owners = max(len(self._held.keys() | {owner}), 2)
        return self.held_by(owner) + count - 1 < self.room.places // owners

    @property
    def _kept_for_others(self) -> int:
        if not self._is_shared or self.room.places < _LEAST_TO_SHARE:
            return 0
        return max(self.room.places // _KEPT_FOR_OTHERS, 1)

    @property
    def _is_full(self) -> bool:
        return self.in_use >= self.room.places - self._kept_for_others

    def _keep_pace(self) -> None:
        now = time.monotonic()
        passed, self._full_since = now - self._full_since, now
        self._interval_seconds += _SMOOTHING * (passed - self._interval_seconds)

    def _admit(self, most: int) -> None:
        """Lets in whoever can be: of the owners who wait, the one with the fewest places, then whoever waits longer."""
        while self._lines and most and (owner := self._next_owner()) is not None:
            waiter = self._lines[owner][0]
            self.forget(waiter)
            if not waiter.waits:  # it was called off at this very moment, and has not yet said so
                continue
            self._postpone(owner)
            self._take(owner)
            self.waited_seconds.observe(asyncio.get_running_loop().time() - waiter.since)
            waiter.admit()
            most -= 1
        self._look_later()

    def _postpone(self, owner: str) -> None:
        """Whoever had a place just now comes after those who have as few."""
        if owner in self._lines:
            self._lines[owner] = self._lines.pop(owner)

    def _next_owner(self) -> str | None:
        if self._enough is not None and not self._enough():
            return None
        return min((each for each in self._lines if self._has_place(each)), key=self.held_by, default=None)

    def _look_later(self) -> None:
        """Places are given back with a word, memory is not."""
        if self._lines and self._looking is None and self._enough is not None:
            self._looking = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)
        elif not self._lines and self._looking is not None:
            self._looking.cancel()
            self._looking = None

    def _look(self) -> None:
        self._looking = None
        self._admit(BURST)

    def _check_line(self, owner: str) -> None:
        own = len(self._lines.get(owner, ()))
        if own >= self._config.queued_per_owner:
            raise self._refused(self._too_many_of(owner, own))
        if self.waiting >= self._config.queued and own + 1 >= len(self._longest()):
            raise self._refused(self._full(owner))

    def _displace(self) -> None:
        """All lines together are full: makes room for one whose owner has fewer waiting than another has."""
        last = self._longest()[-1]
        self.forget(last)
        last.refuse(self._refused(self._full(last.owner)))

    def _longest(self) -> Sequence[Waiter]:
        return max(self._lines.values(), key=len, default=())

    def _everybody(self) -> Iterator[Waiter]:
        for line in self._lines.values():
            yield from line

    # -- refusals

    def _refused(self, error: errors.ClocheError) -> errors.ClocheError:
        self.refused[error.code] += 1
        return error

    def _full(self, owner: str) -> errors.Busy:
        seconds = self._retry_seconds(owner)
        if self._has_place(owner) and self._enough is not None and not self._enough():
            why = "this host has too little memory left"
        else:
            why = f"this host has as many {self.what} as it can"  # how many is for admins to know
        return errors.Busy(f"{why}: try again in {math.ceil(seconds)} s", retry_after_seconds=seconds)

    def _too_many_of(self, owner: str, count: int) -> errors.QuotaExceeded:
        seconds = self._retry_seconds(owner)
        return errors.QuotaExceeded(
            f"{count} requests of yours wait already for {self.what}, as many as one may have waiting here: try again "
            f"in {math.ceil(seconds)} s",
            retry_after_seconds=seconds,
        )

    def _retry_seconds(self, owner: str) -> float:
        """When it may be that owner's turn, at the pace at which places were given back lately."""
        own = len(self._lines.get(owner, ())) + 1
        ahead = min(own * len(self._lines.keys() | {owner}), self.waiting + 1)
        pace = max(self._interval_seconds, time.monotonic() - self._full_since)
        return min(max(ahead * pace, 1.0), MAX_RETRY_SECONDS)


class Place:
    """Of one sandbox: from before its cell is made until nothing is left of it."""

    __slots__ = ("_gate", "_given_back", "_owner")

    def __init__(self, gate: Gate, owner: str):
        self._gate = gate
        self._owner = owner
        self._given_back = False

    def leave(self, *_: object) -> None:
        """Only the first call counts."""
        if not self._given_back:
            self._given_back = True
            self._gate.leave(self._owner)


# Whether this host has memory for more, looked up so seldom that asking costs nothing.

FRESH_SECONDS = 0.1
AMPLE = 2  # times the reserve: with less left, what only waits to be used is let go of first


class Memory:
    """What is left of memory, against what is to be kept free.

    It goes by what is left, and not by how long programs wait for memory (/proc/pressure): a sandbox that thrashes
    against its own limit would raise that for everybody.
    """

    def __init__(self, reserve_bytes: int):
        self.reserve_bytes = reserve_bytes
        self._looked_at = 0.0
        self._left_bytes: int | None = None

    @property
    def left_bytes(self) -> int | None:
        """A moment ago; None where this host does not tell."""
        now = time.monotonic()
        if now - self._looked_at > FRESH_SECONDS:
            self._looked_at, self._left_bytes = now, available_bytes()
        return self._left_bytes

    def enough(self) -> bool:
        """Whether a sandbox may begin."""
        left = self.left_bytes
        return left is None or left >= self.reserve_bytes

    def ample(self) -> bool:
        """Whether cells may be kept waiting."""
        left = self.left_bytes
        return left is None or left >= AMPLE * self.reserve_bytes


# Owners of whom everything is being removed: nothing is made for them meanwhile, nor what they asked for before.

Ending = Callable[[str], Awaitable[None]]


class ShutOut:
    def __init__(self) -> None:
        self._now: Counter[str] = Counter()
        self._times: Counter[str] = Counter()  # that each was
        self._endings: list[Ending] = []

    def hear(self, ending: Ending) -> None:
        """Calls it with each owner that is shut out: what it has under way for them has ended when it returns."""
        self._endings.append(ending)

    def begin(self, owner: str) -> None:
        self._now[owner] += 1
        self._times[owner] += 1

    async def end_work(self, owner: str) -> None:
        """Returns when nothing is under way for them that outlives requests."""
        await asyncio.gather(*(ending(owner) for ending in self._endings))

    def end(self, owner: str) -> None:
        """They can come again; what they asked for before is still not made."""
        self._now[owner] -= 1

    def begun(self, owner: str) -> int:
        """For `check`, by whoever begins something for them. Raises Unauthenticated."""
        if self._now[owner] > 0:
            raise erased()
        return self._times[owner]

    def check(self, owner: str, begun: int) -> None:
        """Raises Unauthenticated if they were shut out since then."""
        if self._times[owner] != begun:
            raise erased()


def erased() -> errors.Unauthenticated:
    return errors.Unauthenticated("this key is no longer valid: all that belonged to its owner was removed")


# How much this host takes on at once: places for sandboxes, turns for executions, and memory.


class Turns:
    """The executions of one sandbox at the gate. While it is paused its programs stand still, and hold no place."""

    def __init__(self, gate: Gate, owner: str):
        self._gate = gate
        self._owner = owner
        self._count = 0
        self._resting = False

    def check(self) -> None:
        """Raises Busy or QuotaExceeded where one more would be refused at once: before an answer has begun."""
        self._gate.check(self._owner)

    def enter_now(self) -> bool:
        if self._gate.enter_now(self._owner):
            self._entered()
            return True
        return False

    def line_up(self) -> Waiter:
        """Raises as `Gate.line_up` does."""
        return self._gate.line_up(self._owner)

    async def enter(self, waiter: Waiter) -> bool:
        """Whether its turn has come; False if it was withdrawn. Raises Busy, ShuttingDown."""
        if not await waiter.turn():
            return False
        self._entered()
        return True

    def leave(self) -> None:
        self._count -= 1
        if not self._resting:
            self._gate.leave(self._owner)

    def rest(self) -> None:
        if not self._resting:
            self._resting = True
            for _ in range(self._count):
                self._gate.leave(self._owner)

    def rise(self) -> None:
        """Raises Busy where there is no room now for all that would go on."""
        if self._resting:
            self._gate.take_back(self._owner, self._count)
            self._resting = False

    def _entered(self) -> None:
        self._count += 1
        if self._resting:
            self._gate.leave(self._owner)


class Admission:
    """What one engine has room for."""

    def __init__(self, config: Capacity):
        self._cores = len(os.sched_getaffinity(0))
        self.shut_out = ShutOut()
        self.memory = Memory(config.memory_reserve_bytes)
        self.sandboxes = Gate("sandboxes", sandboxes_at_once(config), config, self.memory.enough)
        self.executions = Gate("running executions", executions_at_once(config), config)

    @property
    def rooms(self) -> dict[str, object]:
        """What was worked out, or configured, in words for a log."""
        sandboxes, executions = self.sandboxes.room, self.executions.room
        return {"sandboxes": sandboxes.places, "because": sandboxes.because, "executions": executions.places}

    @property
    def crowded(self) -> bool:
        """Whether one more sandbox would have to wait."""
        return self.sandboxes.crowded

    def busy(self) -> bool:
        """Whether there are programs for all cores."""
        return self.executions.in_use >= self._cores

    def share(self) -> None:
        """There are several owners, or can be: none may have all of it."""
        self.sandboxes.share()
        self.executions.share()

    def shut(self, owner: str) -> None:
        """Nothing is made for that owner until `shut_out.end`, and whoever of theirs waits is told why."""
        self.shut_out.begin(owner)
        for gate in (self.sandboxes, self.executions):
            gate.turn_away(owner, erased)

    def close(self) -> None:
        """Whoever waits is told that the host is shutting down."""
        self.sandboxes.close()
        self.executions.close()
