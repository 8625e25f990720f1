"""Archives of files that builds of templates copy, kept by owner and by the client's own digest of them."""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from pathlib import Path

from cloche import errors
from cloche.model import GIB
from cloche.store.allowance import Allow, anything
from cloche.store.blobs import Blobs
from cloche.store.database import Database
from cloche.store.past import surely_past

MAX_OWNER_BYTES = 4 * GIB  # of one owner; the least recently used go first
MAX_OWNER_FILES = 1000
KEPT_SECONDS = 7 * 86400.0  # after their last use
PREFIX = "bf"


class BuildFiles:
    """The digest is what a client calls its files by. It says nothing of the archive, so each owner has their own."""

    def __init__(self, database: Database, directory: Path):
        self._database = database
        self.allow: Allow = anything
        self._blobs = Blobs(directory)

    async def has(self, owner: str, digest: str) -> bool:
        """Whether it is there. That counts as a use."""
        now, id = time.time(), _id(owner, digest)
        return await self._database.do(lambda db: _touch(db, id, now))

    async def put(self, owner: str, digest: str, chunks: AsyncIterable[bytes], max_bytes: int) -> None:
        """Raises TooLarge, Unavailable, QuotaExceeded, and what the chunks raise; what was there before stays then."""
        await self.allow(owner, 0)
        id = _id(owner, digest)
        size = await self._blobs.put(id, chunks, max_bytes)
        for old in await self._database.do(lambda db: _add(db, id, owner, size)):
            await self._blobs.remove(old)

    async def chunks(self, owner: str, digest: str) -> AsyncGenerator[bytes, None]:
        """Raises FileNotFound."""
        id = _id(owner, digest)
        try:
            return await self._blobs.chunks(id)
        except errors.FileNotFound:  # somebody removed it: who uploads it again must not be told that it is there
            await self._database.do(lambda db: _forget(db, [id]))
            raise

    async def clean(self) -> None:
        """Removes what nobody has used for long, and what a process left that was killed."""
        before = surely_past() - KEPT_SECONDS
        for old in await self._database.do(lambda db: _remove_before(db, before)):
            await self._blobs.remove(old)
        await self._blobs.remove_orphans((PREFIX,), self._known)

    async def _known(self, ids: list[str]) -> set[str]:
        found = await self._database.do(lambda db: db.execute("SELECT id FROM template_files").fetchall())
        return {id for (id,) in found} & set(ids)


def _id(owner: str, digest: str) -> str:
    return PREFIX + hashlib.sha256(f"{owner}\0{digest}".encode()).hexdigest()


def _touch(db: sqlite3.Connection, id: str, now: float) -> bool:
    with db:
        return bool(db.execute("UPDATE template_files SET used_at = ? WHERE id = ?", (now, id)).rowcount)


def _add(db: sqlite3.Connection, id: str, owner: str, size: int) -> Sequence[str]:
    """What had to go for it."""
    with db:
        db.execute("INSERT OR REPLACE INTO template_files VALUES (?, ?, ?, ?)", (id, owner, size, time.time()))
        query = "SELECT id, bytes FROM template_files WHERE owner = ? ORDER BY used_at DESC"
        kept, gone = 0, []
        for number, (each, bytes) in enumerate(db.execute(query, (owner,)).fetchall(), 1):
            kept += bytes
            if (kept > MAX_OWNER_BYTES or number > MAX_OWNER_FILES) and each != id:
                gone.append(each)
        _forget_in(db, gone)
        return gone


def _remove_before(db: sqlite3.Connection, before: float) -> Sequence[str]:
    with db:
        old = [id for (id,) in db.execute("SELECT id FROM template_files WHERE used_at < ?", (before,)).fetchall()]
        _forget_in(db, old)
        return old


def _forget(db: sqlite3.Connection, ids: Sequence[str]) -> None:
    with db:
        _forget_in(db, ids)


def _forget_in(db: sqlite3.Connection, ids: Sequence[str]) -> None:
    db.executemany("DELETE FROM template_files WHERE id = ?", [(id,) for id in ids])
