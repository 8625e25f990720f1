"""Usage of owners and keys, as the API reports it."""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import Any, NamedTuple

import msgspec

from cloche import errors
from cloche.config.sections import KeyQuota, Quota
from cloche.model import GIB, MIB, Struct
from cloche.store.quotas import SpentUsage

# A sliding window: the sum of amounts counted lately.

SLOTS = 60


class SlidingWindow:
    """The sum of the amounts of the last `seconds`, exact to a sixtieth of that. Adding takes a microsecond.

    Times are of the monotonic clock: changes of the wall clock have no effect.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._slot_seconds = seconds / SLOTS
        self._slots = [0.0] * SLOTS
        self._newest = 0  # the number of the newest slot, since the clock began
        self._sum = 0.0

    def add(self, amount: float, at: float, now: float) -> None:
        """Counts it as of `at`, which may be a while ago."""
        self._advance_slots(now)
        slot = int(at / self._slot_seconds)
        if self._newest - SLOTS < slot <= self._newest:
            self._slots[slot % SLOTS] += amount
            self._sum += amount

    def count(self, now: float) -> None:
        """One more, now."""
        self._advance_slots(now)
        self._slots[self._newest % SLOTS] += 1
        self._sum += 1

    def sum(self, now: float) -> float:
        self._advance_slots(now)
        return max(self._sum, 0.0)

    def wait_seconds(self, most: float, now: float) -> float:
        """After how long the sum is below `most`, should nothing be added."""
        self._advance_slots(now)
        left = self._sum
        if left < most:
            return 0.0
        oldest = self._newest - SLOTS + 1
        turn = oldest % SLOTS
        for age, amount in enumerate(self._slots[turn:] + self._slots[:turn]):
            left -= amount
            if left < most:
                return (oldest + age + SLOTS) * self._slot_seconds - now
        return self.seconds

    def merge_counts(self, other: SlidingWindow, now: float) -> None:
        """Adds the other window's counts."""
        other._advance_slots(now)
        self._advance_slots(now)
        self._slots = [mine + theirs for mine, theirs in zip(self._slots, other._slots, strict=True)]
        self._sum += other._sum

    def _advance_slots(self, now: float) -> None:
        newest = int(now / self._slot_seconds)
        if newest == self._newest:
            return
        for slot in range(max(self._newest, newest - SLOTS) + 1, newest + 1):
            self._sum -= self._slots[slot % SLOTS]
            self._slots[slot % SLOTS] = 0.0
        if newest - self._newest >= SLOTS:
            self._sum = 0.0  # and no rounding error lives on
        self._newest = newest


# The usage account of one owner or one key: current and recent use, checked against its quota.

MINUTE_SECONDS, HOUR_SECONDS = 60.0, 3600.0


class QuotaRate(NamedTuple):
    """One quota and the amount that is left of it."""

    name: str
    quota: int
    window_seconds: int | None
    left: int
    reset_seconds: int | None  # until there will be more, where time gives it


