"""Quotas that differ from the usual, and what owners and keys have used, in SQLite."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from cloche import errors
from cloche.config.sections import Override
from cloche.store.database import Database

IN_ALL = 0  # the minute of what was used ever
MINUTES = 60  # that are kept one by one
UNREADABLE = (sqlite3.Error, msgspec.DecodeError, errors.Unavailable)

# What of an owner's outlasts sandboxes, by its kind.
_STORED = {
    "snapshots": "SELECT COALESCE(SUM(json_extract(body, '$.bytes')), 0) FROM snapshots WHERE owner = ?1",
    "paused": """SELECT COALESCE(SUM(json_extract(revival, '$.bytes')), 0) FROM sandboxes
        INDEXED BY sandboxes_paused WHERE owner = ?1 AND state = 'paused'""",  # not through all that ended in a month
    "volumes": "SELECT COALESCE(SUM(size_bytes), 0) FROM volumes WHERE owner = ?1",
    "files": "SELECT COALESCE(SUM(bytes), 0) FROM files WHERE owner = ?1",
    "container_files": """SELECT COALESCE(SUM(bytes), 0) FROM container_files WHERE owner = ?1 AND kept
        AND (origin IS NULL OR NOT EXISTS (SELECT 1 FROM files WHERE files.id = origin))""",
    "code_files": "SELECT COALESCE(SUM(bytes), 0) FROM code_room WHERE owner = ?1",
    "build_files": "SELECT COALESCE(SUM(bytes), 0) FROM template_files WHERE owner = ?1",
    "responses": "SELECT COALESCE(SUM(bytes + event_bytes), 0) FROM responses WHERE owner = ?1",
    "conversations": "SELECT COALESCE(SUM(bytes), 0) FROM conversations WHERE owner = ?1",
    "runs": "SELECT COALESCE(SUM(bytes), 0) FROM runs WHERE owner = ?1",
}


class Tenant(NamedTuple):
    """An owner, or with the id of a key one of theirs."""

    owner: str
    key_id: str = ""


class Spent(NamedTuple):
    executions: int = 0
    cpu_seconds: float = 0.0


class Known(NamedTuple):
    overrides: Mapping[Tenant, Override]
    successors: Mapping[str, str]  # the id of a key, and of the one that took its place


class StoredQuotas:
    """Those of one database, which somebody else opens and closes."""

    def __init__(self, database: Database):
        self._database = database

    async def known(self) -> Known:
        """Raises one of UNREADABLE."""
        return await self._database.do(_known)

    async def put(self, tenant: Tenant, override: Override) -> None:
        """What that tenant may use instead of the usual; the usual again, where nothing is set. Raises Unavailable."""
        body = msgspec.json.encode(override).decode() if override.given() else None
        try:
            await self._database.do(lambda db: _put(db, tenant, body))
        except sqlite3.Error as error:
            raise errors.Unavailable(f"the quota could not be kept: {error}") from None

    async def stored(self, owner: str) -> dict[str, int]:
        """The bytes that are kept of an owner, by kind. Raises Unavailable."""
        try:
            return await self._database.do(lambda db: _stored(db, owner))
        except sqlite3.Error as error:
            raise errors.Unavailable(f"what is stored cannot be counted now: {error}") from None

    def add(self, spent: Mapping[Tenant, Spent]) -> None:
        """Keeps, soon, what tenants have used just now. Never waits."""
        minute = int(time.time() // 60)
        self._database.do_later(lambda db: _add(db, spent, minute))

    async def minutes(self) -> Sequence[tuple[Tenant, int, Spent]]:
        """What all processes have used in the last hour. Raises one of UNREADABLE."""
        query = "SELECT owner, key_id, minute, executions, cpu_seconds FROM usage WHERE minute > ? AND minute <= ?"
        rows = await self._database.do(lambda db: db.execute(query, _last_hour()).fetchall())
        return [(Tenant(owner, key), minute, Spent(*spent)) for owner, key, minute, *spent in rows]

    async def hour(self, owner: str) -> dict[Tenant, Spent]:
        """The same in all, of that owner and of each key. Raises one of UNREADABLE."""
        query = """SELECT owner, key_id, SUM(executions), SUM(cpu_seconds) FROM usage
            WHERE minute > ? AND minute <= ? AND owner = ? GROUP BY key_id"""
        rows = await self._database.do(lambda db: db.execute(query, (*_last_hour(), owner)).fetchall())
        return {Tenant(name, key): Spent(*spent) for name, key, *spent in rows}

    @property
    def is_behind(self) -> bool:
        """Whether the store does not have yet all that was added."""
        return self._database.is_behind

    async def in_all(self, owner: str | None) -> dict[Tenant, Spent]:
        """What was ever used, of that owner or of all. Raises one of UNREADABLE."""
        query = "SELECT owner, key_id, executions, cpu_seconds FROM usage WHERE minute = 0 AND ?1 IN (owner, '')"
        rows = await self._database.do(lambda db: db.execute(query, (owner or "",)).fetchall())
        return {Tenant(name, key): Spent(*spent) for name, key, *spent in rows}

    async def keys(self, owner: str, used: Iterable[str] = ()) -> dict[str, str]:
        """The ids of an owner's keys that were not revoked, or are among these, and their names.

        Raises one of UNREADABLE.
        """
        query = """SELECT id, name FROM keys WHERE owner = ?1
            AND (revoked_at IS NULL OR id IN (SELECT value FROM json_each(?2))) ORDER BY created_at"""
        asked = owner, msgspec.json.encode(list(used)).decode()
        return dict(await self._database.do(lambda db: db.execute(query, asked).fetchall()))

    async def owners(self) -> set[str]:
        """All who have keys, quotas, or anything that is kept, or have used anything. Raises one of UNREADABLE."""
        return await self._database.do(_owners)


def _last_hour() -> tuple[int, int]:
    """Not what is to come, as it seems after the clock was set back: it would count until then."""
    now = int(time.time() // 60)
    return now - MINUTES, now


def _known(db: sqlite3.Connection) -> Known:
    quotas = db.execute("SELECT owner, key_id, body FROM quotas").fetchall()
    replaced = db.execute("SELECT id, replaced_by FROM keys WHERE replaced_by IS NOT NULL").fetchall()
    overrides = {Tenant(owner, key): msgspec.json.decode(body, type=Override) for owner, key, body in quotas}
    return Known(overrides, dict(replaced))


def _put(db: sqlite3.Connection, tenant: Tenant, body: str | None) -> None:
    with db:
        if body is None:
            db.execute("DELETE FROM quotas WHERE owner = ? AND key_id = ?", tenant)
        else:
            db.execute("INSERT OR REPLACE INTO quotas (owner, key_id, body) VALUES (?, ?, ?)", (*tenant, body))


def _stored(db: sqlite3.Connection, owner: str) -> dict[str, int]:
    return {kind: int(db.execute(query, (owner,)).fetchone()[0]) for kind, query in _STORED.items()}


def _add(db: sqlite3.Connection, spent: Mapping[Tenant, Spent], now: int) -> None:
    put = """INSERT INTO usage (owner, key_id, minute, executions, cpu_seconds) VALUES (?, ?, ?, ?, ?)
        ON CONFLICT DO UPDATE SET executions = executions + excluded.executions,
        cpu_seconds = cpu_seconds + excluded.cpu_seconds"""
    rows = [(*tenant, minute, *more) for tenant, more in spent.items() for minute in (now, IN_ALL)]
    with db:
        db.executemany(put, rows)
        db.execute("DELETE FROM usage WHERE minute > 0 AND minute <= ?", (now - MINUTES,))


def _owners(db: sqlite3.Connection) -> set[str]:
    tables = ("keys", "quotas", "usage", "snapshots", "volumes", "files", "code_room", "template_files")
    paused = "SELECT owner FROM sandboxes WHERE state = 'paused'"
    query = " UNION ".join([paused, *(f"SELECT owner FROM {table}" for table in tables)])
    return {owner for (owner,) in db.execute(query).fetchall() if owner}


# What each may have of something that is for all.


def equal_share(amounts: Iterable[int], most: int) -> int:
    """What one may have at most, so that all together have no more than `most`: whoever has little loses nothing."""
    ordered, left = sorted(amounts), most
    for at, amount in enumerate(ordered):
        equal = left // (len(ordered) - at)
        if amount > equal:
            return equal
        left -= amount
    return most
