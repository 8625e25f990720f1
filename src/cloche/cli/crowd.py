"""How many connections there may be at once, and who has to go when there is no room for one more.

Each takes a descriptor, and so does much of every sandbox: whoever connects and says nothing must not use them up. It
takes no key to connect, so whose the next one is cannot be told before it is let in. Therefore room is made for it, by
those who have most, and nobody's connections keep everybody else out.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Protocol

from cloche.telemetry import log

SHARE = 4  # of the descriptors that this process may have, connections take one in so many
LEAST = 32
SAID_SECONDS = 10.0  # at most so often
AT_ONCE = 16  # one in so many goes: to look for them takes a while
LONG_SECONDS = 0.005  # after a search that took so long, for little, there is none
REST = 20  # for so many times as long


class Visitor(Protocol):
    """A connection."""

    @property
    def peer(self) -> str:
        """Where it comes from."""

    @property
    def owner(self) -> str | None:
        """For whom it counts, once that is known; None for a stranger's."""

    @property
    def is_waited_for(self) -> bool:
        """Whether it owes us something: a request, the rest of one that has taken long, or who it is."""

    @property
    def has_asked(self) -> bool:
        """Whether a whole request has ever come."""

    def abandon(self) -> None: ...


class Crowd:
    """Of one listener. Those are sent away first who asked for nothing, of whoever has most of them, the oldest.

    Where everybody is being answered, it is the newest of the owner with the most connections, unless that one has no
    more than everybody would get.
    """

    def __init__(self, most: int | None = None):
        self._most = most or most_connections()
        self._there: dict[Visitor, None] = {}  # the oldest first
        self._said_at = -SAID_SECONDS
        self._rests_until = 0.0

    def enter(self, visitor: Visitor) -> bool:
        """Whether there is room, which may have been made."""
        if len(self._there) >= self._most:
            self._make_room()
        if len(self._there) >= self._most:
            return False
        self._there[visitor] = None
        return True

    def leave(self, visitor: Visitor) -> None:
        """Harmless when it is not there."""
        self._there.pop(visitor, None)

    def _make_room(self) -> None:
        began_at = time.monotonic()
        if began_at < self._rests_until:
            return
        self._say_full(began_at)
        wanted = max(self._most // AT_ONCE, 1)
        leaving = list(islice(self._idlest(), wanted)) or self._crowding(wanted)
        for visitor in leaving:
            self.leave(visitor)
            visitor.abandon()
        took = time.monotonic() - began_at
        if took > LONG_SECONDS and len(leaving) < wanted // 2:  # else the next search is far away
            self._rests_until = began_at + REST * took

    def _say_full(self, now: float) -> None:
        if now - self._said_at >= SAID_SECONDS:
            self._said_at = now
            log.warning("connections.full", most=self._most)

    def _idlest(self) -> Iterator[Visitor]:
        """Strangers first, and then whoever can connect again without having lost anything."""
        idle = [each for each in self._there if each.is_waited_for]
        yield from _of_most((each for each in idle if not each.has_asked), {})
        yield from _of_most((each for each in idle if each.has_asked and each.owner is None), {})
        owned = [each for each in idle if each.has_asked and each.owner is not None]
        if owned:
            yield from _of_most(owned, self._owners())

    def _crowding(self, wanted: int) -> list[Visitor]:
        """The newest of the owner with the most, and no more than so many. The next one may be another's."""
        counts = self._owners()
        if not counts:
            return []
        (owner, count), *others = counts.most_common(2)
        share = max(self._most // (len(counts) + 1), 1)
        if count <= share:
            return []
        beyond = max(count - max(share, *(theirs for _, theirs in others), 0), 1)
        return list(islice((each for each in reversed(self._there) if each.owner == owner), min(beyond, wanted)))

    def _owners(self) -> Counter[str]:
        return Counter(owner for each in self._there if (owner := each.owner) is not None)


def _of_most(visitors: Iterable[Visitor], owners: dict[str, int]) -> list[Visitor]:
    """Those of whoever has most first: by owner, where such are given, else by where they come from."""
    found = list(visitors)
    peers = Counter(each.peer for each in found)
    return sorted(found, key=lambda each: (-owners.get(each.owner or "", 0), -peers[each.peer]))


def most_connections() -> int:
    return max(LEAST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // SHARE)
