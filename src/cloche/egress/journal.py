"""The network log of a sandbox, kept with the sandbox and summarised in the server's log."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections import Counter, deque
from typing import Literal, NamedTuple

from cloche.egress.rules import Destination, is_showable
from cloche.egress.streams import TokenBucket, Verdict
from cloche.network_policy import EntryVerdict, NetworkEntry
from cloche.telemetry import log

# Network entries without a line of their own in the server's log: counted by target, so that none hides.

MAX_LOG_TARGETS = 200
# How many destinations have a line at once. Inventing destinations that are denied costs a program nothing.
FIRST_LINES = {"allowed": 1000, "failed": 200, "denied": 100}
OTHER_HOSTS = "others"


class LogTarget(NamedTuple):
    """The target of a connection, and its verdict."""

    verdict: str
    host: str
    port: int
    package: str = ""  # of an index: all of its packages are at one host


class LogTotals(NamedTuple):
    lines: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0

    def plus_entry(self, entry: NetworkEntry) -> LogTotals:
        sent, received = self.sent_bytes + entry.sent_bytes, self.received_bytes + entry.received_bytes
        return LogTotals(self.lines + 1, sent, received)


def log_target(entry: NetworkEntry) -> LogTarget:
    package = entry.reason if entry.protocol == "package" else ""
    return LogTarget(entry.verdict, entry.host, entry.port, package)


class SeenTargets:
    """The places of a sandbox that have had a line: so many of each verdict."""

    def __init__(self) -> None:
        self._seen: dict[str, set[LogTarget]] = {verdict: set() for verdict in FIRST_LINES}

    def is_first(self, place: LogTarget) -> bool:
        """Whether it is new, and there was room to remember it."""
        seen = self._seen[place.verdict]
        if place in seen or len(seen) >= FIRST_LINES[place.verdict]:
            return False
        seen.add(place)
        return True


class UnloggedEntries:
    """Sums by place. Where there are too many places, the rest of a verdict is one."""

    def __init__(self) -> None:
        self._sums: dict[LogTarget, LogTotals] = {}

    def __bool__(self) -> bool:
        return bool(self._sums)

    def add(self, place: LogTarget, entry: NetworkEntry) -> None:
        if place not in self._sums and len(self._sums) >= MAX_LOG_TARGETS:
            place = LogTarget(place.verdict, OTHER_HOSTS, 0)
        self._sums[place] = self._sums.get(place, LogTotals()).plus_entry(entry)

    def take(self) -> dict[str, str | int]:
        """The fields of the line for the place that has waited longest. It is counted from nothing then."""
        place = next(iter(self._sums))
        about = {**place._asdict(), **self._sums.pop(place)._asdict()}
        return {name: value for name, value in about.items() if value not in ("", 0)}


# Counters of all egress connections of this process, for `/metrics`.


class EgressCounters:
    """Counts ended connections."""

    def __init__(self) -> None:
        self.connections: Counter[tuple[str, str]] = Counter()  # verdict, protocol
        self.sent_bytes = 0
        self.received_bytes = 0

    def count(self, entry: NetworkEntry) -> None:
        self.connections[entry.verdict, entry.protocol] += 1
        self.sent_bytes += entry.sent_bytes
        self.received_bytes += entry.received_bytes


EntryProtocol = Literal["connect", "http", "socks", "package", "other"]

MAX_REASON = 500
# A sandbox can be denied thousands of times in a second, and the server's log is for all of them.
LINES_AT_ONCE = 60
LINES_PER_SECOND = 2.0
SUMMING_SECONDS = 10.0  # after which omitted lines are summed up, as far as there is room


class NetworkJournal:
    """A sandbox's network log, the oldest first. The oldest entries make room for new ones, and are counted.

    The server's log has the first line of each place at once, and so many others. The rest it has as sums.
    """

    def __init__(self, sandbox: str, owner: str, size: int, counters: EgressCounters | None = None):
        self._sandbox_fields = {"sandbox": sandbox, "owner": owner}
        self._entries: deque[NetworkEntry] = deque(maxlen=size)
        self._lines = TokenBucket(LINES_AT_ONCE, LINES_PER_SECOND)
        self._faults = TokenBucket(LINES_AT_ONCE, LINES_PER_SECOND)  # apart, so that no flood of the others hides them
        self._seen = SeenTargets()
        self._left_out = UnloggedEntries()
        self._summing: asyncio.TimerHandle | None = None
        self._counters = counters or EgressCounters()
        self.count = 0  # of all that were ever written

    @property
    def owner(self) -> str:
        """The owner of the sandbox."""
        return self._sandbox_fields["owner"]

    @property
    def entries(self) -> list[NetworkEntry]:
        """The entries in the order in which they began: they are written when they end."""
        return sorted(self._entries, key=lambda entry: entry.at)

    @property
    def dropped(self) -> int:
        """How many made room."""
        return self.count - len(self._entries)

    def write(self, entry: NetworkEntry) -> None:
        self._entries.append(entry)
        self.count += 1
        self._counters.count(entry)
        place = log_target(entry)
        has_turn = self._lines.take()
        if self._seen.is_first(place) or has_turn:
            about = {name: getattr(entry, name) for name in _LOGGED_FIELDS if getattr(entry, name) not in ("", 0)}
            log.info("network." + entry.verdict, **self._sandbox_fields, **about)
        else:
            self._left_out.add(place, entry)
            self._log_totals_later()

    def log_broken(self, error: BaseException) -> None:
        """Logs a fault of the proxy in the server's log alone, rate-limited: a program may be able to cause it
        often.
        """
        if self._faults.take():
            place = traceback.extract_tb(error.__traceback__)[-1]
            about = {"error": type(error).__name__, "at": f"{place.name}:{place.lineno}"}
            log.error("network.broken", **self._sandbox_fields, **about)

    def close(self) -> None:
        """Says in the server's log all that was left out there."""
        if self._summing is not None:
            self._summing.cancel()
            self._summing = None
        while self._left_out:
            self._log_totals()

    def _log_totals_later(self) -> None:
        if self._summing is None:
            self._summing = asyncio.get_running_loop().call_later(SUMMING_SECONDS, self._log_due_totals)

    def _log_due_totals(self) -> None:
        self._summing = None
        while self._left_out and self._lines.take():
            self._log_totals()
        if self._left_out:
            self._log_totals_later()

    def _log_totals(self) -> None:
        log.info("network.left_out", **self._sandbox_fields, **self._left_out.take())


