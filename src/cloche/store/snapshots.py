"""Snapshots of sandboxes in SQLite: their descriptions. Their files are images."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import msgspec

from cloche import errors
from cloche.model import Snapshot
from cloche.store.base import CheckAllowance, allow_anything
from cloche.store.database import Database, Unusable

# Long values are not in the table of which all rows are read, but only in that of their bodies.
_WHOLE = "SELECT whole.body FROM snapshots JOIN snapshot_bodies AS whole ON whole.id = snapshots.id"
_BY_ID = f"{_WHOLE} WHERE {{owner}} AND snapshots.id = ?2"
_BY_NAME = f"{_WHOLE} WHERE {{owner}} AND name = ?2 ORDER BY created_at DESC LIMIT 1"
_ALL = "SELECT body FROM snapshots WHERE {owner} ORDER BY created_at DESC, id"
_OF_A_TEMPLATE = """SELECT snapshot_bodies.body FROM built_templates
    JOIN template_tags ON template_tags.template = built_templates.id
    JOIN template_builds ON template_builds.id = template_tags.build
    JOIN snapshot_bodies ON snapshot_bodies.id = template_builds.snapshot
    WHERE built_templates.owner = ?1 AND (built_templates.id = ?2 OR built_templates.name = ?2) AND tag = ?3"""


class StoredSnapshots:
    """The snapshots of one database, which the caller opens and closes."""

    def __init__(self, database: Database):
        self._database = database
        self.allow: CheckAllowance = allow_anything

    async def add(self, snapshot: Snapshot) -> None:
        await self.allow(snapshot.owner, snapshot.bytes)
        try:
            await self._database.do(lambda db: _add_snapshot(db, snapshot))
        except Unusable:
            raise
        except sqlite3.Error as error:
            raise errors.Unavailable(f"the snapshot could not be recorded: {error}") from None

    async def find(self, ref: str, owner: str | None) -> Snapshot | None:
        row = await self._database.do(lambda db: _find_snapshot(db, ref, owner))
        return None if row is None else _decode_snapshot(row[0])

    async def list(self, owner: str | None) -> Sequence[Snapshot]:
        rows = await self._database.do(lambda db: db.execute(_filter_owner(owner, _ALL), (owner,)).fetchall())
        return [_decode_snapshot(body) for (body,) in rows]

    async def remove(self, id: str, owner: str) -> bool:
        was_there = await self._database.do(lambda db: _remove_snapshot(db, id, owner))
        if was_there:
            self._database.scrub_soon()  # of its environment
        return was_there

    async def images(self) -> set[str]:
        rows = await self._database.do(lambda db: db.execute("SELECT image FROM snapshots").fetchall())
        return {image for (image,) in rows}


def _filter_owner(owner: str | None, query: str) -> str:
    """Restricts the query to that owner, by an index; None matches all."""
    return query.replace("{owner}", "?1 IS NULL" if owner is None else "owner = ?1")


def _encode_snapshot(snapshot: Snapshot) -> str:
    return msgspec.json.encode(snapshot).decode()


def _decode_snapshot(body: str) -> Snapshot:
    return msgspec.json.decode(body, type=Snapshot)


def _add_snapshot(db: sqlite3.Connection, snapshot: Snapshot) -> None:
    with db:
        insert_snapshot(db, snapshot)


def insert_snapshot(db: sqlite3.Connection, snapshot: Snapshot) -> None:
    """Inserts the snapshot, within a transaction of the caller."""
    named = (snapshot.id, snapshot.owner, snapshot.name, snapshot.image, snapshot.created_at)
    insert = "INSERT INTO snapshots (id, owner, name, image, created_at, body) VALUES (?, ?, ?, ?, ?, ?)"
    db.execute(insert, (*named, _encode_snapshot(_shorten_snapshot(snapshot))))
    db.execute("INSERT INTO snapshot_bodies VALUES (?, ?)", (snapshot.id, _encode_snapshot(snapshot)))


def delete_snapshot(db: sqlite3.Connection, id: str) -> bool:
    """Deletes the snapshot, within a transaction of the caller. Whether it was there."""
    db.execute("DELETE FROM snapshot_bodies WHERE id = ?", (id,))
    return bool(db.execute("DELETE FROM snapshots WHERE id = ?", (id,)).rowcount)


def _shorten_snapshot(snapshot: Snapshot) -> Snapshot:
    launch = snapshot.launch and msgspec.structs.replace(snapshot.launch, start_command=None, ready_command=None)
    return msgspec.structs.replace(snapshot, env={}, launch=launch)


def _find_snapshot(db: sqlite3.Connection, ref: str, owner: str | None) -> tuple[str] | None:
    for query in (_BY_ID, _BY_NAME):
        found: tuple[str] | None = db.execute(_filter_owner(owner, query), (owner, ref)).fetchone()
        if found is not None:
            return found
    return _find_template(db, ref, owner)


def _find_template(db: sqlite3.Connection, ref: str, owner: str | None) -> tuple[str] | None:
    """Returns the snapshot of a built template: NAME is NAME:default."""
    name, _, tag = ref.partition(":")
    found: tuple[str] | None = db.execute(_OF_A_TEMPLATE, (owner, name, tag or "default")).fetchone()
    return found


def _remove_snapshot(db: sqlite3.Connection, id: str, owner: str) -> bool:
    with db:
        theirs = db.execute("SELECT 1 FROM snapshots WHERE owner = ? AND id = ?", (owner, id)).fetchone()
        return theirs is not None and delete_snapshot(db, id)
