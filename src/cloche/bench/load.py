"""Measurement: many operations at once, and large transfers."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

from cloche.bench import programs
from cloche.bench.lab import Lab, expect_two
from cloche.bench.samples import expect_answer
from cloche.sdk.sandbox import Sandbox

LoadOperation = Callable[[int], None]


def measure_creations(lab: Lab) -> None:
    """Sandboxes per second, each created, used and destroyed, by several threads."""

    def operation(thread: int) -> None:
        with Sandbox() as box:
            expect_two(box.run(programs.ONE))

    with lab.with_pool():
        _measure_under_load(lab, "creations", operation)


def measure_executions(lab: Lab) -> None:
    """Executions per second in warm sandboxes, by several threads."""
    threads = lab.counts.threads
    with lab.with_pool(), contextlib.ExitStack() as stack:
        boxes = [stack.enter_context(Sandbox()) for _ in range(lab.counts.warm_sandboxes)]
        turns = [boxes[thread::threads] or boxes for thread in range(threads)]

        def operation(thread: int) -> None:
            box = turns[thread].pop(0)
            turns[thread].append(box)
            expect_two(box.run(programs.ONE))

        _measure_under_load(lab, "executions", operation)


def measure_transfers(lab: Lab) -> None:
    """A large file in and out, in bytes per second."""
    size = lab.counts.transfer_bytes
    content = os.urandom(1 << 20) * (size // (1 << 20) + 1)
    content = content[:size]
    for _ in range(lab.counts.transfers):
        with lab.book.attempt("file_write", "file_read"), lab.with_pool(), Sandbox() as box:
            _measure_transfer(lab, box, content)


def _measure_transfer(lab: Lab, box: Sandbox, content: bytes) -> None:
    began = time.perf_counter()
    box.files.write("/mnt/data/large", content)
    written = time.perf_counter()
    found = box.files.read("/mnt/data/large")
    ended = time.perf_counter()
    expect_answer(found == content, f"{len(found)} bytes")
    lab.book.add("file_write", len(content) / (written - began))
    lab.book.add("file_read", len(content) / (ended - written))


def _measure_under_load(lab: Lab, key: str, operation: LoadOperation) -> None:
    for _ in range(lab.counts.loads):
        lab.wait_for_pool()
        with lab.book.attempt(key):
            lab.book.add(key, _operations_per_second(lab, key, operation))


def _operations_per_second(lab: Lab, key: str, operation: LoadOperation) -> float:
    done = [0] * lab.counts.threads
    began = time.perf_counter()
    end = began + lab.counts.load_seconds

    def work(thread: int) -> None:
        while time.perf_counter() < end:
            with lab.book.attempt(key):
                operation(thread)
                done[thread] += 1

    workers = [threading.Thread(target=work, args=(thread,)) for thread in range(lab.counts.threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    expect_answer(sum(done) > 0, "not one operation succeeded")
    return sum(done) / (time.perf_counter() - began)
