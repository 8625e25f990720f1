"""How often something may happen."""

from __future__ import annotations

import time


class Pace:
    """So often at once, and so often in a second after that."""

    def __init__(self, most: int, per_second: float):
        self._most, self._per_second = most, per_second
        self._left, self._at = float(most), time.monotonic()

    def take(self) -> bool:
        """Whether it may happen now."""
        now = time.monotonic()
        self._left = min(self._most, self._left + (now - self._at) * self._per_second)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
