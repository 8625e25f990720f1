"""Measurement: forks of a context with a large DataFrame, beside bare forks of the same process."""

from __future__ import annotations

import time

from cloche.bench import programs
from cloche.bench.lab import SETTLE_SECONDS, Lab, expect_two
from cloche.bench.samples import expect_answer
from cloche.sdk.sandbox import Context, Sandbox

BRANCH_COPIES = 8  # at once, whose memory is measured
BRANCH_REST_SECONDS = 0.5  # after which all that is taken and given back is counted


def measure_branches(lab: Lab) -> None:
    """In turns: the kernel forks a child that writes a byte, and a fork of its context, to ready."""
    with lab.with_pool(), Sandbox() as box:
        context = box.contexts.get()
        expect_answer(context.run(programs.LARGE_FRAME).text == str(programs.LARGE_FRAME_BYTES), "the DataFrame")
        for _ in range(lab.counts.fast):
            with lab.book.attempt("branch_raw"):
                lab.book.add("branch_raw", _raw_fork_seconds(context))
            with lab.book.attempt("branch"):
                lab.book.add("branch", _fork_seconds(box, context))
        for _ in range(lab.counts.measured):
            with lab.book.attempt("branch_memory"):
                lab.book.add("branch_memory", _added_bytes(lab, box, context))
                lab.book.add("branch_frame", programs.LARGE_FRAME_BYTES)


def _raw_fork_seconds(context: Context) -> float:
    time.sleep(SETTLE_SECONDS)
    return float(context.run(programs.RAW_FORK).stdout)


def _fork_seconds(box: Sandbox, context: Context) -> float:
    time.sleep(SETTLE_SECONDS)
    began = time.perf_counter()
    (copy,) = context.fork()
    seconds = time.perf_counter() - began
    expect_two(copy.run(programs.ONE))
    box.contexts.remove(copy)
    return seconds


def _added_bytes(lab: Lab, box: Sandbox, context: Context) -> float:
    """The memory that one unused copy adds, measured over several."""
    time.sleep(BRANCH_REST_SECONDS)
    before = lab.memory_bytes(box)
    copies = context.fork(BRANCH_COPIES)
    time.sleep(BRANCH_REST_SECONDS)
    added = (lab.memory_bytes(box) - before) / BRANCH_COPIES
    for copy in copies:
        box.contexts.remove(copy)
    return added
