"""Measurement: round trips to a running kernel."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from cloche.bench import programs
from cloche.bench.ipykernel_peer import TRANSPORTS, IpykernelProcess
from cloche.bench.lab import Lab, SampleTarget
from cloche.bench.samples import expect_answer, split_evenly
from cloche.events import Ended, Output, Run
from cloche.sdk.sandbox import Sandbox

TURNS = 20
KILOBYTE_CHARS = 1024


def measure_round_trips(lab: Lab) -> None:
    """`1+1`, 1 kB of output, a 1 MB image; the peer's two transports in turns with ours."""
    counts = lab.counts
    with lab.with_pool(), contextlib.ExitStack() as stack:
        box = stack.enter_context(Sandbox())
        box.run(programs.PREPARE_IMAGE)
        kernels = {name: stack.enter_context(IpykernelProcess(name)) for name in TRANSPORTS} if lab.peer else {}
        for kernel in kernels.values():
            kernel.run(programs.PREPARE_IMAGE)
        _take_turns(lab, box, kernels, "warm", programs.ONE, counts.warm, _expect_two)
        _take_turns(lab, box, kernels, "warm_kilobyte", programs.KILOBYTE, counts.warm, _expect_kilobyte)
        _take_turns(lab, box, kernels, "warm_image", programs.IMAGE, counts.images, _expect_image)


def measure_interrupts(lab: Lab) -> None:
    """From the interrupt of an endless loop to its end."""
    with lab.with_pool(), contextlib.ExitStack() as stack:
        box = stack.enter_context(Sandbox())
        kernel = stack.enter_context(IpykernelProcess()) if lab.peer else None
        for _ in range(lab.counts.interrupts):
            with lab.book.attempt("interrupt"):
                lab.book.add("interrupt", _interrupt_seconds(box))
            if kernel is not None:
                with lab.book.attempt("kernel_interrupt"):
                    lab.book.add("kernel_interrupt", kernel.interrupt_seconds(programs.SPIN))


def _take_turns(
    lab: Lab,
    box: Sandbox,
    kernels: dict[str, IpykernelProcess],
    key: str,
    code: str,
    total: int,
    check: Callable[[Run], None],
) -> None:
    for count in split_evenly(total, min(TURNS, total)):
        for _ in range(count):
            with lab.book.attempt(key):
                began = time.perf_counter()
                run = box.run(code)
                seconds = time.perf_counter() - began
                check(run)
                lab.book.add(key, seconds)
        for transport, kernel in kernels.items():
            measure_peer_turn(lab, kernel, f"kernel_{key}_{transport}", code, max(count // 2, 1))


def measure_peer_turn(lab: SampleTarget, kernel: IpykernelProcess, key: str, code: str, count: int) -> None:
    for _ in range(count):
        with lab.book.attempt(key):
            began = time.perf_counter()
            said = kernel.run(code)
            seconds = time.perf_counter() - began
            expect_answer(bool(said), said)
            lab.book.add(key, seconds)


def _interrupt_seconds(box: Sandbox) -> float:
    began = 0.0
    with box.stream(programs.SPIN) as stream:
        for event in stream:
            if isinstance(event, Output) and not began:
                began = time.perf_counter()
                stream.interrupt()
            elif isinstance(event, Ended):
                expect_answer(event.outcome == "interrupted", event)
    return time.perf_counter() - began


def _expect_two(run: Run) -> None:
    expect_answer(run.text == "2", run)


def _expect_kilobyte(run: Run) -> None:
    expect_answer(len(run.stdout) == KILOBYTE_CHARS, run.stdout)


def _expect_image(run: Run) -> None:
    found = [len(result.png or b"") for result in run.results]
    expect_answer(found == [programs.IMAGE_BYTES], (found, run.error))
