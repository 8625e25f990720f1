"""How many programs one user may start in a minute, where the operator sets a limit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

from cloche.api.librechat.identity import Caller
from cloche.api.librechat.replies import Refusal

SWEEP_ENTRIES = 10_000  # users of whom something is remembered, before those who paused are forgotten


class _Left(NamedTuple):
    programs: float
    at: float


class Pace:
    """A bucket of `per_minute` programs for each user, which fills evenly. 0: no limit, and nothing is counted."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic):
        self._most = per_minute
        self._clock = clock
        self._left: dict[Caller, _Left] = {}

    def take(self, caller: Caller) -> None:
        """Counts one program of the caller's. Raises Refusal (429) that says when the next is possible."""
        if not self._most:
            return
        now = self._clock()
        left = self._filled(self._left.get(caller), now)
        if left < 1:
            raise _too_fast(self._most, math.ceil((1 - left) * 60 / self._most))
        if len(self._left) >= SWEEP_ENTRIES:
            self._sweep(now)
        self._left[caller] = _Left(left - 1, now)

    def _filled(self, left: _Left | None, now: float) -> float:
        return self._most if left is None else min(self._most, left.programs + (now - left.at) * self._most / 60)

    def _sweep(self, now: float) -> None:
        """Forgets whose bucket is full again."""
        self._left = {who: left for who, left in self._left.items() if self._filled(left, now) < self._most}


def _too_fast(most: int, seconds: int) -> Refusal:
    wait = max(1, seconds)
    unit = "second" if wait == 1 else "seconds"
    return Refusal(
        429,
        "rate_limited",
        f"Too many CodeAPI execution requests. Please retry in {wait} {unit}.",
        {
            "retry-after": str(wait),
            "ratelimit-limit": str(most),
            "ratelimit-remaining": "0",
            "ratelimit-reset": str(wait),
        },
        retry_after_seconds=wait,
    )