class QuotaAccount:
    """Usage and quota of one owner or key. Never waits and never touches a disk: every execution checks it."""

    def __init__(self, whose: str, quota: KeyQuota, refused: Counter[str] | None = None):
        """`refused` counts the refusals, by quota name."""
        self.allow(quota)
        self._refused: Counter[str] = Counter() if refused is None else refused
        self.sandboxes = 0
        self.memory_bytes = 0
        self.stored_bytes: int | None = None  # as it was counted last
        self.minute = SlidingWindow(MINUTE_SECONDS)
        self.hour = SlidingWindow(HOUR_SECONDS)
        self.unsaved_executions = 0
        self.unsaved_cpu_seconds = 0.0
        self._whose = whose

    def allow(self, quota: KeyQuota) -> None:
        """Sets the quota that holds from now on."""
        self.quota = quota
        self._limited = any(amount is not None for amount in msgspec.structs.astuple(quota))

    # -- may they?

    def check_sandbox(self, memory_bytes: int) -> None:
        """Raises QuotaExceeded unless there can be one more, with so much memory."""
        quota = self.quota
        if quota.sandboxes is not None and self.sandboxes >= quota.sandboxes:
            raise self._exceeded_error(
                "sandboxes", f"{self.sandboxes} of {quota.sandboxes} sandboxes are there", "kill one of them first"
            )
        if quota.memory_bytes is not None and self.memory_bytes + memory_bytes > quota.memory_bytes:
            used = f"{_format_bytes(self.memory_bytes)} of {_format_bytes(quota.memory_bytes)} are taken"
            raise self._exceeded_error(
                "memory_bytes",
                f"{used}, and this takes {_format_bytes(memory_bytes)}",
                "ask for less, or kill a sandbox first",
                partly=self.memory_bytes < quota.memory_bytes,
            )

    def check_execution(self, now: float) -> None:
        """Raises QuotaExceeded unless there can be one more now."""
        most = self.quota.executions_per_minute
        if most is not None and self.minute.sum(now) >= most:
            wait = self.minute.wait_seconds(most, now)
            raise self._exceeded_error(
                "executions_per_minute", f"{most} of {most} executions ran in a minute", wait=wait
            )
        self.check_cpu(now)

    def check_cpu(self, now: float) -> None:
        """Raises QuotaExceeded where all is used."""
        if self.is_out_of_cpu(now):
            most = self.quota.cpu_seconds_per_hour or 0.0
            used = f"{self.hour.sum(now):.0f} of {most:g} seconds of CPU were used in an hour"
            raise self._exceeded_error("cpu_seconds_per_hour", used, wait=self.hour.wait_seconds(most, now))

    def is_out_of_cpu(self, now: float) -> bool:
        most = self.quota.cpu_seconds_per_hour
        return most is not None and self.hour.sum(now) >= most

    def check_stored(self, more_bytes: int) -> None:
        """Raises QuotaExceeded unless so much more can be stored than was counted last."""
        most = getattr(self.quota, "stored_bytes", None)
        used = self.stored_bytes or 0
        if most is not None and (used + more_bytes > most or used >= most):
            more = f", and this would be {_format_bytes(more_bytes)} more" if more_bytes else ""
            raise self._exceeded_error(
                "stored_bytes",
                f"{_format_bytes(used)} of {_format_bytes(most)} are stored{more}",
                "remove snapshots, paused sandboxes, volumes, files, runs, responses or conversations first",
                partly=used < most,
            )

    def _exceeded_error(
        self, name: str, used: str, remedy: str = "", *, wait: float | None = None, partly: bool = False
    ) -> errors.QuotaExceeded:
        """`partly`: some is left, which is not enough."""
        self._refused[name] += 1
        never = getattr(self.quota, name) == 0  # time does not help, nor does anything that they could do
        if not never and wait is not None:
            remedy = f"wait {max(1, math.ceil(wait))} s"
        todo = "ask the operator for some" if never else f"{remedy}, or ask the operator for more"
        return errors.QuotaExceeded(
            f"the quota {name} of {self._whose} {'would be exceeded' if partly else 'is used up'}: {used}; {todo}",
            retry_after_seconds=None if never else wait,
        )

    # -- they do

    def count(self, now: float) -> None:
        """One more execution."""
        self.minute.count(now)
        self.unsaved_executions += 1

    def spend_cpu(self, cpu_seconds: float, now: float) -> None:
        self.hour.add(cpu_seconds, now, now)
        self.unsaved_cpu_seconds += cpu_seconds

    def replace_hour_usage(self, hour: SlidingWindow, now: float) -> None:
        """Replaces the last hour's CPU use by `hour`: that of all processes, without this one's unsaved part."""
        hour.add(self.unsaved_cpu_seconds, now, now)
        self.hour = hour

    def take_unsaved_usage(self) -> SpentUsage:
        """Returns the use since the last call, and resets it."""
        spent = SpentUsage(self.unsaved_executions, self.unsaved_cpu_seconds)
        self.unsaved_executions, self.unsaved_cpu_seconds = 0, 0.0
        return spent

    def merge_counts(self, other: QuotaAccount) -> None:
        """Adds the other account's counts to this one: its key was replaced by this one's."""
        now = time.monotonic()
        self.sandboxes += other.sandboxes
        self.memory_bytes += other.memory_bytes
        self.minute.merge_counts(other.minute, now)
        self.hour.merge_counts(other.hour, now)
        self.unsaved_executions += other.unsaved_executions
        self.unsaved_cpu_seconds += other.unsaved_cpu_seconds

    # -- what is told

    def quota_rates(self, prefix: str) -> list[QuotaRate]:
        """The amount left of each quota, where there are any; of stored bytes as counted last."""
        if not self._limited:
            return []
        quota, now, found = self.quota, time.monotonic(), []
        if quota.executions_per_minute is not None:
            found.append(_windowed_rate(prefix + "executions", quota.executions_per_minute, self.minute, now))
        if quota.cpu_seconds_per_hour is not None:
            found.append(_windowed_rate(prefix + "cpu-seconds", int(quota.cpu_seconds_per_hour), self.hour, now))
        if quota.sandboxes is not None:
            found.append(_current_rate(prefix + "sandboxes", quota.sandboxes, self.sandboxes))
        if quota.memory_bytes is not None:
            found.append(_current_rate(prefix + "memory-bytes", quota.memory_bytes, self.memory_bytes))
        if isinstance(quota, Quota) and quota.stored_bytes is not None and self.stored_bytes is not None:
            found.append(_current_rate(prefix + "stored-bytes", quota.stored_bytes, self.stored_bytes))
        return found


def _windowed_rate(name: str, most: int, window: SlidingWindow, now: float) -> QuotaRate:
    used = window.sum(now)
    reset = window.wait_seconds(used, now) if used else window.seconds
    return QuotaRate(name, most, int(window.seconds), max(most - math.ceil(used), 0), math.ceil(reset))


def _current_rate(name: str, most: int, used: int) -> QuotaRate:
    return QuotaRate(name, most, None, max(most - used, 0), None)


def _format_bytes(count: int) -> str:
    for unit, size in (("GiB", GIB), ("MiB", MIB)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"


class UsageAmounts(Struct):
    sandboxes: int  # that have a cell now
    memory_bytes: int  # that those may use, by their limits
    executions_last_minute: int
    executions: int  # in all
    cpu_seconds_last_hour: float
    cpu_seconds: float  # in all


class KeyUsage(UsageAmounts):
    key_id: str
    name: str
    quota: KeyQuota  # None is as much as there is


class OwnerUsage(UsageAmounts):
    owner: str
    stored_bytes: int
    stored: dict[str, int]  # the same by kind
    quota: Quota
    keys: list[KeyUsage]


def usage_amounts(account: QuotaAccount, hour: SpentUsage, in_all: SpentUsage) -> dict[str, Any]:
    """`hour`, `in_all`: by all processes of the data directory, in the last hour and since the beginning."""
    now = time.monotonic()
    return {
        "sandboxes": account.sandboxes,
        "memory_bytes": account.memory_bytes,
        "executions_last_minute": round(account.minute.sum(now)),
        "executions": in_all.executions,
        "cpu_seconds_last_hour": round(hour.cpu_seconds, 3),
        "cpu_seconds": round(in_all.cpu_seconds, 3),
    }
