"""Rate-limited warnings, for events that a program could cause at will."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, ParamSpec, TypeVar

from cloche.telemetry import log

WARNING_SECONDS = 60.0


class RareWarnings:
    """Each event once a minute, with how many were left out since."""

    def __init__(self) -> None:
        self._said_at: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def warn_rarely(self, event: str, **fields: Any) -> None:
        now = time.monotonic()
        if now - self._said_at.get(event, -WARNING_SECONDS) < WARNING_SECONDS:
            self._left_out[event] = self._left_out.get(event, 0) + 1
            return
        self._said_at[event] = now
        left_out = self._left_out.pop(event, 0)
        log.warning(event, **fields, **({"left_out": left_out} if left_out else {}))


# Threads for blocking work: disks, hashes, large pages. A separate pool, so that no other work waits for
# packages.

PACKAGE_THREADS = 4

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


class PackageThreads:
    """The thread pool. Its maker closes it."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(PACKAGE_THREADS, "cloche-packages")

    async def run(self, function: Callable[_Given, _Result], *given: _Given.args, **named: _Given.kwargs) -> _Result:
        """Runs the function in a thread. A cancelled caller still waits for its end: it may use a descriptor closed
        next.
        """
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._pool, lambda: function(*given, **named))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({future})
            if not future.cancelled():
                future.exception()
            raise

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


# Frequently requested pages in memory, as they are kept and as they are served.

LARGEST_SHARE = 2  # one thing may have half of the memory

_Value = TypeVar("_Value")
_Source = TypeVar("_Source")


class LruMemory(Generic[_Value]):
    """The last that were used, of so many bytes together. For the loop's thread only."""

    def __init__(self, limit_bytes: int):
        self._limit_bytes = limit_bytes
        self._held: OrderedDict[Hashable, tuple[_Value, int]] = OrderedDict()
        self._bytes = 0

    def get(self, key: Hashable) -> _Value | None:
        if key not in self._held:
            return None
        self._held.move_to_end(key)
        return self._held[key][0]

    def put(self, key: Hashable, value: _Value, size_bytes: int) -> None:
        """Unless it is too large."""
        self._bytes -= self._held.pop(key, (None, 0))[1]
        if size_bytes * LARGEST_SHARE > self._limit_bytes:
            return
        self._held[key] = value, size_bytes
        self._bytes += size_bytes
        while self._bytes > self._limit_bytes:
            self._bytes -= self._held.popitem(last=False)[1][1]


class DerivedMemory(Generic[_Source, _Value]):
    """Values derived from a source, kept while the source is the same object."""

    def __init__(self, limit_bytes: int, threads: PackageThreads):
        self._memory: LruMemory[tuple[_Source, _Value]] = LruMemory(limit_bytes)
        self._threads = threads

    async def of(self, source: _Source, key: Hashable, size_bytes: int, make: Callable[[_Source], _Value]) -> _Value:
        """The value, made in a thread. `size_bytes` is its approximate size with its source. Raises as `make` does."""
        known = self._memory.get(key)
        if known is not None and known[0] is source:
            return known[1]
        made = await self._threads.run(make, source)
        self._memory.put(key, (source, made), size_bytes)
        return made


# Errors of package indexes. Their texts have no URLs in them: a program may read them.


class UpstreamError(Exception):
    """The index does not answer, or answers wrongly."""


class NotInIndex(UpstreamError):
    """The index answers that it has no such page or file."""


class ForbiddenIndexHost(UpstreamError):
    """It names a host that nothing is fetched from."""


class HashMismatch(UpstreamError):
    """A file is not the one that its index describes."""


class NoCacheRoom(UpstreamError):
    """A file can be passed on, but not kept."""
