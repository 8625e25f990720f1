"""Measurements through HTTP with many clients and sandboxes: throughput, fairness, memory, cost growth."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.closed_loop import LoadResult, run_load

from cloche.bench.http_measurements import HttpLab, ServerProcess
from cloche.bench.measurements import host_figures
from cloche.bench.samples import Samples, expect_answer

CLIENT_COUNTS = (1, 8, 64)
LIVE_COUNTS = (10, 100, 500)
GROWTHS = ("growth", "growth_eight", "growth_few")  # of most to fewest: 64 clients, 8, and 8 in 8 of them
MEMORY_FIELDS = {
    "anon": "AnonPages",
    "shmem": "Shmem",
    "page_tables": "PageTables",
    "slab": "Slab",
    "stacks": "KernelStack",
    "percpu": "Percpu",
}
REST_SECONDS = 2.0  # namespaces and page tables of what ended before are freed in the background
ROLL_CALLERS = 8
CREATOR_CLIENTS = 4  # clients that make sandboxes which stay


def _load_server(server: ServerProcess, what: str, clients: int, **given: Any) -> LoadResult:
    return run_load(server.address, server.key, what, clients, **given)


@contextlib.contextmanager
def _live_sandboxes(server: ServerProcess, count: int) -> Iterator[list[str]]:
    """Creates so many sandboxes for the block. Raises WrongAnswer if not all could be made."""
    made = _load_server(server, "creations", CREATOR_CLIENTS, count=count)
    try:
        expect_answer(not made.failures and len(made.ids) == count, made.failures[:1])
        yield made.ids
    finally:
        _load_server(server, "removals", CREATOR_CLIENTS, ids=made.ids)


def _record_generator_load(lab: HttpLab, load: LoadResult) -> None:
    """Records the load generator's share of a core, and its failed requests."""
    lab.book.add("generator", load.core_share)
    lab.book["generator"].failures += load.failures


def measure_executions(lab: HttpLab) -> None:
    """Closed loops of clients, each with a warm sandbox of its own."""
    with _live_sandboxes(lab.pooled, lab.counts.warm_sandboxes) as ids:
        _load_server(lab.pooled, "roll_call", ROLL_CALLERS, ids=ids)
        for _ in range(lab.counts.loads):
            for clients in CLIENT_COUNTS:
                _measure_execution_rate(lab, clients, ids[:clients])


def _measure_execution_rate(lab: HttpLab, clients: int, ids: list[str]) -> None:
    key = f"http_executions_{clients}"
    with lab.book.attempt(key):
        before = lab.pooled.cpu_seconds
        load = _load_server(lab.pooled, "executions", len(ids), ids=ids, seconds=lab.counts.load_seconds)
        _record_generator_load(lab, load)
        expect_answer(bool(load.seconds), load.failures[:1])
        lab.book.add(key, load.per_second)
        lab.book.add(f"{key}_cpu", (lab.pooled.cpu_seconds - before) / len(load.seconds))
        if clients == CLIENT_COUNTS[-1]:
            lab.book.add("fairness", _percentile_99(load.seconds) * load.per_second / len(ids))


def _percentile_99(seconds: list[float]) -> float:
    samples = Samples()
    samples.values = seconds
    return samples.quantile(0.99)


def measure_cycles(lab: HttpLab) -> None:
    """Sandboxes per second, each created, used and destroyed, by 8 clients."""
    for _ in range(lab.counts.loads):
        with lab.book.attempt("http_cycles_8"):
            before = lab.pooled.cpu_seconds
            load = _load_server(lab.pooled, "cycles", lab.counts.threads, seconds=lab.counts.load_seconds * 2)
            _record_generator_load(lab, load)
            expect_answer(bool(load.seconds), load.failures[:1])
            lab.book.add("http_cycles_8", load.per_second)
            lab.book.add("http_cycles_8_cpu", (lab.pooled.cpu_seconds - before) / len(load.seconds))


def measure_growth(lab: HttpLab) -> None:
    """Throughput with more and more sandboxes alive, all of which are used in turn.

    Every round begins and ends with few, and many are compared with both: other load on the machine affects all
    alike.
    """
    for _ in range(lab.counts.growths):
        with lab.book.attempt(*GROWTHS, *map("grown_executions_{}".format, LIVE_COUNTS)):
            before, *_, many = _measure_sizes(lab, LIVE_COUNTS)
            (after,) = _measure_sizes(lab, LIVE_COUNTS[:1])
            for key, *few, rate in zip(GROWTHS, before, after, many, strict=True):
                lab.book.add(key, rate / fmean(few))


