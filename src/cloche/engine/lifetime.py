"""How long a sandbox may run, by a clock that nobody sets. The wall clock only says when its end will be."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class Lifetime:
    """Calls `on_end` when it is over. It can last for `most_seconds` in all, since it was made or began again."""

    def __init__(self, most_seconds: float, on_end: Callable[[], None]):
        self._most_seconds = most_seconds
        self._on_end = on_end
        self._began_at = time.monotonic()
        self._ends_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def left_seconds(self) -> float | None:
        """None where it has no end."""
        return None if self._ends_at is None else max(self._ends_at - time.monotonic(), 0.0)

    @property
    def over_seconds(self) -> float:
        """For how long it has lasted beyond the most; negative before that."""
        return time.monotonic() - self._began_at - self._most_seconds

    def begin(self, seconds: float | None) -> float | None:
        """As if it was made now. When its end is, by the wall clock."""
        self._began_at = time.monotonic()
        return self.set(seconds)

    def set(self, seconds: float | None) -> float | None:
        """Ends so many seconds from now, at most after all that it can have. When that is, by the wall clock."""
        self.stop()
        if seconds is None:
            return None
        left = max(min(seconds, -self.over_seconds), 0.0)
        self._ends_at = time.monotonic() + left
        self.defer(left)
        return time.time() + left

    def defer(self, seconds: float) -> None:
        """`on_end` is called so much later; what is said of its end stays."""
        self._cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._on_end)

    def stop(self) -> None:
        """It has no end until it is set again."""
        self._cancel()
        self._ends_at = None

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
