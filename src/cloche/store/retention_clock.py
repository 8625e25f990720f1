"""The retention clock: a wall clock set forward by mistake must not expire files early."""

from __future__ import annotations

import time

DRIFT_SECONDS = 60.0  # more than that, all at once, and the clock was set
BELIEVED_SECONDS = 86400.0  # for that long a clock that was set forward must have been right


class RetentionClock:
    """The wall clock, but never ahead of the time that has passed since this process began."""

    def __init__(self) -> None:
        self._offset = time.time() - _passed()
        self._ahead = 0.0
        self._since = 0.0

    def now(self) -> float:
        """Returns a time that has surely passed. Behind the wall clock for a day after that was set forward."""
        passed = _passed()
        ahead = time.time() - self._offset - passed
        if ahead > DRIFT_SECONDS and not self._is_believed(ahead, passed):
            return self._offset + passed
        self._offset += max(ahead, 0.0)
        return self._offset + passed + min(ahead, 0.0)

    def _is_believed(self, ahead: float, passed: float) -> bool:
        if abs(ahead - self._ahead) > DRIFT_SECONDS:
            self._ahead, self._since = ahead, passed
        return passed - self._since > BELIEVED_SECONDS


def _passed() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # which goes on while a machine sleeps


_clock = RetentionClock()


def retention_now() -> float:
    """See `RetentionClock.now`, for this process."""
    return _clock.now()
