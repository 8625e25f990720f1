"""Cgroups that were still busy when they were to be removed, removed a moment later."""

from __future__ import annotations

import asyncio

from cloche.linux.cgroups import Parent

FIRST_SECONDS = 0.5
MAX_SECONDS = 30.0  # somebody who waits for the kernel itself (a disk that does not answer) dies when that is over


class Sweeper:
    """Looks again while there is something left, less and less often. Without it they would last as long as we do.

    A cell that was forked just when its zygote was killed, or its maker cancelled, takes a moment to die.
    """

    def __init__(self, parent: Parent):
        self._parent = parent
        self._pause_seconds = FIRST_SECONDS
        self._next: asyncio.TimerHandle | None = None
        parent.on_busy = self._sweep_later

    def close(self) -> None:
        self._parent.on_busy = None
        if self._next is not None:
            self._next.cancel()

    def _sweep_later(self) -> None:
        if self._next is None:
            self._next = asyncio.get_running_loop().call_later(self._pause_seconds, self._sweep)

    def _sweep(self) -> None:
        self._next = None
        if self._parent.sweep():
            self._pause_seconds = FIRST_SECONDS
        else:
            self._pause_seconds = min(2 * self._pause_seconds, MAX_SECONDS)
            self._sweep_later()
