"""How many connections there may be at once, and who has to go when there is no room for one more.

Each takes a descriptor, and so does much of every sandbox: whoever connects and says nothing must not use them up. It
takes no key to connect, so that cannot be told by owner.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from cloche.telemetry import log

SHARE = 4  # of the descriptors that this process may have, connections take one in so many
LEAST = 32
SAID_SECONDS = 10.0  # at most so often
AT_ONCE = 16  # one in so many goes: to look for them takes a while


class Visitor(Protocol):
    """A connection."""

    @property
    def peer(self) -> str:
        """Where it comes from."""

    @property
    def is_waited_for(self) -> bool:
        """Whether it owes us something: a request, or the rest of one that has taken long."""

    @property
    def has_asked(self) -> bool:
        """Whether a whole request has ever come."""

    def abandon(self) -> None: ...


class Crowd:
    """Of one listener. Those are sent away first who asked for nothing, of whoever has most of them, the oldest."""

    def __init__(self, most: int | None = None):
        self._most = most or most_connections()
        self._there: dict[Visitor, None] = {}  # the oldest first
        self._said_at = -SAID_SECONDS

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
        leaving = list(self._idlest())[: max(self._most // AT_ONCE, 1)]
        self._say_full()
        for visitor in leaving:
            self.leave(visitor)
            visitor.abandon()

    def _say_full(self) -> None:
        now = time.monotonic()
        if now - self._said_at >= SAID_SECONDS:
            self._said_at = now
            log.warning("connections.full", most=self._most)

    def _idlest(self) -> Iterator[Visitor]:
        idle = [each for each in self._there if each.is_waited_for]
        strangers = Counter(each.peer for each in idle if not each.has_asked)
        all_idle = Counter(each.peer for each in idle)
        yield from sorted((each for each in idle if not each.has_asked), key=lambda each: -strangers[each.peer])
        yield from sorted((each for each in idle if each.has_asked), key=lambda each: -all_idle[each.peer])


def most_connections() -> int:
    return max(LEAST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // SHARE)
