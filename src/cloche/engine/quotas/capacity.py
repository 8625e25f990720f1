"""Admission queue: a number of slots, and one waiting line per owner.

A freed slot goes to the waiting owner that holds the fewest, so that an owner with a thousand waiting
requests does not delay another owner's first. Where there is room, entering is a comparison and a count.
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
from cloche.config.sections import CapacityConfig
from cloche.engine.quotas.occupancy import Occupancy
from cloche.linux.host_memory import available_bytes, cgroup_directories, read_number
from cloche.model import MIB, Struct
from cloche.telemetry import Histogram

# The number of sandboxes and executions that a host can have at once, computed from its resources.

SANDBOX_BYTES = 8 * MIB  # one that has run something small; those that use more meet the reserve
SANDBOX_DESCRIPTORS = 12
SANDBOX_PROCESSES = 8  # with a few that its programs start
OWN_DESCRIPTORS = 512  # for connections, files and the server itself
EXECUTIONS_PER_CORE = 64  # most of a program's time passes with waiting
LEAST_EXECUTIONS = 256


class CapacityLimit(Struct):
    """A number of slots; `because` names the resource that limits it."""

    places: int
    because: str


def max_sandboxes(config: CapacityConfig) -> CapacityLimit:
    if config.sandboxes:
        return CapacityLimit(places=config.sandboxes, because="configured")
    return min(_host_limits(config), key=lambda room: room.places)


def max_executions(config: CapacityConfig) -> CapacityLimit:
    if config.executions:
        return CapacityLimit(places=config.executions, because="configured")
    cores = len(os.sched_getaffinity(0))
    return CapacityLimit(places=max(EXECUTIONS_PER_CORE * cores, LEAST_EXECUTIONS), because="cores")


def _host_limits(config: CapacityConfig) -> Iterator[CapacityLimit]:
    left = available_bytes()
    if left is not None:
        yield _make_limit((left - config.memory_reserve_bytes) // SANDBOX_BYTES, "memory")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY:
        yield _make_limit((files - OWN_DESCRIPTORS) // SANDBOX_DESCRIPTORS, "descriptors")
    yield _make_limit(_max_host_processes() * 3 // 4 // SANDBOX_PROCESSES, "processes")


def _make_limit(places: int, because: str) -> CapacityLimit:
    return CapacityLimit(places=max(places, 1), because=because)


def _max_host_processes() -> int:
    """The most processes that this host, this user, or the cgroups of this process can have."""
    known = [read_number("/proc/sys/kernel", name) for name in ("pid_max", "threads-max")]
    known += [read_number(each, "pids.max") for each in cgroup_directories("pids")]
    own = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    return min([each for each in (*known, own) if each is not None and each > 0], default=32768)


MEMORY_CHECK_SECONDS = 0.1  # between two checks for free memory, while a request waits
ADMITTED_AT_ONCE = 4  # that begin at one such check: their memory shows only at the next
MAX_RETRY_SECONDS = 300.0
WAIT_BUCKETS_SECONDS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0)
_SMOOTHING = 0.2  # the weight of the newest interval, among those between two ends
_KEPT_FOR_OTHERS = 10  # the part of all places that an owner with more than its share leaves free: one in so many
_LEAST_SLOTS_TO_SHARE = 2  # places: of these one is kept, and of a single one none can be


class Ticket:
    """One request that waits in an admission queue."""

    __slots__ = ("_gate", "_timer", "_turn", "owner", "since")

    def __init__(self, gate: AdmissionQueue, owner: str, seconds: float):
        loop = asyncio.get_running_loop()
        self.owner = owner
        self.since = loop.time()
        self._gate = gate
        self._turn: asyncio.Future[bool] = loop.create_future()
        self._timer = loop.call_later(seconds, gate.on_ticket_overdue, self)

    async def turn(self) -> bool:
        """Whether it got its slot; False if it was withdrawn. Raises Busy, ShuttingDown."""
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
        """Gives up waiting. Harmless when it has its slot."""
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


class AdmissionQueue:
    """`capacity` slots for `what`. The engine itself, whose owner is the empty string, never waits.

    `enough()` says whether there is enough of the resources that slots do not count; while it is False, no
    request enters.
    """

    def __init__(
        self, what: str, room: CapacityLimit, config: CapacityConfig, enough: Callable[[], bool] | None = None
    ):
        self.what = what
        self.room = room
        self.in_use = 0
        self.waiting = 0
        self.refused: Counter[str] = Counter()  # by the error's code
        self.waited_seconds = Histogram(WAIT_BUCKETS_SECONDS)  # of the requests that had to wait
        self._config = config
        self._enough = enough
        self._held: dict[str, int] = {}  # places, by owner
        self._lines: dict[str, deque[Ticket]] = {}  # in the order in which owners last got a slot
        self._known = ""  # the first owner that came
        self._is_shared = False  # whether there was another one, ever, or can be
        self._looking: asyncio.TimerHandle | None = None
        self._full_since = time.monotonic()  # or since a place was last given back while it was
        self._interval_seconds = 0.0  # between two that were, lately
        self._closed = False

    # -- to enter, and to leave

    def enter_now(self, owner: str) -> bool:
        """Takes a slot if there is one for which no earlier request waits."""
        if not owner or (owner not in self._lines and self._looking is None and self._has_room(owner)):
            self._take_slot(owner)
            return True
        return False

    def check(self, owner: str) -> None:
        """Raises as `join_queue` does, if that would."""
        if owner and self._is_full and not self._has_slot(owner):
            self._check_queue_length(owner)

    def join_queue(self, owner: str) -> Ticket:
        """Raises QuotaExceeded where that owner has too many waiting already, Busy where all have, ShuttingDown."""
        if self._closed:
            raise errors.ShuttingDown("the host is shutting down")
        self._check_queue_length(owner)
        if self.waiting >= self._config.queued:
            self._displace_last_ticket()
        waiter = Ticket(self, owner, self._config.queue_seconds)
        self._lines.setdefault(owner, deque()).append(waiter)
        self.waiting += 1
        self._admit_next(1)  # there may be a slot that the waiting ones cannot have
        return waiter

    async def enter(self, owner: str) -> Slot:
        """Waits for a slot. Raises as `join_queue` does, and Busy after a time."""
        if not self.enter_now(owner):
            await self.join_queue(owner).turn()
        return Slot(self, owner)

    def leave(self, owner: str) -> None:
        """Gives one slot back."""
        if self._is_full:
            self._update_pace()
        self.in_use -= 1
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
        if self._lines:
            self._move_owner_back(owner)
            self._admit_next(ADMITTED_AT_ONCE)

    def take_back(self, owner: str, count: int) -> None:
        """Takes so many slots at once, without waiting. Raises Busy where that owner cannot have so many."""
        all_free = not self.in_use and count <= self.room.places  # then its share does not matter
        if count and owner and not all_free and not self._has_slot(owner, count):
            raise self._count_refusal(self._busy_error(owner))
        for _ in range(count):
            self._take_slot(owner)

    def share(self) -> None:
        """There are several owners, or can be: from now on some slots are kept for those that come later."""
        self._is_shared = True

    def refuse_owner(self, owner: str, why: Callable[[], errors.ClocheError]) -> None:
        """Refuses all waiting requests of that owner."""
        for waiter in list(self._lines.get(owner, ())):
            self.forget(waiter)
            waiter.refuse(why())

    def close(self) -> None:
        """Refuses all waiting requests."""
        self._closed = True
        for waiter in list(self._all_tickets()):
            self.forget(waiter)
            waiter.refuse(errors.ShuttingDown("the host is shutting down"))

    # -- reports

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
        """Whether some requests that come now would have to wait."""
        return self._is_full or self.waiting > 0 or (self._enough is not None and not self._enough())

    def slots_held_by(self, owner: str) -> int:
        return self._held.get(owner, 0)

    # -- for waiting requests

    def forget(self, waiter: Ticket) -> None:
        line = self._lines.get(waiter.owner)
        if line is not None and waiter in line:
            line.remove(waiter)
            self.waiting -= 1
            if not line:
                del self._lines[waiter.owner]
            self._schedule_check()

    def on_ticket_overdue(self, waiter: Ticket) -> None:
        if waiter.waits:
            self.forget(waiter)
            self.waited_seconds.observe(asyncio.get_running_loop().time() - waiter.since)
            waiter.refuse(self._count_refusal(self._busy_error(waiter.owner)))

    # -- inside

    def _take_slot(self, owner: str) -> None:
        self.in_use += 1
        self._held[owner] = self._held.get(owner, 0) + 1
        if self.in_use == self.room.places:
            self._full_since = time.monotonic()
        if owner != self._known and owner and not self._is_shared:
            self._is_shared = bool(self._known)
            self._known = self._known or owner

    def _has_room(self, owner: str) -> bool:
        return self._has_slot(owner) and (self._enough is None or self._enough())

    def _has_slot(self, owner: str, count: int = 1) -> bool:
        """Whether there are so many slots for that owner.

        The last ones are for owners that have less than their share: else one owner could keep all others out.
        """
        free = self.room.places - self.in_use - (count - 1)  # when it comes to the last of them
        if free > self._kept_for_others:
            return True
        if free <= 0 or not self._kept_for_others:
            return free > 0
        owners = max(len(self._held.keys() | {owner}), 2)
        return self.slots_held_by(owner) + count - 1 < self.room.places // owners

    @property
    def _kept_for_others(self) -> int:
        if not self._is_shared or self.room.places < _LEAST_SLOTS_TO_SHARE:
            return 0
        return max(self.room.places // _KEPT_FOR_OTHERS, 1)

    @property
    def _is_full(self) -> bool:
        return self.in_use >= self.room.places - self._kept_for_others

    def _update_pace(self) -> None:
        now = time.monotonic()
        passed, self._full_since = now - self._full_since, now
        self._interval_seconds += _SMOOTHING * (passed - self._interval_seconds)

    def _admit_next(self, most: int) -> None:
        """Admits waiting requests: first of the owner with the fewest slots, then of the one that waits longer."""
        while self._lines and most and (owner := self._next_owner()) is not None:
            waiter = self._lines[owner][0]
            self.forget(waiter)
            if not waiter.waits:  # it was called off at this very moment, and has not yet said so
                continue
            self._move_owner_back(owner)
            self._take_slot(owner)
            self.waited_seconds.observe(asyncio.get_running_loop().time() - waiter.since)
            waiter.admit()
            most -= 1
        self._schedule_check()

    def _move_owner_back(self, owner: str) -> None:
        """An owner that had a slot just now comes after those that have as few."""
        if owner in self._lines:
            self._lines[owner] = self._lines.pop(owner)

    def _next_owner(self) -> str | None:
        if self._enough is not None and not self._enough():
            return None
        return min((each for each in self._lines if self._has_slot(each)), key=self.slots_held_by, default=None)

    def _schedule_check(self) -> None:
        """Schedules a check of the memory: unlike a freed slot, freed memory is not announced."""
        if self._lines and self._looking is None and self._enough is not None:
            self._looking = asyncio.get_running_loop().call_later(MEMORY_CHECK_SECONDS, self._admit_after_check)
        elif not self._lines and self._looking is not None:
            self._looking.cancel()
            self._looking = None

    def _admit_after_check(self) -> None:
        self._looking = None
        self._admit_next(ADMITTED_AT_ONCE)

    def _check_queue_length(self, owner: str) -> None:
        own = len(self._lines.get(owner, ()))
        if own >= self._config.queued_per_owner:
            raise self._count_refusal(self._queue_quota_error(owner, own))
        if self.waiting >= self._config.queued and own + 1 >= len(self._longest_line()):
            raise self._count_refusal(self._busy_error(owner))

    def _displace_last_ticket(self) -> None:
        """All lines together are full: makes room for an owner that has fewer waiting than another has."""
        last = self._longest_line()[-1]
        self.forget(last)
        last.refuse(self._count_refusal(self._busy_error(last.owner)))

    def _longest_line(self) -> Sequence[Ticket]:
        return max(self._lines.values(), key=len, default=())

    def _all_tickets(self) -> Iterator[Ticket]:
        for line in self._lines.values():
            yield from line

    # -- refusals

    def _count_refusal(self, error: errors.ClocheError) -> errors.ClocheError:
        self.refused[error.code] += 1
        return error

    def _busy_error(self, owner: str) -> errors.Busy:
        seconds = self._retry_seconds(owner)
        if self._has_slot(owner) and self._enough is not None and not self._enough():
            why = "this host has too little memory left"
        else:
            why = f"this host has as many {self.what} as it can"  # how many is for admins to know
        return errors.Busy(f"{why}: try again in {math.ceil(seconds)} s", retry_after_seconds=seconds)

    def _queue_quota_error(self, owner: str, count: int) -> errors.QuotaExceeded:
        seconds = self._retry_seconds(owner)
        return errors.QuotaExceeded(
            f"{count} requests of yours wait already for {self.what}, as many as one may have waiting here: try again "
            f"in {math.ceil(seconds)} s",
            retry_after_seconds=seconds,
        )

    def _retry_seconds(self, owner: str) -> float:
        """Estimates that owner's wait, at the pace at which slots were freed lately."""
        own = len(self._lines.get(owner, ())) + 1
        ahead = min(own * len(self._lines.keys() | {owner}), self.waiting + 1)
        pace = max(self._interval_seconds, time.monotonic() - self._full_since)
        return min(max(ahead * pace, 1.0), MAX_RETRY_SECONDS)


