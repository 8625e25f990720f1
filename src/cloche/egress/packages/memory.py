"""What is asked for again and again, in memory: pages as they are kept, and what was made of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from cloche.egress.packages.threads import Threads

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
