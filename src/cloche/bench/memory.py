"""Measurement: the host memory of an idle sandbox, and of a kernel."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Mapping
from pathlib import Path

from cloche.bench import programs
from cloche.bench.ipykernel_peer import IpykernelProcess
from cloche.bench.lab import Lab, expect_two
from cloche.sdk.sandbox import Sandbox

MEMORY_SETTLE_SECONDS = 1.0  # namespaces and page tables of what ended before are freed in the background
MEMORY_FIELDS = {"anon": "AnonPages", "page_tables": "PageTables", "slab": "Slab"}


def measure_memory(lab: Lab) -> None:
    """The change of the host's own figures, divided by the number of sandboxes or kernels."""
    for _ in range(lab.counts.measured):
        with lab.book.attempt("memory", "memory_used"):
            _measure_sandboxes(lab)
    if lab.peer:
        with lab.book.attempt("kernel_memory"):
            _measure_kernels(lab)


def _measure_sandboxes(lab: Lab) -> None:
    count = lab.counts.live
    before = _settled_figures()
    with lab.without_pool(), contextlib.ExitStack() as stack:
        boxes = [stack.enter_context(Sandbox()) for _ in range(count)]
        idle = _settled_figures()
        lab.book.add("memory", _memory_taken(before, idle) / count)
        for key, field in MEMORY_FIELDS.items():
            lab.book.add(f"memory_{key}", (idle[field] - before[field]) / count)
        _use_sandboxes(boxes)
        lab.book.add("memory_used", _memory_taken(before, _settled_figures()) / count)


def _use_sandboxes(boxes: list[Sandbox]) -> None:
    for box in boxes:
        expect_two(box.run(programs.ONE))


def _measure_kernels(lab: Lab) -> None:
    """Adds one kernel at a time, so that other events on the host spoil one sample and not all."""
    with contextlib.ExitStack() as stack:
        kernels = []
        for _ in range(lab.counts.kernels):
            before = _settled_figures()
            kernels.append(stack.enter_context(IpykernelProcess()))
            kernels[-1].run(programs.IMPORTS)
            lab.book.add("kernel_memory", _memory_taken(before, _settled_figures()))
        for kernel in kernels:
            rollup = read_figures(Path(f"/proc/{kernel.pid}/smaps_rollup"))
            lab.book.add("kernel_pss", rollup["Pss"])
            lab.book.add("kernel_private", rollup["Private_Clean"] + rollup["Private_Dirty"])


def _memory_taken(before: Mapping[str, int], after: Mapping[str, int]) -> int:
    return before["MemAvailable"] - after["MemAvailable"]


def _settled_figures() -> dict[str, int]:
    gc.collect()
    time.sleep(MEMORY_SETTLE_SECONDS)
    return host_figures()


def host_figures() -> dict[str, int]:
    return read_figures(Path("/proc/meminfo"))


def read_figures(path: Path) -> dict[str, int]:
    """Parses lines such as `Pss:  123 kB`, in bytes."""
    words = (line.split() for line in path.read_text().splitlines())
    return {found[0].rstrip(":"): int(found[1]) * 1024 for found in words if len(found) == 3 and found[2] == "kB"}
