"""Many clients and many sandboxes at once, through HTTP: throughput, fairness, memory, and how cost grows."""

from __future__ import annotations

import contextlib
import time
from statistics import fmean

from cloche.bench import system
from cloche.bench.closed_loop import Load
from cloche.bench.memory import figures_of_host
from cloche.bench.over_http import HttpLab, Served
from cloche.bench.samples import Samples, expect

CLIENTS = (1, 8, 64)
LIVE = (10, 100, 500)
GROWTHS = ("growth", "growth_eight", "growth_few")  # of most to fewest: 64 clients, 8, and 8 in 8 of them
FIELDS = {
    "anon": "AnonPages",
    "shmem": "Shmem",
    "page_tables": "PageTables",
    "slab": "Slab",
    "stacks": "KernelStack",
    "percpu": "Percpu",
}
REST_SECONDS = 2.0  # namespaces and page tables of what ended before are freed in the background
ROLL_CALLERS = 8


def executions(lab: HttpLab) -> None:
    """Closed loops of clients, each with a warm sandbox of its own."""
    with lab.pooled.sandboxes(lab.counts.warm_sandboxes) as ids:
        lab.pooled.load("roll_call", ROLL_CALLERS, ids=ids)
        for _ in range(lab.counts.loads):
            for clients in CLIENTS:
                _executions(lab, clients, ids[:clients])


def _executions(lab: HttpLab, clients: int, ids: list[str]) -> None:
    key = f"http_executions_{clients}"
    with lab.book.attempt(key):
        before = lab.pooled.cpu_seconds
        load = lab.pooled.load("executions", len(ids), ids=ids, seconds=lab.counts.load_seconds)
        lab.note_generator(load)
        expect(bool(load.seconds), load.failures[:1])
        lab.book.add(key, load.per_second)
        lab.book.add(f"{key}_cpu", (lab.pooled.cpu_seconds - before) / len(load.seconds))
        if clients == CLIENTS[-1]:
            lab.book.add("fairness", _p99(load.seconds) * load.per_second / len(ids))


def _p99(seconds: list[float]) -> float:
    samples = Samples()
    samples.values = seconds
    return samples.quantile(0.99)


def cycles(lab: HttpLab) -> None:
    """Sandboxes per second, each created, used and destroyed, by 8 clients."""
    for _ in range(lab.counts.loads):
        with lab.book.attempt("http_cycles_8"):
            before = lab.pooled.cpu_seconds
            load = lab.pooled.load("cycles", lab.counts.threads, seconds=lab.counts.load_seconds * 2)
            lab.note_generator(load)
            expect(bool(load.seconds), load.failures[:1])
            lab.book.add("http_cycles_8", load.per_second)
            lab.book.add("http_cycles_8_cpu", (lab.pooled.cpu_seconds - before) / len(load.seconds))


def growth(lab: HttpLab) -> None:
    """The same with more and more sandboxes alive, all of which are used in turn.

    Every round begins and ends with few, and many are compared with both: what else the machine does hits all alike.
    """
    for _ in range(lab.counts.growths):
        with lab.book.attempt(*GROWTHS, *map("grown_executions_{}".format, LIVE)):
            before, *_, many = _grow(lab, LIVE)
            (after,) = _grow(lab, LIVE[:1])
            for key, *few, rate in zip(GROWTHS, before, after, many, strict=True):
                lab.book.add(key, rate / fmean(few))


def _grow(lab: HttpLab, sizes: tuple[int, ...]) -> list[list[float]]:
    """For each of those, the executions per second with so many alive."""
    system.wait_for_rest()  # what was ended before is taken apart in the background
    ids: list[str] = []
    rates = []
    with contextlib.ExitStack() as alive:
        for live in sizes:
            more = min(live, lab.counts.most_live) - len(ids)
            ids += alive.enter_context(lab.pooled.sandboxes(more))
            lab.pooled.load("roll_call", ROLL_CALLERS, ids=ids)
            rates.append(_grown(lab, live, ids))
    return rates


def _grown(lab: HttpLab, live: int, ids: list[str]) -> list[float]:
    """Executions per second, in the order of GROWTHS."""
    one = _loaded(lab, "executions", 1, ids)
    before = system.own_seconds()
    eight = _loaded(lab, "executions", 8, ids)
    lab.book.add(f"grown_system_{live}", max(system.own_seconds() - before, 0.0) / eight.wall_seconds)
    crowd = _loaded(lab, "executions", CLIENTS[-1], ids)
    few = _loaded(lab, "executions", 8, ids[:8])
    made = _loaded(lab, "cycles", 1, [])
    for value in one.seconds:
        lab.book.add(f"grown_warm_{live}", value)
    for value in made.first_seconds:
        lab.book.add(f"grown_first_{live}", value)
    lab.book.add(f"grown_executions_{live}", eight.per_second)
    lab.book.add(f"grown_crowd_{live}", crowd.per_second)
    lab.book.add(f"grown_few_{live}", few.per_second)
    return [crowd.per_second, eight.per_second, few.per_second]


def _loaded(lab: HttpLab, what: str, clients: int, ids: list[str]) -> Load:
    """Raises WrongAnswer if nothing was done."""
    load = lab.pooled.load(what, clients, ids=ids, seconds=lab.counts.load_seconds)
    lab.note_generator(load)
    expect(bool(load.seconds), load.failures[:1])
    return load


def idle(lab: HttpLab) -> None:
    """Very many sandboxes that nobody uses: what they take, whether they answer, and what they take then."""
    lab.empty.load("cycles", 1, seconds=1.0)  # what the first ones take once, it takes now
    for _ in range(lab.counts.crowds):
        with lab.book.attempt("idle_memory", "used_memory", "answering"):
            _idle(lab, lab.empty, lab.counts.crowd)


def _idle(lab: HttpLab, server: Served, count: int) -> None:
    before = _settled()
    with server.sandboxes(count) as ids:
        idle = _settled()
        for key, field in FIELDS.items():
            lab.book.add(f"idle_{key}", (idle[field] - before[field]) / count)
        lab.book.add("idle_memory", _all(before, idle) / count)
        load = server.load("roll_call", ROLL_CALLERS, ids=ids)
        lab.book["answering"].failures += load.failures
        lab.book.add("answering", len(load.seconds))
        lab.book.add("used_memory", _all(before, _settled()) / count)


def _all(before: dict[str, int], after: dict[str, int]) -> int:
    return sum(after[field] - before[field] for field in FIELDS.values())


def _settled() -> dict[str, int]:
    time.sleep(REST_SECONDS)
    return figures_of_host()
