"""Warnings that a program could cause as often as it likes: said once in a while."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, ParamSpec, TypeVar

from cloche.telemetry import log

SECONDS = 60.0


class Seldom:
    """Each event once a minute, with how many were left out since."""

    def __init__(self) -> None:
        self._said_at: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def warn(self, event: str, **fields: Any) -> None:
        now = time.monotonic()
        if now - self._said_at.get(event, -SECONDS) < SECONDS:
            self._left_out[event] = self._left_out.get(event, 0) + 1
            return
        self._said_at[event] = now
        left_out = self._left_out.pop(event, 0)
        log.warning(event, **fields, **({"left_out": left_out} if left_out else {}))


# Threads for what blocks: disks, hashes, large pages. Of their own, so that nobody else waits for packages.

THREADS = 4

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


class Threads:
    """Whoever makes it closes it."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, "cloche-packages")

    async def run(self, function: Callable[_Given, _Result], *given: _Given.args, **named: _Given.kwargs) -> _Result:
        """Who is cancelled meanwhile still waits for its end: it may use a descriptor that is closed next."""
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


# What is asked for again and again, in memory: pages as they are kept, and what was made of them.

PART = 2  # one thing may have half of the memory

_Value = TypeVar("_Value")
_Source = TypeVar("_Source")


class Memory(Generic[_Value]):
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
        if size_bytes * PART > self._limit_bytes:
            return
        self._held[key] = value, size_bytes
        self._bytes += size_bytes
        while self._bytes > self._limit_bytes:
            self._bytes -= self._held.popitem(last=False)[1][1]


class Made(Generic[_Source, _Value]):
    """What was made of something, for as long as that is the same."""

    def __init__(self, limit_bytes: int, threads: Threads):
        self._memory: Memory[tuple[_Source, _Value]] = Memory(limit_bytes)
        self._threads = threads

    async def of(self, source: _Source, key: Hashable, size_bytes: int, make: Callable[[_Source], _Value]) -> _Value:
        """It is made in a thread. `size_bytes` is about what it takes, with its source. Raises what `make` does."""
        known = self._memory.get(key)
        if known is not None and known[0] is source:
            return known[1]
        made = await self._threads.run(make, source)
        self._memory.put(key, (source, made), size_bytes)
        return made


# Why an index did not give what was asked for. The texts have no URLs in them: a program may read them.


class UpstreamError(Exception):
    """It does not answer, or not with what it should."""


class NotThere(UpstreamError):
    """It has no such thing, and says so."""


class OutOfReach(UpstreamError):
    """It names a host that nothing is fetched from."""


class HashMismatch(UpstreamError):
    """A file is not the one that its index describes."""


class NoRoom(UpstreamError):
    """A file can be passed on, but not kept."""
