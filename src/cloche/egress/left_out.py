"""What the server's log has no line of its own for: counted by where it went, so that nothing hides in the count."""

from __future__ import annotations

from typing import NamedTuple

from cloche.network_policy import NetworkEntry

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
