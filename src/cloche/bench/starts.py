"""Measurement: from nothing to the first answer."""

from __future__ import annotations

import time
from collections.abc import Callable

from cloche.bench import programs
from cloche.bench.ipykernel_peer import IpykernelProcess
from cloche.bench.lab import SETTLE_SECONDS, Lab, SampleTarget, expect_two
from cloche.bench.samples import expect_answer, split_evenly
from cloche.events import Run
from cloche.sdk.sandbox import Sandbox

PNG_SIGNATURE = b"\x89PNG"


def measure_first_answers(lab: Lab) -> None:
    """Create to ready and to `1+1`, with a pool and without; the raw cost between; the peer in turns."""
    counts = lab.counts
    turns = zip(split_evenly(counts.fast, counts.peer), split_evenly(counts.lean, counts.peer), strict=True)
    for count, lean in turns:
        measure_kernel_start(lab, "kernel_one", programs.ONE, "text/plain")
        for _ in range(lean):
            measure_kernel_start(lab, "kernel_one_lean", programs.ONE, "text/plain", lean=True)
        for _ in range(count):
            with lab.book.attempt("ready_pool", "one_pool"), lab.with_pool():
                lab.wait_for_pool()
                _create_and_answer(lab, "ready_pool", "one_pool")
            with lab.book.attempt("raw"):
                time.sleep(SETTLE_SECONDS)
                lab.book.add("raw", lab.raw_cost_seconds())
            with lab.book.attempt("ready_empty", "one_empty"), lab.without_pool():
                time.sleep(SETTLE_SECONDS)
                _create_and_answer(lab, "ready_empty", "one_empty")


def measure_first_frame(lab: Lab) -> None:
    _measure_first(lab, "frame_pool", "kernel_frame", programs.FRAME, "text/html", _expect_frame)


def measure_first_picture(lab: Lab) -> None:
    _measure_first(lab, "png_pool", "kernel_png", programs.PLOT, "image/png", _expect_picture)


def _measure_first(lab: Lab, key: str, peer_key: str, code: str, mime: str, check: Callable[[Run], None]) -> None:
    for count in split_evenly(lab.counts.fast, lab.counts.peer):
        measure_kernel_start(lab, peer_key, code, mime)
        for _ in range(count):
            with lab.book.attempt(key), lab.with_pool():
                lab.wait_for_pool()
                began = time.perf_counter()
                with Sandbox() as box:
                    run = box.run(code)
                    seconds = time.perf_counter() - began
                check(run)
                lab.book.add(key, seconds)


def _create_and_answer(lab: Lab, ready_key: str, one_key: str) -> None:
    began = time.perf_counter()
    with Sandbox() as box:
        ready = time.perf_counter()
        run = box.run(programs.ONE)
        ended = time.perf_counter()
    expect_two(run)
    lab.book.add(ready_key, ready - began)
    lab.book.add(one_key, ended - began)


def measure_kernel_start(lab: SampleTarget, key: str, code: str, mime: str, *, lean: bool = False) -> None:
    """One start of the peer until the answer has come; ours counts until the whole run has ended."""
    if not lab.peer:
        return
    with lab.book.attempt(key):
        began = time.perf_counter()
        with IpykernelProcess(lean=lean) as kernel:
            kernel.first(code, mime)
            lab.book.add(key, time.perf_counter() - began)


def _expect_frame(run: Run) -> None:
    expect_answer(bool(run.results) and "<table" in (run.results[0].html or ""), run)


def _expect_picture(run: Run) -> None:
    expect_answer(any((result.png or b"").startswith(PNG_SIGNATURE) for result in run.results), run.error)