def _measure_sizes(lab: HttpLab, sizes: tuple[int, ...]) -> list[list[float]]:
    """For each size, the executions per second with so many sandboxes alive."""
    wait_for_rest()  # what was ended before is taken apart in the background
    ids: list[str] = []
    rates = []
    with contextlib.ExitStack() as alive:
        for live in sizes:
            more = min(live, lab.counts.most_live) - len(ids)
            ids += alive.enter_context(_live_sandboxes(lab.pooled, more))
            _load_server(lab.pooled, "roll_call", ROLL_CALLERS, ids=ids)
            rates.append(_measure_live(lab, live, ids))
    return rates


def _measure_live(lab: HttpLab, live: int, ids: list[str]) -> list[float]:
    """Executions per second, in the order of GROWTHS."""
    one = _run_load(lab, "executions", 1, ids)
    before = kernel_thread_seconds()
    eight = _run_load(lab, "executions", 8, ids)
    lab.book.add(f"grown_system_{live}", max(kernel_thread_seconds() - before, 0.0) / eight.wall_seconds)
    crowd = _run_load(lab, "executions", CLIENT_COUNTS[-1], ids)
    few = _run_load(lab, "executions", 8, ids[:8])
    made = _run_load(lab, "cycles", 1, [])
    for value in one.seconds:
        lab.book.add(f"grown_warm_{live}", value)
    for value in made.first_seconds:
        lab.book.add(f"grown_first_{live}", value)
    lab.book.add(f"grown_executions_{live}", eight.per_second)
    lab.book.add(f"grown_crowd_{live}", crowd.per_second)
    lab.book.add(f"grown_few_{live}", few.per_second)
    return [crowd.per_second, eight.per_second, few.per_second]


def _run_load(lab: HttpLab, what: str, clients: int, ids: list[str]) -> LoadResult:
    """Runs a load. Raises WrongAnswer if no operation succeeded."""
    load = _load_server(lab.pooled, what, clients, ids=ids, seconds=lab.counts.load_seconds)
    _record_generator_load(lab, load)
    expect_answer(bool(load.seconds), load.failures[:1])
    return load


def measure_idle(lab: HttpLab) -> None:
    """Very many unused sandboxes: their memory, whether they answer, and their memory after that."""
    _load_server(lab.empty, "cycles", 1, seconds=1.0)  # what the first ones take once, it takes now
    for _ in range(lab.counts.crowds):
        with lab.book.attempt("idle_memory", "used_memory", "answering"):
            _measure_idle_memory(lab, lab.empty, lab.counts.crowd)


def _measure_idle_memory(lab: HttpLab, server: ServerProcess, count: int) -> None:
    before = _settled_figures()
    with _live_sandboxes(server, count) as ids:
        idle = _settled_figures()
        for key, field in MEMORY_FIELDS.items():
            lab.book.add(f"idle_{key}", (idle[field] - before[field]) / count)
        lab.book.add("idle_memory", _memory_growth(before, idle) / count)
        load = _load_server(server, "roll_call", ROLL_CALLERS, ids=ids)
        lab.book["answering"].failures += load.failures
        lab.book.add("answering", len(load.seconds))
        lab.book.add("used_memory", _memory_growth(before, _settled_figures()) / count)


def _memory_growth(before: dict[str, int], after: dict[str, int]) -> int:
    return sum(after[field] - before[field] for field in MEMORY_FIELDS.values())


def _settled_figures() -> dict[str, int]:
    time.sleep(REST_SECONDS)
    return host_figures()


# --- CPU time of the kernel's own threads: on some hosts they manage memory, and that grows with sandboxes.

_KERNEL_THREAD = 0x00200000  # PF_KTHREAD; in a container there are none to be seen
_REST_CORES, _LOOK_SECONDS, _PATIENCE_SECONDS = 0.03, 0.5, 20.0


def wait_for_rest() -> None:
    """Waits until those threads are nearly idle, at most for some time."""
    end = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < end:
        before = kernel_thread_seconds()
        time.sleep(_LOOK_SECONDS)
        if kernel_thread_seconds() - before < _REST_CORES * _LOOK_SECONDS:
            return


def kernel_thread_seconds() -> float:
    """CPU time of the kernel's own threads, so far."""
    return sum(_thread_seconds(each) for each in Path("/proc").glob("[0-9]*"))


def _thread_seconds(process: Path) -> float:
    try:
        flags = int((process / "stat").read_text().rpartition(")")[2].split()[6])
        return int((process / "schedstat").read_text().split()[0]) / 1e9 if flags & _KERNEL_THREAD else 0.0
    except (OSError, IndexError, ValueError):
        return 0.0  # it has ended, or this system does not tell
