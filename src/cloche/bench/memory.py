"""What an idle sandbox takes from the host, and what a kernel takes."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Mapping
from pathlib import Path

from cloche.bench import programs
from cloche.bench.ipykernel_peer import Kernel
from cloche.bench.lab import Lab, answered
from cloche.sdk.sandbox import Sandbox

SETTLE_SECONDS = 1.0  # namespaces and page tables of what ended before are freed in the background
PARTS = {"anon": "AnonPages", "page_tables": "PageTables", "slab": "Slab"}


def memory(lab: Lab) -> None:
    """The change of the host's own figures, divided by the number of those who caused it."""
    for _ in range(lab.counts.measured):
        with lab.book.attempt("memory", "memory_used"):
            _sandboxes(lab)
    if lab.peer:
        with lab.book.attempt("kernel_memory"):
            _kernels(lab)


def _sandboxes(lab: Lab) -> None:
    count = lab.counts.live
    before = _settled()
    with lab.without_pool(), contextlib.ExitStack() as stack:
        boxes = [stack.enter_context(Sandbox()) for _ in range(count)]
        idle = _settled()
        lab.book.add("memory", _taken(before, idle) / count)
        for key, field in PARTS.items():
            lab.book.add(f"memory_{key}", (idle[field] - before[field]) / count)
        _use(boxes)
        lab.book.add("memory_used", _taken(before, _settled()) / count)


def _use(boxes: list[Sandbox]) -> None:
    for box in boxes:
        answered(box.run(programs.ONE))


def _kernels(lab: Lab) -> None:
    """One more each time, so that something else that happens on the host spoils one sample and not all."""
    with contextlib.ExitStack() as stack:
        kernels = []
        for _ in range(lab.counts.kernels):
            before = _settled()
            kernels.append(stack.enter_context(Kernel()))
            kernels[-1].run(programs.IMPORTS)
            lab.book.add("kernel_memory", _taken(before, _settled()))
        for kernel in kernels:
            rollup = figures(Path(f"/proc/{kernel.pid}/smaps_rollup"))
            lab.book.add("kernel_pss", rollup["Pss"])
            lab.book.add("kernel_private", rollup["Private_Clean"] + rollup["Private_Dirty"])


def _taken(before: Mapping[str, int], after: Mapping[str, int]) -> int:
    return before["MemAvailable"] - after["MemAvailable"]


def _settled() -> dict[str, int]:
    gc.collect()
    time.sleep(SETTLE_SECONDS)
    return figures_of_host()


def figures_of_host() -> dict[str, int]:
    return figures(Path("/proc/meminfo"))


def figures(path: Path) -> dict[str, int]:
    """Lines such as `Pss:  123 kB`, in bytes."""
    words = (line.split() for line in path.read_text().splitlines())
    return {found[0].rstrip(":"): int(found[1]) * 1024 for found in words if len(found) == 3 and found[2] == "kB"}
