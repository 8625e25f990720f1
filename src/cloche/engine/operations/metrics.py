"""Samples of a sandbox's resource use: a day of them, in a megabyte at most."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable

from cloche import errors
from cloche.engine.sandboxes.init_client import InitClient
from cloche.events import Ended
from cloche.isolation.base import CellStats
from cloche.model import Limits, Struct
from cloche.telemetry import Histogram

SAMPLE_SECONDS = 5.0
KEPT_SAMPLES_SECONDS = 26 * 3600.0  # the longest lifetime by default, and a little more
_MAX_SAMPLES = int(KEPT_SAMPLES_SECONDS / SAMPLE_SECONDS)
_DROPPED_AT_ONCE = _MAX_SAMPLES // 16
_MAX_REPEATED_SAMPLES = (
    12  # times in a row that one is taken for unchanged: the host itself may have taken memory from it
)


class Sample(Struct):
    """The resource use of a sandbox at one moment. Values that the host cannot tell are 0."""

    at: float  # since 1970
    cpu_percent: float  # of all that it may use, since the sample before
    memory_bytes: int  # without caches and without files
    cache_bytes: int  # of files that can be read again from elsewhere
    space_bytes: int  # of its writable space, and shared memory


_SAMPLE_WIDTH = len(Sample.__struct_fields__)


class SandboxMeter:
    """Samples one sandbox until `close`.

    `read` must be cheap: it is called on the event loop. Where it has no memory figure, `ask` is used instead.
    `on_cpu` gets each second of CPU once, at the latest at `close`, when `cpu_seconds` gives the last ones.
    """

    def __init__(
        self,
        read: Callable[[], CellStats],
        ask: Callable[[], Awaitable[CellStats]],
        limits: Limits,
        cpu_seconds: Callable[[], float | None] = lambda: None,
        on_cpu: Callable[[float], None] = lambda seconds: None,
    ):
        self._read = read
        self._ask = ask
        self._cpu_seconds = cpu_seconds
        self._on_cpu = on_cpu
        self._told = 0.0  # by executions
        self._cpus = limits.cpus
        self._rows = array("d")  # five numbers per sample: a tenth of the size of objects
        self._processes: int | None = None  # at the last sample
        self._last = (time.monotonic(), 0.0)
        self._asking: asyncio.Task[None] | None = None
        self._ran_until: float | None = None  # the CPU seconds at the last sample
        self._unread = 0  # samples since it was last read
        self._timer = asyncio.get_running_loop().call_later(SAMPLE_SECONDS, self._take_sample)

    async def samples_between(self, start: float | None = None, end: float | None = None) -> list[Sample]:
        """The samples from `start` to `end`, both included, the oldest first. Raises Gone."""
        await self._take_first_sample()
        samples = (_sample_at_row(self._rows, row) for row in range(0, len(self._rows), _SAMPLE_WIDTH))
        return [each for each in samples if (start is None or each.at >= start) and (end is None or each.at <= end)]

    async def latest_sample(self) -> Sample:
        """The newest one there is. Raises Gone."""
        await self._take_first_sample()
        return _sample_at_row(self._rows, len(self._rows) - _SAMPLE_WIDTH)

    def recent(self, count: int) -> list[Sample]:
        """The newest `count` samples, the oldest first. Never waits: a sandbox that is seconds old may have none."""
        first = max(len(self._rows) - count * _SAMPLE_WIDTH, 0)
        return [_sample_at_row(self._rows, row) for row in range(first, len(self._rows), _SAMPLE_WIDTH)]

    @property
    def processes(self) -> int | None:
        """How many at the last sample, init and kernels among them; None where this host does not count them."""
        return self._read().processes if self._processes is None else self._processes

    def add_execution(self, ended: Ended) -> None:
        """Adds the CPU of an ended execution, which counts where the host measures none."""
        self._told += ended.usage.cpu_seconds

    def close(self) -> None:
        """May be called again."""
        self._timer.cancel()
        measured = self._cpu_seconds()
        self._count_cpu_percent(time.monotonic(), self._told if measured is None else measured)
        if self._asking is not None:
            self._asking.cancel()

    async def _take_first_sample(self) -> None:
        """Takes a sample for a sandbox that is only seconds old."""
        if not self._rows:
            stats = self._read()
            self._add_stats(stats if stats.memory_bytes is not None else await self._ask())

    def _take_sample(self) -> None:
        ran, self._ran_until = self._ran_until, self._cpu_seconds()
        if self._rows and ran is not None and ran == self._ran_until and self._unread < _MAX_REPEATED_SAMPLES:
            self._repeat_last_sample()
        elif (stats := self._read()).memory_bytes is not None:
            self._add_stats(stats)
        elif self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._ask_and_keep())
        self._timer = asyncio.get_running_loop().call_later(SAMPLE_SECONDS, self._take_sample)

    async def _ask_and_keep(self) -> None:
        try:
            self._add_stats(await self._ask())
        except errors.ClocheError:
            pass  # it is ending, or was replaced: there is nothing to sample, and its next use reports it

    def _repeat_last_sample(self) -> None:
        """Nothing ran, so nothing has changed. Most sandboxes wait most of the time, and reading takes long."""
        self._unread += 1
        self._last = (time.monotonic(), self._last[1])
        self._append_row(time.time(), 0.0, *self._rows[2 - _SAMPLE_WIDTH :])

    def _add_stats(self, stats: CellStats) -> None:
        self._processes, self._unread = stats.processes, 0
        files = stats.file_bytes or 0
        space = min(stats.shared_bytes or 0, files)
        used, percent = stats.memory_bytes or 0, self._count_cpu_percent(time.monotonic(), stats.cpu_seconds or 0.0)
        self._append_row(time.time(), percent, max(used - files, 0), files - space, space)

    def _append_row(self, *row: float) -> None:
        self._rows.extend(row)
        if len(self._rows) > _MAX_SAMPLES * _SAMPLE_WIDTH:
            del self._rows[: _DROPPED_AT_ONCE * _SAMPLE_WIDTH]

    def _count_cpu_percent(self, now: float, cpu_seconds: float) -> float:
        then, before = self._last
        self._last = (now, max(cpu_seconds, before))
        passed, used = max(now - then, 0.001) * self._cpus, max(cpu_seconds - before, 0.0)
        if used:
            self._on_cpu(used)
        return min(used / passed * 100.0, 100.0)


def _sample_at_row(rows: array[float], row: int) -> Sample:
    at, cpu, memory, cache, space = rows[row : row + _SAMPLE_WIDTH]
    return Sample(at=at, cpu_percent=cpu, memory_bytes=int(memory), cache_bytes=int(cache), space_bytes=int(space))


async def measure_inside(guest: InitClient) -> CellStats:
    """The measurements of init itself, for hosts without cgroups. Raises Gone, ProtocolViolation."""
    told = (await guest.request("usage")).ok
    memory, space, cpu = (
        _check_measurement(told.get(name)) for name in ("memory_bytes", "space_bytes", "cpu_milliseconds")
    )
    return CellStats(memory_bytes=memory + space, file_bytes=space, shared_bytes=space, cpu_seconds=cpu / 1000)


def _check_measurement(told: object) -> int:
    if type(told) is not int or not 0 <= told < 1 << 50:
        raise errors.ProtocolViolation("the guest's init sent a measurement that is no such number")
    return told


# Counters of an engine: sandboxes and executions, their ends, and their durations.

DURATION_BUCKETS_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0)
WORKED_OUTCOMES = frozenset({"ok", "raised"})  # the program ran to an end of its own


class EngineCounters:
    """Numbers only, since the engine began. No ids and no owners: the operator may see all of it."""

    def __init__(self) -> None:
        self.created = 0
        self.not_created: Counter[str] = Counter()  # by the error's code
        self.ended: Counter[str] = Counter()  # by state
        self.executions: Counter[str] = Counter()  # by outcome
        self.execution_seconds = Histogram(DURATION_BUCKETS_SECONDS)
        self.creation_seconds = Histogram(DURATION_BUCKETS_SECONDS)
        self.last_creation_at = 0.0  # of the monotonic clock, as the next
        self.last_success_at = 0.0

    def sandbox_created(self, seconds: float) -> None:
        self.created += 1
        self.creation_seconds.observe(seconds)
        self.last_creation_at = time.monotonic()

    def execution_ended(self, ended: Ended) -> None:
        self.executions[ended.outcome] += 1
        self.execution_seconds.observe(ended.usage.wall_seconds)
        if ended.outcome in WORKED_OUTCOMES:
            self.last_success_at = time.monotonic()
