"""Measurement through HTTP with many clients and sandboxes: throughput, fairness, memory, cost growth."""

from __future__ import annotations

import contextlib
import time
from statistics import fmean

from cloche.bench import system
from cloche.bench.closed_loop import LoadResult
from cloche.bench.memory import host_figures
from cloche.bench.over_http import HttpLab, ServerProcess
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


def measure_executions(lab: HttpLab) -> None:
    """Closed loops of clients, each with a warm sandbox of its own."""
    with lab.pooled.sandboxes(lab.counts.warm_sandboxes) as ids:
        lab.pooled.load("roll_call", ROLL_CALLERS, ids=ids)
        for _ in range(lab.counts.loads):
            for clients in CLIENT_COUNTS:
                _measure_execution_rate(lab, clients, ids[:clients])


def _measure_execution_rate(lab: HttpLab, clients: int, ids: list[str]) -> None:
    key = f"http_executions_{clients}"
    with lab.book.attempt(key):
        before = lab.pooled.cpu_seconds
        load = lab.pooled.load("executions", len(ids), ids=ids, seconds=lab.counts.load_seconds)
        lab.record_generator_load(load)
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
            load = lab.pooled.load("cycles", lab.counts.threads, seconds=lab.counts.load_seconds * 2)
            lab.record_generator_load(load)
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
    system.wait_for_rest()  # what was ended before is taken apart in the background
    ids: list[str] = []
    rates = []
    with contextlib.ExitStack() as alive:
        for live in sizes:
            more = min(live, lab.counts.most_live) - len(ids)
            ids += alive.enter_context(lab.pooled.sandboxes(more))
            lab.pooled.load("roll_call", ROLL_CALLERS, ids=ids)
            rates.append(_measure_live(lab, live, ids))
    return rates


def _measure_live(lab: HttpLab, live: int, ids: list[str]) -> list[float]:
    """Executions per second, in the order of GROWTHS."""
    one = _run_load(lab, "executions", 1, ids)
    before = system.kernel_thread_seconds()
    eight = _run_load(lab, "executions", 8, ids)
    lab.book.add(f"grown_system_{live}", max(system.kernel_thread_seconds() - before, 0.0) / eight.wall_seconds)
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
    load = lab.pooled.load(what, clients, ids=ids, seconds=lab.counts.load_seconds)
    lab.record_generator_load(load)
    expect_answer(bool(load.seconds), load.failures[:1])
    return load


def measure_idle(lab: HttpLab) -> None:
    """Very many unused sandboxes: their memory, whether they answer, and their memory after that."""
    lab.empty.load("cycles", 1, seconds=1.0)  # what the first ones take once, it takes now
    for _ in range(lab.counts.crowds):
        with lab.book.attempt("idle_memory", "used_memory", "answering"):
            _measure_idle_memory(lab, lab.empty, lab.counts.crowd)


def _measure_idle_memory(lab: HttpLab, server: ServerProcess, count: int) -> None:
    before = _settled_figures()
    with server.sandboxes(count) as ids:
        idle = _settled_figures()
        for key, field in MEMORY_FIELDS.items():
            lab.book.add(f"idle_{key}", (idle[field] - before[field]) / count)
        lab.book.add("idle_memory", _memory_growth(before, idle) / count)
        load = server.load("roll_call", ROLL_CALLERS, ids=ids)
        lab.book["answering"].failures += load.failures
        lab.book.add("answering", len(load.seconds))
        lab.book.add("used_memory", _memory_growth(before, _settled_figures()) / count)


def _memory_growth(before: dict[str, int], after: dict[str, int]) -> int:
    return sum(after[field] - before[field] for field in MEMORY_FIELDS.values())


def _settled_figures() -> dict[str, int]:
    time.sleep(REST_SECONDS)
    return host_figures()
