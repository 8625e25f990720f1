"""How much memory requests take, from their first byte on: of all, and of one caller's."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from cloche.api.librechat.identity import Caller
from cloche.api.librechat.replies import too_many_programs


class Room:
    """Of the whole server, however programs come. Half of it can be one caller's."""

    def __init__(self, bytes: int):
        self._bytes = bytes
        self._held: Counter[Caller] = Counter()

    @contextlib.contextmanager
    def share(self, caller: Caller) -> Iterator[Share]:
        """For a request that comes now, until it needs none any more."""
        share = Share(self, caller)
        try:
            yield share
        finally:
            share.settle(0)

    def change(self, caller: Caller, more: int) -> None:
        """Less, if it is negative. Raises Refusal (503)."""
        if more > 0 and (self._held[caller] + more > self._bytes / 2 or self._held.total() + more > self._bytes):
            raise too_many_programs("the programs that come, run, or wait for their turn take too much memory")
        self._held[caller] += more
        if not self._held[caller]:
            del self._held[caller]


class Share:
    """What one request takes."""

    def __init__(self, room: Room, caller: Caller):
        self._room = room
        self._caller = caller
        self._bytes = 0

    def grow(self, bytes: int) -> None:
        """So much more of it has come. Raises Refusal (503)."""
        self.settle(self._bytes + bytes)

    def settle(self, bytes: int) -> None:
        """What is kept of it has that size: less than what has come, or more. Raises Refusal (503)."""
        self._room.change(self._caller, bytes - self._bytes)
        self._bytes = bytes
