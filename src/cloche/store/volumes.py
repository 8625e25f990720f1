"""Named volumes in SQLite: owner, name, and the image of each one's files."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence

import msgspec

from cloche import errors
from cloche.model import Struct, VolumeInfo
from cloche.store.base import CheckAllowance, allow_anything
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
        """The public description."""
        return VolumeInfo(
            id=self.id, name=self.name, owner=self.owner, size_bytes=self.size_bytes, created_at=self.created_at
        )


_COLUMNS = ", ".join(VolumeRecord.__struct_fields__)


class StoredVolumes:
    """The volumes of one database, which the caller opens and closes.

    All methods raise Unavailable where it fails.
    """

    def __init__(self, database: Database):
        self._database = database
        self.allow: CheckAllowance = allow_anything

    async def add(self, volume: VolumeRecord, most: int) -> None:
        """Raises VolumeConflict where the owner has one of that name, InvalidRequest where they have `most`.

        Raises QuotaExceeded where they may not store as much as it can hold.
        """
        await self.allow(volume.owner, volume.size_bytes)
        await self._database.do(lambda db: _insert_volume(db, volume, most))

    async def find(self, ref: str, owner: str | None) -> VolumeRecord | None:
        """Returns the volume of that id or name; with None as the owner, of any owner, by its id alone."""
        return await self._database.do(lambda db: _find_volume(db, ref, owner))

    async def list(self, owner: str) -> Sequence[VolumeRecord]:
        """The oldest first."""
        query = f"SELECT {_COLUMNS} FROM volumes WHERE owner = ? ORDER BY created_at, id"
        rows = await self._database.do(lambda db: db.execute(query, (owner,)).fetchall())
        return [_decode_volume(row) for row in rows]

    async def claim(self, id: str, instance: str, is_live: Callable[[str], bool]) -> VolumeRecord:
        """Claims it for that host process until `release`.

        Raises VolumeConflict if another one has it, VolumeNotFound.
        """
        return await self._database.do(lambda db: _claim_volume(db, id, instance, is_live))

    async def release(self, id: str, instance: str) -> None:
        query = "UPDATE volumes SET instance = NULL WHERE id = ? AND instance = ?"
        await self._database.do(lambda db: _write_row(db, query, (id, instance)))

    async def keep(self, id: str, image: str) -> bool:
        """Sets the image of its files. Whether the volume still exists."""
        query = "UPDATE volumes SET image = ? WHERE id = ?"
        return await self._database.do(lambda db: _write_row(db, query, (image, id)))

    async def remove(self, id: str) -> None:
        await self._database.do(lambda db: _write_row(db, "DELETE FROM volumes WHERE id = ?", (id,)))

    async def images(self) -> set[str]:
        """Returns the images of all volumes of all owners."""
        query = "SELECT image FROM volumes WHERE image IS NOT NULL"
        rows = await self._database.do(lambda db: db.execute(query).fetchall())
        return {image for (image,) in rows}


def volume_not_found(ref: str) -> errors.VolumeNotFound:
    return errors.VolumeNotFound(f"there is no volume {ref!r}")


def _decode_volume(row: tuple[object, ...]) -> VolumeRecord:
    return msgspec.convert(dict(zip(VolumeRecord.__struct_fields__, row, strict=True)), VolumeRecord)


def _write_row(db: sqlite3.Connection, query: str, values: tuple[object, ...]) -> bool:
    with db:
        return bool(db.execute(query, values).rowcount)


def _insert_volume(db: sqlite3.Connection, volume: VolumeRecord, most: int) -> None:
    with db:
        db.execute("BEGIN IMMEDIATE")
        (count,) = db.execute("SELECT COUNT(*) FROM volumes WHERE owner = ?", (volume.owner,)).fetchone()
        if _find_volume(db, volume.name, volume.owner) is not None:
            raise errors.VolumeConflict(f"there is a volume {volume.name!r} already: use it, or take another name")
        if count >= most:
            raise errors.InvalidRequest(f"there are {count} volumes already, as many as one may have: remove one first")
        row = (volume.id, volume.owner, volume.name, volume.size_bytes, volume.created_at)
        db.execute("INSERT INTO volumes (id, owner, name, size_bytes, created_at) VALUES (?, ?, ?, ?, ?)", row)


def _find_volume(db: sqlite3.Connection, ref: str, owner: str | None) -> VolumeRecord | None:
    if owner is None:
        row = db.execute(f"SELECT {_COLUMNS} FROM volumes WHERE id = ?", (ref,)).fetchone()
    else:
        query = f"SELECT {_COLUMNS} FROM volumes WHERE owner = ?1 AND (id = ?2 OR name = ?2) ORDER BY id = ?2 DESC"
        row = db.execute(query, (owner, ref)).fetchone()
    return None if row is None else _decode_volume(row)


def _claim_volume(db: sqlite3.Connection, id: str, instance: str, is_live: Callable[[str], bool]) -> VolumeRecord:
    with db:
        db.execute("BEGIN IMMEDIATE")
        found = _find_volume(db, id, None)
        if found is None:
            raise volume_not_found(id)
        if found.instance not in (None, instance) and is_live(found.instance or ""):
            raise errors.VolumeConflict(f"the volume {found.name!r} is in use in another process of this host")
        db.execute("UPDATE volumes SET instance = ? WHERE id = ?", (instance, id))
    return found
