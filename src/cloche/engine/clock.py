"""A time limit that stands still while somebody else's time passes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Clock:
    """Runs from now on, and calls `on_end()` once `seconds` have passed in which nobody held it."""

    def __init__(self, seconds: float, on_end: Callable[[], None]):
        self._left_seconds = seconds
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._holds = 0
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False
        self._run()

    def hold(self) -> None:
        """Until `go_on` was called as often as this."""
        self._holds += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._left_seconds -= self._loop.time() - self._since

    def go_on(self) -> None:
        self._holds = max(self._holds - 1, 0)
        self._run()

    def stop(self) -> None:
        """For good."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _run(self) -> None:
        if not self._stopped and not self._holds and self._timer is None:
            self._since = self._loop.time()
            self._timer = self._loop.call_later(max(self._left_seconds, 0.0), self._end)

    def _end(self) -> None:
        self._stopped = True
        self._on_end()
