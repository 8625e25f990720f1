"""Measurement: pause with memory, and resume."""

from __future__ import annotations

import time
from collections.abc import Callable

from cloche.bench import programs
from cloche.bench.lab import SETTLE_SECONDS, Lab, expect_two
from cloche.events import Run
from cloche.sdk.sandbox import Sandbox

WARM_RUNS = 3  # after each resume


def measure_pauses(lab: Lab) -> None:
    """One sandbox, again and again: paused, at rest for a moment, resumed; then warm executions to compare with."""
    with lab.with_pool(), Sandbox() as box:
        expect_two(box.run(programs.ONE))
        for _ in range(lab.counts.fast):
            with lab.book.attempt("pause"):
                began = time.perf_counter()
                box.pause()
                lab.book.add("pause", time.perf_counter() - began)
            time.sleep(SETTLE_SECONDS)
            _time_run(lab, "resume_one", lambda: _resume_and_run(box))
            for _ in range(WARM_RUNS):
                _time_run(lab, "resumed_warm", lambda: box.run(programs.ONE))


def _resume_and_run(box: Sandbox) -> Run:
    box.resume()
    return box.run(programs.ONE)


def _time_run(lab: Lab, key: str, work: Callable[[], Run]) -> None:
    with lab.book.attempt(key):
        began = time.perf_counter()
        run = work()
        seconds = time.perf_counter() - began
        expect_two(run)
        lab.book.add(key, seconds)
