"""The deadline of a sandbox: a lifetime by the monotonic clock, and a watch on changes of the wall clock.

The wall clock is used only to report the end of a lifetime.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from cloche.telemetry import log


class LifetimeTimer:
    """Calls `on_end` when it is over. It lasts at most `most_seconds` since it was made or began again."""

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
        """Starts anew. Returns its end, by the wall clock."""
        self._began_at = time.monotonic()
        return self.set(seconds)

    def set(self, seconds: float | None) -> float | None:
        """Ends so many seconds from now, at most after all that it can have. Returns its end, by the wall clock."""
        self.stop()
        if seconds is None:
            return None
        left = max(min(seconds, -self.over_seconds), 0.0)
        self._ends_at = time.monotonic() + left
        self.defer_deadline(left)
        return time.time() + left

    def defer_deadline(self, seconds: float) -> None:
        """`on_end` is called so much later; the reported end stays."""
        self._cancel_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._on_end)

    def stop(self) -> None:
        """It has no end until it is set again."""
        self._cancel_timer()
        self._ends_at = None

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


# Detects changes of the wall clock, so that deadlines in wall time can be corrected.

CLOCK_CHECK_SECONDS = 1.0
CLOCK_JUMP_SECONDS = 2.0  # less is drift, which does no harm


class WallClockWatch:
    """Calls `on_jump` after each change, from `open` until `close`."""

    def __init__(self, on_jump: Callable[[], None]):
        self._on_jump = on_jump
        self._difference = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def open(self) -> None:
        self._difference = time.time() - time.monotonic()
        self._schedule_check()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule_check(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(CLOCK_CHECK_SECONDS, self._check_clock)

    def _check_clock(self) -> None:
        self._schedule_check()
        jumped = time.time() - time.monotonic() - self._difference
        if abs(jumped) > CLOCK_JUMP_SECONDS:
            self._difference += jumped
            log.warning("clock.jumped", seconds=round(jumped))
            self._on_jump()
