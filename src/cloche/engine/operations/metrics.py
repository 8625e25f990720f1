"""What a sandbox uses, sampled while it lives: a day of it, in a megabyte at most."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable

from cloche import errors
from cloche.engine.sandboxes.init_client import Guest
from cloche.events import Ended
from cloche.isolation.base import CellStats
from cloche.model import Limits, Struct

EVERY_SECONDS = 5.0
KEPT_SECONDS = 26 * 3600.0  # the longest lifetime by default, and a little more
_MAX_SAMPLES = int(KEPT_SECONDS / EVERY_SECONDS)
_DROPPED_AT_ONCE = _MAX_SAMPLES // 16
_AS_BEFORE = 12  # times in a row that one is taken for unchanged: the host itself may have taken memory from it


class Sample(Struct):
    """What a sandbox used at one moment. What the host cannot tell is 0."""

    at: float  # since 1970
    cpu_percent: float  # of all that it may use, since the sample before
    memory_bytes: int  # without caches and without files
    cache_bytes: int  # of files that can be read again from elsewhere
    space_bytes: int  # of its writable space, and shared memory


_WIDTH = len(Sample.__struct_fields__)


class Meter:
    """Samples one sandbox until `close`.

    `read` must be cheap: it is called on the event loop. Where it knows nothing of memory, `ask` is asked instead.
    `on_cpu` hears of each second of CPU once, at the latest at `close`: the last ones are what `cpu_seconds` says then.
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
        self._rows = array("d")  # five numbers per sample: a tenth of what objects would take
        self._processes: int | None = None  # at the last sample
        self._last = (time.monotonic(), 0.0)
        self._asking: asyncio.Task[None] | None = None
        self._ran_until: float | None = None  # the CPU seconds at the last sample
        self._unread = 0  # samples since it was last read
        self._timer = asyncio.get_running_loop().call_later(EVERY_SECONDS, self._tick)

    async def between(self, start: float | None = None, end: float | None = None) -> list[Sample]:
        """The samples from `start` to `end`, both included, the oldest first. Raises Gone."""
        await self._take_first()
        samples = (_sample(self._rows, row) for row in range(0, len(self._rows), _WIDTH))
        return [each for each in samples if (start is None or each.at >= start) and (end is None or each.at <= end)]

    async def latest(self) -> Sample:
        """The newest one there is. Raises Gone."""
        await self._take_first()
        return _sample(self._rows, len(self._rows) - _WIDTH)

    def recent(self, count: int) -> list[Sample]:
        """The newest so many, the oldest first. Never waits: of a sandbox that is seconds old there may be none."""
        first = max(len(self._rows) - count * _WIDTH, 0)
        return [_sample(self._rows, row) for row in range(first, len(self._rows), _WIDTH)]

    @property
    def processes(self) -> int | None:
        """How many at the last sample, init and kernels among them; None where this host does not count them."""
        return self._read().processes if self._processes is None else self._processes

    def heeding(self, then: Callable[[Ended], None]) -> Callable[[Ended], None]:
        """For executions to tell of their end. What they say of their CPU counts where nobody else knows any."""

        def hear(ended: Ended) -> None:
            self._told += ended.usage.cpu_seconds
            then(ended)

        return hear

    def close(self) -> None:
        """May be called again."""
        self._timer.cancel()
        measured = self._cpu_seconds()
        self._cpu_percent(time.monotonic(), self._told if measured is None else measured)
        if self._asking is not None:
            self._asking.cancel()

    async def _take_first(self) -> None:
        """Whoever asks of a sandbox that is seconds old gets an answer too."""
        if not self._rows:
            stats = self._read()
            self._keep(stats if stats.memory_bytes is not None else await self._ask())

    def _tick(self) -> None:
        ran, self._ran_until = self._ran_until, self._cpu_seconds()
        if self._rows and ran is not None and ran == self._ran_until and self._unread < _AS_BEFORE:
            self._keep_as_before()
        elif (stats := self._read()).memory_bytes is not None:
            self._keep(stats)
        elif self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._ask_and_keep())
        self._timer = asyncio.get_running_loop().call_later(EVERY_SECONDS, self._tick)

    async def _ask_and_keep(self) -> None:
        try:
            self._keep(await self._ask())
        except errors.ClocheError:
            pass  # it is ending, or is not what it was: there is nothing to sample, and whoever uses it will hear

    def _keep_as_before(self) -> None:
        """Nothing ran in it, so nothing has changed. Most sandboxes wait most of the time, and reading takes long."""
        self._unread += 1
        self._last = (time.monotonic(), self._last[1])
        self._add(time.time(), 0.0, *self._rows[2 - _WIDTH :])

    def _keep(self, stats: CellStats) -> None:
        self._processes, self._unread = stats.processes, 0
        files = stats.file_bytes or 0
        space = min(stats.shared_bytes or 0, files)
        used, percent = stats.memory_bytes or 0, self._cpu_percent(time.monotonic(), stats.cpu_seconds or 0.0)
        self._add(time.time(), percent, max(used - files, 0), files - space, space)

    def _add(self, *row: float) -> None:
        self._rows.extend(row)
        if len(self._rows) > _MAX_SAMPLES * _WIDTH:
            del self._rows[: _DROPPED_AT_ONCE * _WIDTH]

    def _cpu_percent(self, now: float, cpu_seconds: float) -> float:
        then, before = self._last
        self._last = (now, max(cpu_seconds, before))
        passed, used = max(now - then, 0.001) * self._cpus, max(cpu_seconds - before, 0.0)
        if used:
            self._on_cpu(used)
        return min(used / passed * 100.0, 100.0)


def _sample(rows: array[float], row: int) -> Sample:
    at, cpu, memory, cache, space = rows[row : row + _WIDTH]
    return Sample(at=at, cpu_percent=cpu, memory_bytes=int(memory), cache_bytes=int(cache), space_bytes=int(space))


async def measured_inside(guest: Guest) -> CellStats:
    """What init itself can tell, for hosts without cgroups. Raises Gone, ProtocolViolation."""
    told = (await guest.request("usage")).ok
    memory, space, cpu = (_number(told.get(name)) for name in ("memory_bytes", "space_bytes", "cpu_milliseconds"))
    return CellStats(memory_bytes=memory + space, file_bytes=space, shared_bytes=space, cpu_seconds=cpu / 1000)


def _number(told: object) -> int:
    if type(told) is not int or not 0 <= told < 1 << 50:
        raise errors.ProtocolViolation("the guest's init sent a measurement that is no such number")
    return told
