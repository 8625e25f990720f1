"""Owners of whom everything is being removed: nothing is made for them meanwhile, nor what they asked for before."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from cloche import errors

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