_LOGGED_FIELDS = ("protocol", "host", "port", "reason", "sent_bytes", "received_bytes")


class ConnectionAttempt:
    """One connection of a program. It is written down once, when it has ended."""

    def __init__(self, journal: NetworkJournal, protocol: EntryProtocol = "other"):
        self._journal = journal
        self._began_at, self._clock = time.time(), time.monotonic()
        self.protocol: EntryProtocol = protocol
        self.destination: Destination | None = None
        self.host = ""  # empty if the request names no valid destination
        self.package = ""  # of an index: its kind and name, both checked
        self.let_through = False
        self.sent_bytes = 0
        self.received_bytes = 0
        self._written = False

    def stop(self, reason: str) -> None:
        """The connection ended without a refusal: it counts as allowed if it had been let through, else as failed."""
        self.end("allowed" if self.let_through else "failed", reason)

    def end(self, verdict: Verdict, reason: str = "") -> None:
        """Writes the entry. Only the first call counts."""
        if not self._written:
            self._written = True
            self._journal.write(self._make_entry(verdict, reason[:MAX_REASON]))

    @property
    def open_entry(self) -> NetworkEntry | None:
        """The entry so far. None where the attempt has ended, or has no destination yet."""
        return None if self._written or self.destination is None else self._make_entry("open", "")

    def _make_entry(self, verdict: EntryVerdict, reason: str) -> NetworkEntry:
        host, port = (self.destination.host, self.destination.port) if self.destination else (self.host, 0)
        return NetworkEntry(
            at=self._began_at,
            protocol=self.protocol,
            host=host if is_showable(host) else "",
            port=port,
            verdict=verdict,
            reason=": ".join(filter(None, (self.package, reason))),
            sent_bytes=self.sent_bytes,
            received_bytes=self.received_bytes,
            seconds=round(time.monotonic() - self._clock, 6),
        )
