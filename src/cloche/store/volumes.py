"""Named volumes in SQLite: whose they are, what they are called, and where their files are kept."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence

import msgspec

from cloche import errors
from cloche.model import Struct, VolumeInfo
from cloche.store.base import Allow, anything
from cloche.store.database import Database


class VolumeRecord(Struct):
    id: str
    owner: str
    name: str
    size_bytes: int  # that it can hold
    created_at: float
    image: str | None = None  # of its files as they were when they were saved last; None: they never were
    instance: str | None = None  # the host process that has it in use

    @property
    def info(self) -> VolumeInfo:
        """What is told of it."""
        return VolumeInfo(
            id=self.id, name=self.name, owner=self.owner, size_bytes=self.size_bytes, created_at=self.created_at
        )


_COLUMNS = ", ".join(VolumeRecord.__struct_fields__)


class StoredVolumes:
    """Those of one database, which somebody else opens and closes. All methods raise Unavailable where it fails."""

    def __init__(self, database: Database):
        self._database = database
        self.allow: Allow = anything

    async def add(self, volume: VolumeRecord, most: int) -> None:
        """Raises VolumeConflict where the owner has one of that name, InvalidRequest where they have `most`.

        Raises QuotaExceeded where they may not store as much as it can hold.
        """
        await self.allow(volume.owner, volume.size_bytes)
        await self._database.do(lambda db: _add(db, volume, most))

    async def find(self, ref: str, owner: str | None) -> VolumeRecord | None:
        """The one of that id or name; with None as the owner whoever's it is, by its id alone."""
        return await self._database.do(lambda db: _find(db, ref, owner))

    async def list(self, owner: str) -> Sequence[VolumeRecord]:
        """The oldest first."""
        query = f"SELECT {_COLUMNS} FROM volumes WHERE owner = ? ORDER BY created_at, id"
        rows = await self._database.do(lambda db: db.execute(query, (owner,)).fetchall())
        return [_record(row) for row in rows]

    async def claim(self, id: str, instance: str, is_live: Callable[[str], bool]) -> VolumeRecord:
        """It is that host process's until `release`. Raises VolumeConflict if another one has it, VolumeNotFound."""
        return await self._database.do(lambda db: _claim(db, id, instance, is_live))

    async def release(self, id: str, instance: str) -> None:
        query = "UPDATE volumes SET instance = NULL WHERE id = ? AND instance = ?"
        await self._database.do(lambda db: _write(db, query, (id, instance)))

    async def keep(self, id: str, image: str) -> bool:
        """Its files are that image's from now on. Whether it is still there."""
        query = "UPDATE volumes SET image = ? WHERE id = ?"
        return await self._database.do(lambda db: _write(db, query, (image, id)))

    async def remove(self, id: str) -> None:
        await self._database.do(lambda db: _write(db, "DELETE FROM volumes WHERE id = ?", (id,)))

    async def images(self) -> set[str]:
        """Those of all volumes, whoever's they are."""
        query = "SELECT image FROM volumes WHERE image IS NOT NULL"
        rows = await self._database.do(lambda db: db.execute(query).fetchall())
        return {image for (image,) in rows}


def not_found(ref: str) -> errors.VolumeNotFound:
    return errors.VolumeNotFound(f"there is no volume {ref!r}")


def _record(row: tuple[object, ...]) -> VolumeRecord:
    return msgspec.convert(dict(zip(VolumeRecord.__struct_fields__, row, strict=True)), VolumeRecord)


def _write(db: sqlite3.Connection, query: str, values: tuple[object, ...]) -> bool:
    with db:
        return bool(db.execute(query, values).rowcount)


def _add(db: sqlite3.Connection, volume: VolumeRecord, most: int) -> None:
    with db:
        db.execute("BEGIN IMMEDIATE")
        (count,) = db.execute("SELECT COUNT(*) FROM volumes WHERE owner = ?", (volume.owner,)).fetchone()
        if _find(db, volume.name, volume.owner) is not None:
            raise errors.VolumeConflict(f"there is a volume {volume.name!r} already: use it, or take another name")
        if count >= most:
            raise errors.InvalidRequest(f"there are {count} volumes already, as many as one may have: remove one first")
        row = (volume.id, volume.owner, volume.name, volume.size_bytes, volume.created_at)
        db.execute("INSERT INTO volumes (id, owner, name, size_bytes, created_at) VALUES (?, ?, ?, ?, ?)", row)


def _find(db: sqlite3.Connection, ref: str, owner: str | None) -> VolumeRecord | None:
    if owner is None:
        row = db.execute(f"SELECT {_COLUMNS} FROM volumes WHERE id = ?", (ref,)).fetchone()
    else:
        query = f"SELECT {_COLUMNS} FROM volumes WHERE owner = ?1 AND (id = ?2 OR name = ?2) ORDER BY id = ?2 DESC"
        row = db.execute(query, (owner, ref)).fetchone()
    return None if row is None else _record(row)


def _claim(db: sqlite3.Connection, id: str, instance: str, is_live: Callable[[str], bool]) -> VolumeRecord:
    with db:
        db.execute("BEGIN IMMEDIATE")
        found = _find(db, id, None)
        if found is None:
            raise not_found(id)
        if found.instance not in (None, instance) and is_live(found.instance or ""):
            raise errors.VolumeConflict(f"the volume {found.name!r} is in use in another process of this host")
        db.execute("UPDATE volumes SET instance = ? WHERE id = ?", (instance, id))
    return found
