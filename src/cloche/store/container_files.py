"""Files of containers that somebody was told of: their ids, and which contents are kept beyond the container's end."""

from __future__ import annotations

import posixpath
import secrets
import sqlite3
import time
from collections.abc import Iterable
from typing import Literal

import msgspec

from cloche import errors
from cloche.model import Struct
from cloche.store.allowance import Allow, anything
from cloche.store.base import SHUT_DOWN
from cloche.store.blobs import Blobs
from cloche.store.database import Database
from cloche.store.past import surely_past

PREFIX = "cfile_"
COPY = "copy:"  # before a file's id in `origin`: it has changed, and its blob is one of its own
KILLED_SECONDS = 3600.0  # a turn whose container was killed under it puts its files into the next one
Source = Literal["user", "assistant"]


class ContainerFile(Struct):
    id: str
    sandbox: str
    owner: str
    path: str  # absolute, inside
    source: Source
    bytes: int
    created_at: float
    modified_at: float = 0.0  # of the content that is kept, as the sandbox said
    kept: bool = False  # whether the blob of this id has its content
    origin: str | None = None  # what it was made from: a file's id (the blob is a link of that file's), or else

    @property
    def made_from(self) -> str | None:
        """A file's id, or a digest: the same is not put into a container twice."""
        return None if self.origin is None else self.origin.removeprefix(COPY)

    @property
    def name(self) -> str:
        return posixpath.basename(self.path)

    @property
    def shown(self) -> bool:
        """A picture that code displayed: it is kept, and in no directory of the sandbox."""
        return self.name.startswith(self.id)


_COLUMNS = ContainerFile.__struct_fields__
_GET = f"SELECT {', '.join(_COLUMNS)} FROM container_files"
_VALUES = f"({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"
_ADD = f"INSERT OR IGNORE INTO container_files {_VALUES}"
_PUT = f"INSERT OR REPLACE INTO container_files {_VALUES}"


def new_container_file_id() -> str:
    """It begins with the time, so that ids sort by age."""
    return f"{PREFIX}{int(time.time() * 1000):012x}{secrets.token_hex(10)}"


class StoredContainerFiles:
    def __init__(self, database: Database, blobs: Blobs):
        self._database = database
        self.allow: Allow = anything
        self.blobs = blobs

    async def get(self, owner: str, sandbox: str, id: str) -> ContainerFile:
        """Raises FileNotFound."""
        query = f"{_GET} WHERE id = ? AND sandbox = ? AND owner = ?"
        row = await self._database.do(lambda db: db.execute(query, (id, sandbox, owner)).fetchone())
        if row is None:
            raise errors.FileNotFound(f"Container file with id '{id[:100]}' not found.")
        return _file(row)

    async def of_sandbox(self, owner: str, sandbox: str) -> list[ContainerFile]:
        """All of that sandbox, the oldest first."""
        query = f"{_GET} WHERE sandbox = ? AND owner = ? ORDER BY id"
        rows = await self._database.do(lambda db: db.execute(query, (sandbox, owner)).fetchall())
        return [_file(row) for row in rows]

    async def register(self, files: Iterable[ContainerFile]) -> list[ContainerFile]:
        """Those rows; of a path that is registered already, the one that is there."""
        wanted = list(files)
        return await self._database.do(lambda db: _register(db, wanted))

    async def put(self, file: ContainerFile) -> None:
        """Replaces the row of that id, and one of that path."""
        await self._database.do(lambda db: _put(db, file))

    async def mark_kept(self, file: ContainerFile) -> bool:
        """Its content is in its blob now. False if it was removed meanwhile."""
        return await self._database.do(lambda db: _mark_kept(db, file))

    async def kept_bytes(self, owner: str, sandbox: str, *, without: str | None = None) -> tuple[int, int]:
        """Of that owner's contents, and of that sandbox's, as far as they are copies of their own.

        `without` is the id of a file that does not count.
        """
        return await self._database.do(lambda db: _kept_bytes(db, owner, sandbox, without))

    async def remove(self, files: Iterable[ContainerFile]) -> None:
        """Their rows, and what is kept of them."""
        gone = list(files)
        await self._database.do(lambda db: _remove(db, [file.id for file in gone]))
        for file in gone:
            if file.kept:
                await self.blobs.remove(file.id)

    async def keep_no_more(self, file: ContainerFile) -> None:
        """Its content; its id stays, since the file is still there."""
        await self._database.do(lambda db: _mark_not_kept(db, [file.id]))
        await self.blobs.remove(file.id)

    async def lose(self, files: Iterable[ContainerFile]) -> None:
        """Of files that are gone nothing is kept. Rows with an origin stay: what code removed is not to come again."""
        gone = list(files)
        await self._database.do(lambda db: _mark_not_kept(db, [file.id for file in gone if file.origin is not None]))
        await self._database.do(lambda db: _remove(db, [file.id for file in gone if file.origin is None]))
        for file in gone:
            if file.kept:
                await self.blobs.remove(file.id)

    async def prune(self, before: float) -> None:
        """Removes what is older than that, and what is left of sandboxes that their owners killed."""
        query = f"""{_GET} WHERE created_at < ? OR sandbox IN
            (SELECT id FROM sandboxes WHERE state = 'killed' AND end_reason IS NOT ? AND ended_at < ?)"""
        values = (before, SHUT_DOWN, surely_past() - KILLED_SECONDS)
        rows = await self._database.do(lambda db: db.execute(query, values).fetchall())
        await self.remove(_file(row) for row in rows)


def _register(db: sqlite3.Connection, files: list[ContainerFile]) -> list[ContainerFile]:
    with db:
        db.executemany(_ADD, [msgspec.structs.astuple(file) for file in files])
    query = f"{_GET} WHERE sandbox = ? AND path = ?"
    return [_file(db.execute(query, (file.sandbox, file.path)).fetchone()) for file in files]


def _put(db: sqlite3.Connection, file: ContainerFile) -> None:
    with db:
        db.execute(_PUT, msgspec.structs.astuple(file))


def _kept_bytes(db: sqlite3.Connection, owner: str, sandbox: str, without: str | None) -> tuple[int, int]:
    # A link takes no room while the file is there that it is of, which counts itself.
    query = """SELECT COALESCE(SUM(bytes), 0), COALESCE(SUM(bytes) FILTER (WHERE sandbox = ?), 0) FROM container_files
        WHERE owner = ? AND kept AND id IS NOT ? AND
        (origin IS NULL OR NOT EXISTS (SELECT 1 FROM files WHERE files.id = origin))"""
    all, own = db.execute(query, (sandbox, owner, without)).fetchone()
    return int(all), int(own)


def _mark_kept(db: sqlite3.Connection, file: ContainerFile) -> bool:
    with db:
        query = "UPDATE container_files SET kept = 1, bytes = ?, modified_at = ?, origin = ? WHERE id = ?"
        return db.execute(query, (file.bytes, file.modified_at, file.origin, file.id)).rowcount > 0


def _mark_not_kept(db: sqlite3.Connection, ids: list[str]) -> None:
    with db:
        db.executemany("UPDATE container_files SET kept = 0 WHERE id = ?", [(id,) for id in ids])


def _remove(db: sqlite3.Connection, ids: list[str]) -> None:
    with db:
        db.executemany("DELETE FROM container_files WHERE id = ?", [(id,) for id in ids])


def _file(row: tuple[object, ...]) -> ContainerFile:
    return msgspec.convert(dict(zip(_COLUMNS, row, strict=True)), ContainerFile, strict=False)
