"""A store that is locked, full or read-only for a while: what that is called, and the work that waits for its end."""

from __future__ import annotations

import sqlite3
import time
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from cloche import errors
from cloche.telemetry import log

Work: TypeAlias = Callable[[sqlite3.Connection], None]

MAX_HELD = 512
WHY = {
    sqlite3.SQLITE_BUSY: "another process holds its lock: try again in a moment",
    sqlite3.SQLITE_LOCKED: "another process holds its lock: try again in a moment",
    sqlite3.SQLITE_FULL: "its disk is full: the operator must make room",
    sqlite3.SQLITE_READONLY: "it cannot be written: its file or file system is read-only",
    sqlite3.SQLITE_PERM: "it cannot be written: its file is somebody else's",
    sqlite3.SQLITE_IOERR: "its disk fails, or is full",
    sqlite3.SQLITE_CANTOPEN: "its file, or one beside it, cannot be opened",
    sqlite3.SQLITE_CORRUPT: "its file is damaged: move it away, or put a copy of it back, and start again",
    sqlite3.SQLITE_NOTADB: "its file is damaged: move it away, or put a copy of it back, and start again",
}
"""By SQLite's primary code. Whatever else goes wrong is a mistake of ours."""


class Unusable(errors.Unavailable, sqlite3.OperationalError):
    """The store cannot be used now. Also an sqlite3.Error, for whoever goes on without it."""

    retry_after_seconds = 2.0

    def __init__(self, message: str, *, locked: bool):
        super().__init__(message)
        self.locked = locked


def unusable(error: sqlite3.Error) -> Unusable | None:
    """What it is if the store cannot be used now; None for a mistake of whoever used it."""
    code = getattr(error, "sqlite_errorcode", -1) & 0xFF
    if code not in WHY:
        return None
    locked = code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
    return Unusable(f"the store cannot be used: {WHY[code]}", locked=locked)


class Held:
    """Work that is to be done later, in its order. When there is too much of it, the oldest is given up."""

    def __init__(self) -> None:
        self._works: deque[Work] = deque()
        self._tried_at = 0.0

    def __len__(self) -> int:
        return len(self._works)

    @property
    def first(self) -> Work | None:
        return self._works[0] if self._works else None

    def add(self, work: Work) -> None:
        if not self._works:
            self.tried()
        self._works.append(work)
        if len(self._works) > MAX_HELD:
            self._works.popleft()
            log.error("store.lost", works=1)

    def drop(self, work: Work) -> None:
        """It is done."""
        if self.first is work:
            self._works.popleft()

    def tried(self) -> None:
        self._tried_at = time.monotonic()

    def is_due(self, every_seconds: float) -> bool:
        """Whether there is some, and the last attempt was that long ago."""
        return bool(self._works) and time.monotonic() - self._tried_at >= every_seconds
