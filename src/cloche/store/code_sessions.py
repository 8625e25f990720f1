"""What was in /mnt/data of LibreChat's runtime sessions, so that one that has ended goes on where it was."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable

from cloche.model import Struct
from cloche.store.code_files import TOUCH_SECONDS
from cloche.store.database import Database

MAX_SESSIONS = 10_000


class WorkspaceEntry(Struct):
    """A file of a /mnt/data, or an empty directory: that has no file."""

    path: str  # relative
    session: str = ""
    file: str = ""


class StoredCodeSessions:
    """A session that nobody used for `kept_seconds` is forgotten. Until then, the files of its workspace are kept.

    A `key` is the caller's own: let it be a hash of who asks and of what they call the session. An `owner` is whoever
    shall not have more than `most` of them.
    """

    def __init__(self, database: Database, kept_seconds: float):
        self._database = database
        self._kept_seconds = kept_seconds + TOUCH_SECONDS

    async def remember_workspace(
        self, key: str, owner: str, entries: Iterable[WorkspaceEntry], *, most: int = MAX_SESSIONS
    ) -> None:
        """It is this now, and in use. Of too many, those are forgotten that nobody used for longest."""
        rows = [(key, entry.path, entry.session, entry.file) for entry in entries]
        await self._database.do(lambda db: _remember(db, key, owner, rows, most))

    async def workspace(self, key: str, owner: str) -> list[WorkspaceEntry] | None:
        """What it was, in the order of its paths; None for one that is not known. It counts as a use."""
        since = time.time() - self._kept_seconds
        rows = await self._database.do(lambda db: _recall(db, key, owner, since))
        if rows is None:
            return None
        return [WorkspaceEntry(path=path, session=session, file=file) for path, session, file in rows]

    def touch(self, key: str, owner: str) -> None:
        """It is in use now. Never waits."""
        self._database.do_later(lambda db: _touch(db, key, owner))

    async def forget(self, key: str, owner: str) -> None:
        """Harmless when it is not known. Its files live on their own time."""
        await self._database.do(lambda db: _forget(db, key, owner))


def _remember(db: sqlite3.Connection, key: str, owner: str, rows: list[tuple[str, str, str, str]], most: int) -> None:
    with db:
        put = "INSERT INTO code_sessions (key, owner, used_at) VALUES (?, ?, ?)"
        db.execute(f"{put} ON CONFLICT (key) DO UPDATE SET used_at = excluded.used_at", (key, owner, time.time()))
        db.execute("DELETE FROM code_workspaces WHERE key = ?", (key,))
        db.executemany("INSERT OR REPLACE INTO code_workspaces (key, path, session, file) VALUES (?, ?, ?, ?)", rows)
        old = "SELECT key FROM code_sessions WHERE owner = ? ORDER BY used_at DESC LIMIT -1 OFFSET ?"
        for (gone,) in db.execute(old, (owner, most)).fetchall():
            db.execute("DELETE FROM code_workspaces WHERE key = ?", (gone,))
            db.execute("DELETE FROM code_sessions WHERE key = ?", (gone,))


def _recall(db: sqlite3.Connection, key: str, owner: str, since: float) -> list[tuple[str, str, str]] | None:
    known = "SELECT 1 FROM code_sessions WHERE key = ? AND owner = ? AND used_at > ?"
    if db.execute(known, (key, owner, since)).fetchone() is None:
        return None
    _touch(db, key, owner)
    query = "SELECT path, session, file FROM code_workspaces WHERE key = ? ORDER BY path"
    return db.execute(query, (key,)).fetchall()


def _touch(db: sqlite3.Connection, key: str, owner: str) -> None:
    with db:
        db.execute("UPDATE code_sessions SET used_at = ? WHERE key = ? AND owner = ?", (time.time(), key, owner))


def _forget(db: sqlite3.Connection, key: str, owner: str) -> None:
    with db:
        if db.execute("DELETE FROM code_sessions WHERE key = ? AND owner = ?", (key, owner)).rowcount:
            db.execute("DELETE FROM code_workspaces WHERE key = ?", (key,))
