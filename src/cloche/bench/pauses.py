"""Sandboxes that are paused with their memory, and resumed."""

from __future__ import annotations

import time
from collections.abc import Callable

from cloche.bench import programs
from cloche.bench.lab import SETTLE_SECONDS, Lab, answered
from cloche.events import Run
from cloche.sdk.sandbox import Sandbox

WARM_RUNS = 3  # after each resume


def pauses(lab: Lab) -> None:
    """One sandbox, again and again: paused, at rest for a moment, resumed; then warm executions to compare with."""
    with lab.with_pool(), Sandbox() as box:
        answered(box.run(programs.ONE))
        for _ in range(lab.counts.fast):
            with lab.book.attempt("pause"):
                began = time.perf_counter()
                box.pause()
                lab.book.add("pause", time.perf_counter() - began)
            time.sleep(SETTLE_SECONDS)
            _time(lab, "resume_one", lambda: _resumed(box))
            for _ in range(WARM_RUNS):
                _time(lab, "resumed_warm", lambda: box.run(programs.ONE))


def _resumed(box: Sandbox) -> Run:
    box.resume()
    return box.run(programs.ONE)


def _time(lab: Lab, key: str, work: Callable[[], Run]) -> None:
    with lab.book.attempt(key):
        began = time.perf_counter()
        run = work()
        seconds = time.perf_counter() - began
        answered(run)
        lab.book.add(key, seconds)
