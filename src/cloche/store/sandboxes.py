"""Records of sandboxes in SQLite.

Writes are batched, a moment later: the creation of a sandbox does not wait for a disk.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cloche import errors
from cloche.model import MIB
from cloche.store.base import HOST_DIED_REASON, SHUT_DOWN_REASON, LostSandbox, SandboxRecord
from cloche.store.database import Database, Unusable, Work
from cloche.store.quotas import equal_share
from cloche.store.retention_clock import retention_now
from cloche.telemetry import log

T = TypeVar("T")

BATCH_SECONDS = 0.02
TROUBLED_SECONDS = 10.0
KEPT_SECONDS = 30 * 86400.0
PRUNE_SECONDS = 3600.0

_RECORD_COLUMNS = "id state instance created_at deadline_at ended_at end_reason paused_at resumed_at key_id".split()
_SPEC_COLUMNS = "owner template metadata limits on_deadline auto_resume notes volumes".split()
_RESUME_FIELDS = "env user cwd sudo network lifetime_seconds pause_memory".split()
"""The fields of a spec that are recorded only while its sandbox is paused, in the column `revival`."""

_COLUMNS = (*_RECORD_COLUMNS, *_SPEC_COLUMNS, "pause_memory", "revival")
_PUT = f"INSERT OR REPLACE INTO sandboxes ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"
_GET = f"SELECT {', '.join(_COLUMNS)} FROM sandboxes"
_FIND = f"{_GET} WHERE id = ?1 AND (?2 IS NULL OR owner = ?2)"
_ENDED = f"""{_GET} WHERE owner = ?1 AND (state IN ('expired', 'lost') OR end_reason = '{SHUT_DOWN_REASON}')
    AND json_extract(metadata, ?2) = COALESCE(?3, json_extract(metadata, ?2)) ORDER BY created_at DESC LIMIT ?4"""
_RECENT = f"{_GET} WHERE ended_at IS NOT NULL ORDER BY ended_at DESC LIMIT ?"
_RECENT_OF = f"{_GET} WHERE owner = ? AND ended_at IS NOT NULL ORDER BY ended_at DESC LIMIT ?"
_JSON = ("metadata", "limits", "pause_memory", "auto_resume", "notes", "volumes", "revival")


class SqliteSandboxRecords:
    """Records in the file `path`, which is made at `open`."""

    def __init__(self, path: Path):
        self.database = Database(path)  # others may keep theirs in it while this is open
        self._unwritten: dict[str, SandboxRecord] = {}  # by id
        self._timer: asyncio.TimerHandle | None = None
        self._pruning: asyncio.TimerHandle | None = None
        self._revivable: set[str] = set()  # sandboxes that can be made again from their record

    @property
    def failing(self) -> bool:
        return self.database.failing

    async def open(self) -> None:
        await self.database.open()
        self._prune_hourly()

    def put(self, record: SandboxRecord) -> None:
        self._unwritten[record.id] = record
        if self._timer is None:
            # While the store cannot be written, the last word on each sandbox waits here, and not every one of them.
            seconds = TROUBLED_SECONDS if self.database.troubled else BATCH_SECONDS
            self._timer = asyncio.get_running_loop().call_later(seconds, self._write_pending)

    async def get(self, id: str, owner: str | None = None) -> SandboxRecord | None:
        unwritten = self._unwritten.get(id)
        if unwritten is not None and owner in (None, unwritten.owner):
            return unwritten
        found = await self._run_after_writes(lambda db: db.execute(_FIND, (id, owner)).fetchone())
        return None if found is None else _decode_record(found)

    async def notes(self, id: str) -> dict[str, str]:
        found = await self._run_after_writes(
            lambda db: db.execute("SELECT notes FROM sandboxes WHERE id = ?", (id,)).fetchone()
        )
        return msgspec.json.decode("{}" if found is None else found[0], type=dict[str, str])

    async def list(self, owner: str) -> list[SandboxRecord]:
        query = f"{_GET} WHERE owner = ? ORDER BY created_at DESC"
        return [
            _decode_record(row)
            for row in await self._run_after_writes(lambda db: db.execute(query, (owner,)).fetchall())
        ]

    async def ended(self, owner: str, label: str, value: str | None, limit: int) -> Sequence[SandboxRecord]:
        asked = (owner, f'$."{label}"', value, limit)
        return [
            _decode_record(row) for row in await self._run_after_writes(lambda db: db.execute(_ENDED, asked).fetchall())
        ]

    async def recent(self, owner: str | None, limit: int) -> Sequence[SandboxRecord]:
        query, asked = (_RECENT, (limit,)) if owner is None else (_RECENT_OF, (owner, limit))
        return [
            _decode_record(row) for row in await self._run_after_writes(lambda db: db.execute(query, asked).fetchall())
        ]

    async def keep(self, record: SandboxRecord) -> None:
        await self._run_after_writes(lambda db: _write_one(db, record))
        self._note_resume_specs([record])

    async def paused(self) -> Sequence[SandboxRecord]:
        query = f"{_GET} WHERE state = 'paused' ORDER BY created_at"
        found = [_decode_record(row) for row in await self._run_after_writes(lambda db: db.execute(query).fetchall())]
        self._note_resume_specs(found)
        return found

    async def claim(self, record: SandboxRecord, instance: str) -> SandboxRecord | None:
        claimed = await self._run_after_writes(lambda db: _claim_record(db, record, instance))
        if claimed is not None:
            self._note_resume_specs([claimed])
        return claimed

    async def conclude(self, record: SandboxRecord) -> bool:
        was_paused = await self._run_after_writes(lambda db: _conclude_record(db, record))
        if was_paused:
            self._revivable.add(record.id)  # paused by any process
            self._note_resume_specs([record])
        return was_paused

    async def mark_lost(self, is_live: Callable[[str], bool], at: float) -> Sequence[LostSandbox]:
        return await self._run_after_writes(lambda db: _mark_lost(db, is_live, at))

    async def aclose(self) -> None:
        if self._pruning is not None:
            self._pruning.cancel()
        self._write_pending()
        await self.database.aclose()

    def _write_pending(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        records, self._unwritten = list(self._unwritten.values()), {}
        if records:
            self.database.do_later(lambda db: _write_batch(db, records))
            self._note_resume_specs(records)

    def _note_resume_specs(self, records: Iterable[SandboxRecord]) -> None:
        """Call after a write: the environment of a sandbox that is no longer paused leaves the log, too."""
        for record in records:
            if record.files is not None:
                self._revivable.add(record.id)
            elif record.id in self._revivable:
                self._revivable.discard(record.id)
                self.database.scrub_soon()

    def _prune_hourly(self) -> None:
        """Removes old records, now and every hour: a server may run for years."""
        self.database.do_later(_delete_expired)
        self._pruning = asyncio.get_running_loop().call_later(PRUNE_SECONDS, self._prune_hourly)

    async def _run_after_writes(self, work: Work[T]) -> T:
        """Runs `work` after all pending writes. Raises Unavailable."""
        self._write_pending()
        try:
            return await self.database.do(work)
        except Unusable:
            raise
        except sqlite3.Error as error:
            raise errors.Unavailable(f"the records of sandboxes cannot be read or written: {error}") from None


def _write_batch(db: sqlite3.Connection, records: Sequence[SandboxRecord]) -> None:
    with db:
        db.executemany(_PUT, [_encode_row(record) for record in records])


def _write_one(db: sqlite3.Connection, record: SandboxRecord) -> None:
    with db:
        db.execute(_PUT, _encode_row(record))


def _claim_record(db: sqlite3.Connection, record: SandboxRecord, instance: str) -> SandboxRecord | None:
    with db:
        change = "UPDATE sandboxes SET instance = ? WHERE id = ? AND state = 'paused' AND instance IN (?, ?)"
        taken = db.execute(change, (instance, record.id, record.instance, instance)).rowcount
        row = db.execute(f"{_GET} WHERE id = ?", (record.id,)).fetchone() if taken else None
    return None if row is None else _decode_record(row)


def _conclude_record(db: sqlite3.Connection, record: SandboxRecord) -> bool:
    with db:
        paused = db.execute("SELECT 1 FROM sandboxes WHERE id = ? AND state = 'paused'", (record.id,)).fetchone()
        if paused:
            db.execute(_PUT, _encode_row(record))
    return paused is not None


def _delete_expired(db: sqlite3.Connection) -> None:
    try:
        with db:
            db.execute("DELETE FROM sandboxes WHERE ended_at < ?", (retention_now() - KEPT_SECONDS,))
    except sqlite3.Error as error:
        log.error("records.not_pruned", error=str(error))


def _mark_lost(db: sqlite3.Connection, is_live: Callable[[str], bool], at: float) -> Sequence[LostSandbox]:
    found = db.execute("SELECT DISTINCT instance FROM sandboxes WHERE state = 'running'").fetchall()
    dead = [name for (name,) in found if not is_live(name)]
    if not dead:
        return []
    update = f"""UPDATE sandboxes SET state = 'lost', ended_at = ?, end_reason = '{HOST_DIED_REASON}'
        WHERE instance = ? AND state = 'running' RETURNING id, owner"""
    with db:
        return [LostSandbox(*row) for name in dead for row in db.execute(update, (at, name)).fetchall()]


def _encode_row(record: SandboxRecord) -> tuple[object, ...]:
    values: dict[str, object] = {name: getattr(record, name) for name in _RECORD_COLUMNS}
    values |= {name: getattr(record.spec, name) for name in _SPEC_COLUMNS}
    values["pause_memory"] = record.memory_kept if record.state == "paused" else record.spec.pause_memory
    values["revival"] = _encode_resume(record)
    return tuple(msgspec.json.encode(values[name]).decode() if name in _JSON else values[name] for name in _COLUMNS)


def _encode_resume(record: SandboxRecord) -> dict[str, object] | None:
    if record.files is None:
        return None
    settings = {name: getattr(record.spec, name) for name in _RESUME_FIELDS}
    return {"image": record.files.image, "bytes": record.files.bytes, **settings}


def _decode_record(row: tuple[object, ...]) -> SandboxRecord:
    columns: dict[str, Any] = dict(zip(_COLUMNS, row, strict=True))
    for name in _JSON:
        columns[name] = msgspec.json.decode(str(columns[name]))
    resume = columns["revival"] or {"pause_memory": columns["pause_memory"]}
    spec = {name: columns[name] for name in _SPEC_COLUMNS}
    spec |= {name: resume[name] for name in _RESUME_FIELDS if name in resume}
    fields = {name: columns[name] for name in _RECORD_COLUMNS}
    fields |= {"spec": spec, "memory_kept": columns["pause_memory"], "files": columns["revival"]}
    return msgspec.convert(fields, SandboxRecord)


# Limits the records of ended sandboxes.
#
# They are bounded in number and in bytes, all together, and fairly: the owner with the most records loses their
# oldest, and a flood of one owner's takes none of the others'.

MAX_RECORDS = 200_000  # about 0.6 KB each, where their metadata are few
MAX_BYTES = 256 * MIB
ROW_BYTES = 256  # of one, beside the fields that clients and programs set

_TEXT_COLUMNS = ("metadata", "notes", "volumes", "revival", "end_reason", "template")
_ROW_SIZE = " + ".join([str(ROW_BYTES), *(f"LENGTH(CAST(COALESCE({name}, '') AS BLOB))" for name in _TEXT_COLUMNS)])
_ENDED_ROWS = f"SELECT id, owner, ended_at, {_ROW_SIZE} AS size FROM sandboxes WHERE ended_at IS NOT NULL"
_ENDED_OWNERS = f"SELECT owner, COUNT(*), SUM(size) FROM ({_ENDED_ROWS}) GROUP BY owner"
_OF_OWNER = f"""SELECT id, ROW_NUMBER() OVER newest AS place, SUM(size) OVER newest AS bytes
    FROM ({_ENDED_ROWS} AND owner = ?1) WINDOW newest AS (ORDER BY ended_at DESC, id ROWS UNBOUNDED PRECEDING)"""
_SURPLUS = f"SELECT id FROM ({_OF_OWNER}) WHERE place > ?2 OR bytes > ?3"


def find_surplus(db: sqlite3.Connection) -> Iterator[str]:
    """Yields the ids of the records to remove."""
    owners = db.execute(_ENDED_OWNERS).fetchall()
    count = equal_share((each for _, each, _ in owners), MAX_RECORDS)
    size = equal_share((each for _, _, each in owners), MAX_BYTES)
    for owner, own_count, own_size in owners:
        if own_count > count or own_size > size:
            yield from (id for (id,) in db.execute(_SURPLUS, (owner, count, size)).fetchall())