class Slot:
    """The slot of one sandbox: from before its cell is made until nothing is left of it."""

    __slots__ = ("_gate", "_given_back", "_owner")

    def __init__(self, gate: AdmissionQueue, owner: str):
        self._gate = gate
        self._owner = owner
        self._given_back = False

    def leave(self, *_: object) -> None:
        """Only the first call counts."""
        if not self._given_back:
            self._given_back = True
            self._gate.leave(self._owner)


# Free memory of this host, read so seldom that the check costs nothing.

FRESH_MEMORY_SECONDS = 0.1
AMPLE_FACTOR = 2  # times the reserve: with less left, idle cells are released first


class HostMemory:
    """Free memory, against the reserve that is to be kept free.

    It goes by free memory, and not by memory pressure (/proc/pressure): a sandbox that thrashes against its own
    limit would raise that for all.
    """

    def __init__(self, reserve_bytes: int):
        self.reserve_bytes = reserve_bytes
        self._looked_at = 0.0
        self._left_bytes: int | None = None

    @property
    def left_bytes(self) -> int | None:
        """As of a moment ago; None where this host does not tell."""
        now = time.monotonic()
        if now - self._looked_at > FRESH_MEMORY_SECONDS:
            self._looked_at, self._left_bytes = now, available_bytes()
        return self._left_bytes

    def enough(self) -> bool:
        """Whether a sandbox may begin."""
        left = self.left_bytes
        return left is None or left >= self.reserve_bytes

    def ample(self) -> bool:
        """Whether cells may be kept waiting."""
        left = self.left_bytes
        return left is None or left >= AMPLE_FACTOR * self.reserve_bytes


