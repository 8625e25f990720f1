"""A leg's happenings, one item after the other: upstreams may send several at once, and clients read them in a row."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator

from cloche import errors
from cloche.gateway.happenings import Closed, Finished, Happening


class InOrder:
    """An iterator over a leg that can be drained: what code is asked for is known to be whole before any of it runs."""

    def __init__(self, leg: AsyncGenerator[Happening, None]):
        self._leg = leg
        self._ready: deque[Happening] = deque()
        self._waiting: dict[int, list[Happening]] = {}  # by item, in the order in which they opened
        self._current: int | None = None
        self.finished: Finished | None = None

    def __aiter__(self) -> InOrder:
        return self

    async def __anext__(self) -> Happening:
        while not self._ready:
            if self.finished is not None:
                raise StopAsyncIteration
            self._take(await self._next())
        return self._ready.popleft()

    async def drain(self) -> Finished:
        """Reads the leg to its end, for later. Raises what the leg raises."""
        while self.finished is None:
            self._take(await self._next())
        return self.finished

    async def _next(self) -> Happening:
        happening = await anext(self._leg, None)
        if happening is None:
            raise errors.UpstreamFailed("the model's answer broke off")
        return happening

    def _take(self, happening: Happening) -> None:
        coming = deque((happening,))
        while coming:
            coming.extendleft(reversed(self._place(coming.popleft())))

    def _place(self, happening: Happening) -> list[Happening]:
        """Those that waited for this one, if it was the last of its item."""
        if isinstance(happening, Finished):
            self.finished = happening
            for queued in self._waiting.values():
                self._ready.extend(queued)
            self._ready.append(happening)
        elif self._current in (None, happening.index):
            self._current = None if isinstance(happening, Closed) else happening.index
            self._ready.append(happening)
            if self._current is None and self._waiting:
                return self._waiting.pop(next(iter(self._waiting)))
        else:
            self._waiting.setdefault(happening.index, []).append(happening)
        return []
