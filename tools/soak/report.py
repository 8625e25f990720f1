"""The report, in Markdown, and the verdict."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import NamedTuple

from soak.book import Book
from soak.census import Census, Sample

MIB = 1 << 20
SHOWN_FAILURES = 30
SLACK = {
    "threads": 8,
    "descriptors": 8,
    "sockets": 8,
    "network_namespaces": 1,
    "files": 4,
    "file_bytes": MIB,
    "server_rss": 48 * MIB,
    "all_pss": 96 * MIB,
}
"""What may differ between two idle servers: workers of thread pools, kept connections, logs, warm caches."""
GROWTH_BYTES = 24 * MIB  # by the fitted line, in the measured time; and no more than so much in an hour:
GROWTH_BYTES_HOUR = 96 * MIB
WARM_SHARE = 0.3  # of each life of a server, in which caches fill
FEWEST_SAMPLES = 90  # three minutes: what goes up and down with the load looks like a trend in less


class Trend(NamedTuple):
    seconds: float
    first: float
    last: float

    @property
    def growth(self) -> float:
        return self.last - self.first

    @property
    def leaks(self) -> bool:
        hours = max(self.seconds, 1.0) / 3600
        return self.growth > GROWTH_BYTES and self.growth / hours > GROWTH_BYTES_HOUR


def trend(samples: list[Sample]) -> Trend | None:
    """The line through the server's resident memory in its last life, without its beginning."""
    last = [each for each in samples if each.start == samples[-1].start] if samples else []
    kept = last[int(len(last) * WARM_SHARE) :]
    if len(kept) < FEWEST_SAMPLES:
        return None
    times, values = [each.at for each in kept], [each.memory.server_rss for each in kept]
    slope, intercept = statistics.linear_regression(times, values)
    return Trend(times[-1] - times[0], intercept + slope * times[0], intercept + slope * times[-1])


def leaks(before: Census, after: Census, operations: int) -> list[str]:
    """What is more than it was."""
    found = []
    for name in Census._fields:
        was, now = getattr(before, name), getattr(after, name)
        if name == "rows":
            found += [
                f"rows of {table}: {was.get(table, 0)} → {count}"
                for table, count in now.items()
                if count > was.get(table, 0)
            ]
        elif name == "history_rows":
            found += [f"{now - was} rows of history for {operations} operations"] if now - was > 20 * operations else []
        elif now - was > SLACK.get(name, 0):
            found.append(f"{name}: {was} → {now}")
    return found


class Report:
    def __init__(self, book: Book, before: Census, after: Census, samples: list[Sample], title: str):
        self._book, self._before, self._after, self._samples = book, before, after, samples
        self._title = title
        self.problems = [f"{each.operation}: {each.what}" for each in book.failures]
        self.problems += leaks(before, after, sum(map(len, book.seconds.values())))
        line = trend(samples)
        if line is not None and line.leaks:
            self.problems.append(f"the server's memory grew by {line.growth / MIB:.0f} MiB in {line.seconds:.0f} s")

    @property
    def passed(self) -> bool:
        return not self.problems

    def markdown(self) -> str:
        parts = [
            f"# {self._title}",
            self._verdict(),
            self._operations(),
            self._faults(),
            self._census(),
            self._memory(),
        ]
        return "\n\n".join(part for part in parts if part) + "\n"

    def _verdict(self) -> str:
        if self.passed:
            return "**Passed**: no answer was lost or wrong, and nothing was left over."
        shown = "\n".join(f"- {each}" for each in self.problems[:SHOWN_FAILURES])
        return f"**Failed**, for {len(self.problems)} reasons:\n\n{shown}"

    def _operations(self) -> str:
        book = self._book
        names = sorted({*book.seconds, *book.hit, *book.refused, *(each.operation for each in book.failures)})
        failed = Counter(each.operation for each in book.failures)
        rows = [
            "| operation | done | p50 ms | p99 ms | hit by a fault | told to come back | failed |",
            "|---" + "|--:" * 6 + "|",
        ]
        for name in names:
            times = sorted(book.seconds.get(name, []))
            middle, high = (
                (f"{_share(times, 0.5) * 1000:.0f}", f"{_share(times, 0.99) * 1000:.0f}") if times else ("", "")
            )
            hit = sum(book.hit[name].values()) if name in book.hit else 0
            rows.append(
                f"| {name} | {len(times)} | {middle} | {high} | {hit} | {book.refused[name]} | {failed[name]} |"
            )
        return "## Operations\n\n" + "\n".join(rows)

    def _faults(self) -> str:
        counts = Counter(fault.kind for fault in self._book.faults)
        rows = [f"| {kind} | {count} | {self._book.caused[kind]} |" for kind, count in sorted(counts.items())]
        return "\n".join(["## Faults\n", "| fault | times | operations that it ended |", "|---|--:|--:|", *rows])

    def _census(self) -> str:
        rows = []
        for name in Census._fields:
            was, now = getattr(self._before, name), getattr(self._after, name)
            if name == "rows":
                was, now = sum(was.values()), sum(now.values())
            rows.append(f"| {name.replace('_', ' ')} | {was} | {now} |")
        return "\n".join(["## Left over\n", "| | before | after |", "|---|--:|--:|", *rows])

    def _memory(self) -> str:
        line = trend(self._samples)
        if line is None:
            return "The run was too short for a trend of the server's memory."
        return (
            f"The server's resident memory under load, by a fitted line over its last {line.seconds:.0f} s: "
            f"{line.first / MIB:.1f} MiB to {line.last / MIB:.1f} MiB."
        )


def _share(times: list[float], share: float) -> float:
    return times[min(len(times) - 1, int(len(times) * share))]