# Lockout of owners that are being erased: nothing is made for them, nor any earlier request of theirs.

OnLockout = Callable[[str], Awaitable[None]]


class OwnerLockout:
    def __init__(self) -> None:
        self._now: Counter[str] = Counter()
        self._times: Counter[str] = Counter()  # that each was
        self._endings: list[OnLockout] = []

    def add_listener(self, ending: OnLockout) -> None:
        """Registers a callback for each owner that is locked out: it returns when its work for them has ended."""
        self._endings.append(ending)

    def begin(self, owner: str) -> None:
        self._now[owner] += 1
        self._times[owner] += 1

    async def end_work(self, owner: str) -> None:
        """Returns when no work goes on for them that outlives requests."""
        await asyncio.gather(*(ending(owner) for ending in self._endings))

    def end(self, owner: str) -> None:
        """Admits them again; earlier requests of theirs are still refused."""
        self._now[owner] -= 1

    def begun(self, owner: str) -> int:
        """A number for `check`, for callers that begin work for them. Raises Unauthenticated."""
        if self._now[owner] > 0:
            raise owner_erased_error()
        return self._times[owner]

    def check(self, owner: str, begun: int) -> None:
        """Raises Unauthenticated if they were shut out since then."""
        if self._times[owner] != begun:
            raise owner_erased_error()


