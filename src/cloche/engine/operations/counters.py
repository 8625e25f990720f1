"""Counters of an engine: sandboxes and executions, their ends, and their durations."""

from __future__ import annotations

import time
from collections import Counter

from cloche.events import Ended
from cloche.telemetry import Histogram

DURATION_BUCKETS_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0)
WORKED_OUTCOMES = frozenset({"ok", "raised"})  # the program ran to an end of its own


class EngineCounters:
    """Numbers only, since the engine began. No ids and no owners: the operator may see all of it."""

    def __init__(self) -> None:
        self.created = 0
        self.not_created: Counter[str] = Counter()  # by the error's code
        self.ended: Counter[str] = Counter()  # by state
        self.executions: Counter[str] = Counter()  # by outcome
        self.execution_seconds = Histogram(DURATION_BUCKETS_SECONDS)
        self.creation_seconds = Histogram(DURATION_BUCKETS_SECONDS)
        self.last_creation_at = 0.0  # of the monotonic clock, as the next
        self.last_success_at = 0.0

    def sandbox_created(self, seconds: float) -> None:
        self.created += 1
        self.creation_seconds.observe(seconds)
        self.last_creation_at = time.monotonic()

    def execution_ended(self, ended: Ended) -> None:
        self.executions[ended.outcome] += 1
        self.execution_seconds.observe(ended.usage.wall_seconds)
        if ended.outcome in WORKED_OUTCOMES:
            self.last_success_at = time.monotonic()
