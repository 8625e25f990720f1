"""How many threads numerical libraries use.

The nursery imports them with one thread, since a process with threads cannot be forked safely. A kernel that turns
out to compute gets them back, between two cells; one that does not never pays for them.
"""

from __future__ import annotations

import os
import sys

BUSY_SECONDS = 0.25


class Threads:
    def __init__(self) -> None:
        self._restored = False

    def after(self, cpu_seconds: float) -> None:
        """A cell used that much CPU. The first busy one brings the threads back."""
        if self._restored or cpu_seconds < BUSY_SECONDS or "numpy" not in sys.modules:
            return
        self._restored = True
        try:
            import threadpoolctl  # type: ignore[import-not-found]
        except ImportError:
            return
        threadpoolctl.threadpool_limits(limits=len(os.sched_getaffinity(0)))
