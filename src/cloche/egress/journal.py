"""What became of each connection: kept with the sandbox, and said in the server's log."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections import Counter, deque
from typing import Literal, NamedTuple

from cloche.egress.rules import Destination, is_showable
from cloche.egress.streams import Pace, Verdict
from cloche.network_policy import EntryVerdict, NetworkEntry
from cloche.telemetry import log

# What the server's log has no line of its own for: counted by where it went, so that nothing hides in the count.

MAX_PLACES = 200
# How many places have a line at once, however much else is said. Denied ones cost a program nothing to think of.
FIRST_LINES = {"allowed": 1000, "failed": 200, "denied": 100}
OTHERS = "others"


class Place(NamedTuple):
    """Where something went, and what became of it."""

    verdict: str
    host: str
    port: int
    package: str = ""  # of an index: all of its packages are at one host


class Sum(NamedTuple):
    lines: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0

    def plus(self, entry: NetworkEntry) -> Sum:
        sent, received = self.sent_bytes + entry.sent_bytes, self.received_bytes + entry.received_bytes
        return Sum(self.lines + 1, sent, received)


def place_of(entry: NetworkEntry) -> Place:
    package = entry.reason if entry.protocol == "package" else ""
    return Place(entry.verdict, entry.host, entry.port, package)


class Seen:
    """The places of a sandbox that have had a line: so many of each verdict."""

    def __init__(self) -> None:
        self._seen: dict[str, set[Place]] = {verdict: set() for verdict in FIRST_LINES}

    def is_first(self, place: Place) -> bool:
        """Whether it is new, and there was room to remember it."""
        seen = self._seen[place.verdict]
        if place in seen or len(seen) >= FIRST_LINES[place.verdict]:
            return False
        seen.add(place)
        return True


class LeftOut:
    """Sums by place. Where there are too many places, the rest of a verdict is one."""

    def __init__(self) -> None:
        self._sums: dict[Place, Sum] = {}

    def __bool__(self) -> bool:
        return bool(self._sums)

    def add(self, place: Place, entry: NetworkEntry) -> None:
        if place not in self._sums and len(self._sums) >= MAX_PLACES:
            place = Place(place.verdict, OTHERS, 0)
        self._sums[place] = self._sums.get(place, Sum()).plus(entry)

    def take(self) -> dict[str, str | int]:
        """The fields of the line for the place that has waited longest. It is counted from nothing then."""
        place = next(iter(self._sums))
        about = {**place._asdict(), **self._sums.pop(place)._asdict()}
        return {name: value for name, value in about.items() if value not in ("", 0)}


# What went through all doors of this process, for `/metrics`.


class Tally:
    """Of connections that have ended."""

    def __init__(self) -> None:
        self.connections: Counter[tuple[str, str]] = Counter()  # verdict, protocol
        self.sent_bytes = 0
        self.received_bytes = 0

    def count(self, entry: NetworkEntry) -> None:
        self.connections[entry.verdict, entry.protocol] += 1
        self.sent_bytes += entry.sent_bytes
        self.received_bytes += entry.received_bytes


Protocol = Literal["connect", "http", "socks", "package", "other"]

MAX_REASON = 500
# A sandbox can be denied thousands of times in a second, and the server's log is for all of them.
LINES_AT_ONCE = 60
LINES_PER_SECOND = 2.0
SUMMING_SECONDS = 10.0  # after which what was left out is said, as far as there is room


class Journal:
    """A sandbox's network log, the oldest first. The oldest entries make room for new ones, and are counted.

    The server's log has the first line of each place at once, and so many others. The rest it has as sums.
    """

    def __init__(self, sandbox: str, owner: str, size: int, tally: Tally | None = None):
        self._whose = {"sandbox": sandbox, "owner": owner}
        self._entries: deque[NetworkEntry] = deque(maxlen=size)
        self._lines = Pace(LINES_AT_ONCE, LINES_PER_SECOND)
        self._faults = Pace(LINES_AT_ONCE, LINES_PER_SECOND)  # apart, so that no flood of the others hides them
        self._seen = Seen()
        self._left_out = LeftOut()
        self._summing: asyncio.TimerHandle | None = None
        self._tally = tally or Tally()
        self.count = 0  # of all that were ever written

    @property
    def owner(self) -> str:
        """Of the sandbox."""
        return self._whose["owner"]

    @property
    def entries(self) -> list[NetworkEntry]:
        """In the order in which they began: they are written when they end."""
        return sorted(self._entries, key=lambda entry: entry.at)

    @property
    def dropped(self) -> int:
        """How many made room."""
        return self.count - len(self._entries)

    def write(self, entry: NetworkEntry) -> None:
        self._entries.append(entry)
        self.count += 1
        self._tally.count(entry)
        place = place_of(entry)
        has_turn = self._lines.take()
        if self._seen.is_first(place) or has_turn:
            about = {name: getattr(entry, name) for name in _SAID if getattr(entry, name) not in ("", 0)}
            log.info("network." + entry.verdict, **self._whose, **about)
        else:
            self._left_out.add(place, entry)
            self._sum_later()

    def say_broken(self, error: BaseException) -> None:
        """A fault of ours, in the server's log alone: what a program can bring about it can bring about often."""
        if self._faults.take():
            place = traceback.extract_tb(error.__traceback__)[-1]
            about = {"error": type(error).__name__, "at": f"{place.name}:{place.lineno}"}
            log.error("network.broken", **self._whose, **about)

    def close(self) -> None:
        """Says in the server's log all that was left out there."""
        if self._summing is not None:
            self._summing.cancel()
            self._summing = None
        while self._left_out:
            self._say_sum()

    def _sum_later(self) -> None:
        if self._summing is None:
            self._summing = asyncio.get_running_loop().call_later(SUMMING_SECONDS, self._sum_up)

    def _sum_up(self) -> None:
        self._summing = None
        while self._left_out and self._lines.take():
            self._say_sum()
        if self._left_out:
            self._sum_later()

    def _say_sum(self) -> None:
        log.info("network.left_out", **self._whose, **self._left_out.take())


_SAID = ("protocol", "host", "port", "reason", "sent_bytes", "received_bytes")


class Attempt:
    """One connection of a program. It is written down once, when it has ended."""

    def __init__(self, journal: Journal, protocol: Protocol = "other"):
        self._journal = journal
        self._began_at, self._clock = time.time(), time.monotonic()
        self.protocol: Protocol = protocol
        self.asked: Destination | None = None
        self.host = ""  # where what was asked for is no destination
        self.package = ""  # of an index: its kind and name, both checked
        self.let_through = False
        self.sent_bytes = 0
        self.received_bytes = 0
        self._written = False

    def stop(self, reason: str) -> None:
        """It ended, not by a word of ours: it was allowed if it had been let through, and had failed if not."""
        self.end("allowed" if self.let_through else "failed", reason)

    def end(self, verdict: Verdict, reason: str = "") -> None:
        """The first word counts."""
        if not self._written:
            self._written = True
            self._journal.write(self._entry(verdict, reason[:MAX_REASON]))

    @property
    def still_open(self) -> NetworkEntry | None:
        """What can be said of it so far. None where it has ended, or has not yet said where to."""
        return None if self._written or self.asked is None else self._entry("open", "")

    def _entry(self, verdict: EntryVerdict, reason: str) -> NetworkEntry:
        host, port = (self.asked.host, self.asked.port) if self.asked else (self.host, 0)
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
