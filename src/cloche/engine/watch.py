"""Watching a directory of a sandbox for changes."""

from __future__ import annotations

import secrets
import sys
from collections import deque
from types import TracebackType
from typing import Any

from cloche import errors
from cloche.engine.guest import Guest, clean
from cloche.engine.queue import Bell
from cloche.isolation.channel import Header
from cloche.model import MIB, FileChange, User

MAX_WATCHES = 64  # of one sandbox, whoever opened them
MAX_WAITING = 10_000
MAX_WAITING_BYTES = 1 * MIB  # of paths, as they lie in memory

_KINDS = ("created", "written", "removed", "renamed", "attributes")


class TooManyWatches(errors.InvalidRequest):
    """A sandbox has as many watches as it can have."""


class Watch:
    """An async iterator of FileChange between `__aenter__` and `__aexit__`.

    Up to 10,000 changes wait for a slow reader, or 1 MiB of paths; `missed` counts those beyond. When the kernel has
    dropped some inside the sandbox it grows too, by one: nobody knows how many they were.
    """

    def __init__(self, guest: Guest, path: str, *, recursive: bool, user: User):
        self.path = path
        self.missed = 0
        self._guest = guest
        self._fields: dict[str, Any] = {"path": path, "recursive": recursive, "user": user}
        self._id = "w" + secrets.token_hex(8)
        self._changes: deque[FileChange] = deque()
        self._waiting_bytes = 0
        self._bell = Bell()
        self._open = False

    async def __aenter__(self) -> Watch:
        """Raises TooManyWatches, what the sandbox's file system says, or Gone."""
        if self._guest.subscribers("changes") >= MAX_WATCHES:
            raise TooManyWatches(f"a sandbox can have {MAX_WATCHES} watches: stop one that you do not need")
        self._guest.subscribe("changes", self._id, self._on_changes)
        try:
            await self._guest.request("watch_start", watch=self._id, **self._fields)
        except BaseException:
            self._stop()
            raise
        self._open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stops watching; whoever waits for the next change gets the end of the iteration."""
        if not self._open:
            return
        self._open = False
        self._stop()
        self._bell.ring()

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> FileChange:
        """Raises Gone if the sandbox ends while it is watched."""
        while not self._changes:
            if not self._open:
                raise StopAsyncIteration
            await self._guest.wait(self._bell.heard())
        change = self._changes.popleft()
        self._waiting_bytes -= sys.getsizeof(change.path)
        return change

    async def news(self) -> bool:
        """Waits until there is a change or something was missed; False if it was closed. Raises Gone."""
        while not self._changes and not self.missed:
            if not self._open:
                return False
            await self._guest.wait(self._bell.heard())
        return True

    async def collect(self) -> list[FileChange]:
        """All that has changed up to now and was not told of yet. Raises Gone if the sandbox has ended."""
        await self.catch_up()
        return self.take()

    async def catch_up(self) -> None:
        """Waits until everything that has changed up to now is here. Raises Gone."""
        await self._guest.request("watch_collect")

    def take(self) -> list[FileChange]:
        """The changes that are here, without waiting."""
        changes, self._changes = list(self._changes), deque()
        self._waiting_bytes = 0
        return changes

    def _stop(self) -> None:
        self._guest.unsubscribe("changes", self._id)
        self._guest.tell("watch_stop", watch=self._id)

    def _on_changes(self, header: Header) -> None:
        changes = header.get("changes")
        for change in changes if isinstance(changes, list) else ():
            if isinstance(change, list) and len(change) == 2 and change[0] in _KINDS and isinstance(change[1], str):
                self._put(FileChange(kind=change[0], path=clean(change[1], 8192)))
        if header.get("missed") is True:
            self._miss()

    def _put(self, change: FileChange) -> None:
        size = sys.getsizeof(change.path)
        if len(self._changes) >= MAX_WAITING or self._waiting_bytes + size > MAX_WAITING_BYTES:
            self._miss()
            return
        self._changes.append(change)
        self._waiting_bytes += size
        self._bell.ring()

    def _miss(self) -> None:
        self.missed += 1
        self._bell.ring()
