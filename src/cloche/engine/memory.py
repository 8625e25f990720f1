"""Whether this host has memory for more, looked up so seldom that asking costs nothing."""

from __future__ import annotations

import time

from cloche.linux.host_memory import available_bytes

FRESH_SECONDS = 0.1
AMPLE = 2  # times the reserve: with less left, what only waits to be used is let go of first


class Memory:
    """What is left of memory, against what is to be kept free.

    It goes by what is left, and not by how long programs wait for memory (/proc/pressure): a sandbox that thrashes
    against its own limit would raise that for everybody.
    """

    def __init__(self, reserve_bytes: int):
        self.reserve_bytes = reserve_bytes
        self._looked_at = 0.0
        self._left_bytes: int | None = None

    @property
    def left_bytes(self) -> int | None:
        """A moment ago; None where this host does not tell."""
        now = time.monotonic()
        if now - self._looked_at > FRESH_SECONDS:
            self._looked_at, self._left_bytes = now, available_bytes()
        return self._left_bytes

    def enough(self) -> bool:
        """Whether a sandbox may begin."""
        left = self.left_bytes
        return left is None or left >= self.reserve_bytes

    def ample(self) -> bool:
        """Whether cells may be kept waiting."""
        left = self.left_bytes
        return left is None or left >= AMPLE * self.reserve_bytes
