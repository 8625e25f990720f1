"""Quota overrides, and the usage of owners and keys, in SQLite."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from cloche import errors
from cloche.config.sections import QuotaOverride
from cloche.store.database import Database

ALL_TIME_MINUTE = 0  # the minute of the total usage
KEPT_MINUTES = 60  # that are kept one by one
UNREADABLE = (sqlite3.Error, msgspec.DecodeError, errors.Unavailable)

# The objects of an owner that outlast sandboxes, by kind.
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


class QuotaSubject(NamedTuple):
    """An owner or, with a key id, one of their keys."""

    owner: str
    key_id: str = ""


class SpentUsage(NamedTuple):
    executions: int = 0
    cpu_seconds: float = 0.0


class KnownQuotas(NamedTuple):
    overrides: Mapping[QuotaSubject, QuotaOverride]
    successors: Mapping[str, str]  # the id of a key, and of the one that took its place


class StoredQuotas:
    """The quotas of one database, which the caller opens and closes."""

    def __init__(self, database: Database):
        self._database = database

    async def known(self) -> KnownQuotas:
        """Raises one of UNREADABLE."""
        return await self._database.do(_load_known)

    async def put(self, tenant: QuotaSubject, override: QuotaOverride) -> None:
        """Sets the override of that owner or key; an empty one restores the default. Raises Unavailable."""
        body = msgspec.json.encode(override).decode() if override.given() else None
        try:
            await self._database.do(lambda db: _put_override(db, tenant, body))
        except sqlite3.Error as error:
            raise errors.Unavailable(f"the quota could not be kept: {error}") from None

    async def stored(self, owner: str) -> dict[str, int]:
        """Returns the stored bytes of an owner, by kind. Raises Unavailable."""
        try:
            return await self._database.do(lambda db: _sum_stored(db, owner))
        except sqlite3.Error as error:
            raise errors.Unavailable(f"stored bytes cannot be counted now: {error}") from None

    def add(self, spent: Mapping[QuotaSubject, SpentUsage]) -> None:
        """Adds new usage, soon. Never waits."""
        minute = int(time.time() // 60)
        self._database.do_later(lambda db: _add_usage(db, spent, minute))

    async def minutes(self) -> Sequence[tuple[QuotaSubject, int, SpentUsage]]:
        """Returns the usage of all processes in the last hour, by minute. Raises one of UNREADABLE."""
        query = "SELECT owner, key_id, minute, executions, cpu_seconds FROM usage WHERE minute > ? AND minute <= ?"
        rows = await self._database.do(lambda db: db.execute(query, _last_hour()).fetchall())
        return [(QuotaSubject(owner, key), minute, SpentUsage(*spent)) for owner, key, minute, *spent in rows]

    async def hour(self, owner: str) -> dict[QuotaSubject, SpentUsage]:
        """Returns the total of the last hour, of that owner and of each key. Raises one of UNREADABLE."""
        query = """SELECT owner, key_id, SUM(executions), SUM(cpu_seconds) FROM usage
            WHERE minute > ? AND minute <= ? AND owner = ? GROUP BY key_id"""
        rows = await self._database.do(lambda db: db.execute(query, (*_last_hour(), owner)).fetchall())
        return {QuotaSubject(name, key): SpentUsage(*spent) for name, key, *spent in rows}

    @property
    def is_behind(self) -> bool:
        """Whether some added usage is not stored yet."""
        return self._database.is_behind

    async def in_all(self, owner: str | None) -> dict[QuotaSubject, SpentUsage]:
        """Returns the usage of all time, of that owner or of all. Raises one of UNREADABLE."""
        query = "SELECT owner, key_id, executions, cpu_seconds FROM usage WHERE minute = 0 AND ?1 IN (owner, '')"
        rows = await self._database.do(lambda db: db.execute(query, (owner or "",)).fetchall())
        return {QuotaSubject(name, key): SpentUsage(*spent) for name, key, *spent in rows}

    async def keys(self, owner: str, used: Iterable[str] = ()) -> dict[str, str]:
        """Returns the names of an owner's keys by id: the unrevoked ones, and those in `used`.

        Raises one of UNREADABLE.
        """
        query = """SELECT id, name FROM keys WHERE owner = ?1
            AND (revoked_at IS NULL OR id IN (SELECT value FROM json_each(?2))) ORDER BY created_at"""
        asked = owner, msgspec.json.encode(list(used)).decode()
        return dict(await self._database.do(lambda db: db.execute(query, asked).fetchall()))

    async def owners(self) -> set[str]:
        """Returns all owners with keys, quotas, stored data or usage. Raises one of UNREADABLE."""
        return await self._database.do(_list_owners)


def _last_hour() -> tuple[int, int]:
    """Returns the bounds of the last hour. Future minutes, after the clock was set back, do not count."""
    now = int(time.time() // 60)
    return now - KEPT_MINUTES, now


def _load_known(db: sqlite3.Connection) -> KnownQuotas:
    quotas = db.execute("SELECT owner, key_id, body FROM quotas").fetchall()
    replaced = db.execute("SELECT id, replaced_by FROM keys WHERE replaced_by IS NOT NULL").fetchall()
    overrides = {QuotaSubject(owner, key): msgspec.json.decode(body, type=QuotaOverride) for owner, key, body in quotas}
    return KnownQuotas(overrides, dict(replaced))


def _put_override(db: sqlite3.Connection, tenant: QuotaSubject, body: str | None) -> None:
    with db:
        if body is None:
            db.execute("DELETE FROM quotas WHERE owner = ? AND key_id = ?", tenant)
        else:
            db.execute("INSERT OR REPLACE INTO quotas (owner, key_id, body) VALUES (?, ?, ?)", (*tenant, body))


def _sum_stored(db: sqlite3.Connection, owner: str) -> dict[str, int]:
    return {kind: int(db.execute(query, (owner,)).fetchone()[0]) for kind, query in _STORED.items()}


def _add_usage(db: sqlite3.Connection, spent: Mapping[QuotaSubject, SpentUsage], now: int) -> None:
    put = """INSERT INTO usage (owner, key_id, minute, executions, cpu_seconds) VALUES (?, ?, ?, ?, ?)
        ON CONFLICT DO UPDATE SET executions = executions + excluded.executions,
        cpu_seconds = cpu_seconds + excluded.cpu_seconds"""
    rows = [(*tenant, minute, *more) for tenant, more in spent.items() for minute in (now, ALL_TIME_MINUTE)]
    with db:
        db.executemany(put, rows)
        db.execute("DELETE FROM usage WHERE minute > 0 AND minute <= ?", (now - KEPT_MINUTES,))


def _list_owners(db: sqlite3.Connection) -> set[str]:
    tables = ("keys", "quotas", "usage", "snapshots", "volumes", "files", "code_room", "template_files")
    paused = "SELECT owner FROM sandboxes WHERE state = 'paused'"
    query = " UNION ".join([paused, *(f"SELECT owner FROM {table}" for table in tables)])
    return {owner for (owner,) in db.execute(query).fetchall() if owner}


# Fair shares of a common limit.


def equal_share(amounts: Iterable[int], most: int) -> int:
    """Returns the limit of each, so that all together have at most `most`: small amounts lose nothing."""
    ordered, left = sorted(amounts), most
    for at, amount in enumerate(ordered):
        equal = left // (len(ordered) - at)
        if amount > equal:
            return equal
        left -= amount
    return most
