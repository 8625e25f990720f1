"""Logins that fail are slowed down, per address they come from."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from cloche import errors

FREE = 10  # so many may fail in a row
EVERY_SECONDS = 3.0  # then one in so many seconds
MAX_ADDRESSES = 10_000


class TooManyLogins(errors.QuotaExceeded):
    code = "too_many_logins"


class Throttle:
    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._until: dict[str, float] = {}  # by address: when all that failed is forgotten; the oldest first

    def check(self, address: str) -> None:
        """Raises TooManyLogins."""
        ahead = self._until.get(address, 0.0) - self._clock() - (FREE - 1) * EVERY_SECONDS
        if ahead > 0:
            wait = math.ceil(ahead)
            raise TooManyLogins(f"too many logins have failed: try again in {wait} s", retry_after_seconds=wait)

    def failed(self, address: str) -> None:
        now = self._clock()
        until = max(self._until.pop(address, now), now) + EVERY_SECONDS
        if len(self._until) >= MAX_ADDRESSES:
            del self._until[next(iter(self._until))]
        self._until[address] = until