def owner_erased_error() -> errors.Unauthenticated:
    return errors.Unauthenticated("this key is no longer valid: all that belonged to its owner was removed")


# Capacity of this host: slots for sandboxes, slots for executions, and memory.


class ExecutionSlots:
    """The execution slots of one sandbox. While it is paused its programs are frozen, and it holds none."""

    def __init__(self, gate: AdmissionQueue, owner: str):
        self._gate = gate
        self._owner = owner
        self._count = 0
        self._resting = False

    def check(self) -> None:
        """Raises Busy or QuotaExceeded where one more would be refused at once: before an answer has begun."""
        self._gate.check(self._owner)

    def enter_now(self) -> bool:
        if self._gate.enter_now(self._owner):
            self._count_entered()
            return True
        return False

    def join_queue(self) -> Ticket:
        """Raises as `AdmissionQueue.join_queue` does."""
        return self._gate.join_queue(self._owner)

    async def enter(self, waiter: Ticket) -> bool:
        """Whether its turn has come; False if it was withdrawn. Raises Busy, ShuttingDown."""
        if not await waiter.turn():
            return False
        self._count_entered()
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

    def reclaim_slots(self) -> None:
        """Raises Busy where there is no room now for all executions that would go on."""
        if self._resting:
            self._gate.take_back(self._owner, self._count)
            self._resting = False

    def _count_entered(self) -> None:
        self._count += 1
        if self._resting:
            self._gate.leave(self._owner)


class Admission:
    """The admission queues, the memory check and the lockouts of one engine."""

    def __init__(self, config: CapacityConfig):
        self._cores = len(os.sched_getaffinity(0))
        self.lockout = OwnerLockout()
        self.memory = HostMemory(config.memory_reserve_bytes)
        self.sandboxes = AdmissionQueue("sandboxes", max_sandboxes(config), config, self.memory.enough)
        self.executions = AdmissionQueue("running executions", max_executions(config), config)

    @property
    def capacity_limits(self) -> dict[str, object]:
        """The limits as computed or configured, as fields for a log line."""
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
        """Makes nothing for that owner until `shut_out.end`; their waiting requests fail with the reason."""
        self.lockout.begin(owner)
        for gate in (self.sandboxes, self.executions):
            gate.refuse_owner(owner, owner_erased_error)

    def close(self) -> None:
        """All waiting requests fail: the host is shutting down."""
        self.sandboxes.close()
        self.executions.close()
