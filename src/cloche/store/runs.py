"""Detached runs: their records, and their events, a chunk of consecutive ones per row."""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from cloche import errors
from cloche.config.sections import RunsConfig
from cloche.events import Ended, encode_event
from cloche.model import Outcome, Struct
from cloche.store.base import CheckAllowance, allow_anything
from cloche.store.database import Database, Unusable, Work
from cloche.store.retention_clock import retention_now

T = TypeVar("T")

RUN_HOST_DIED = "its host process died"
CHUNK_OVERHEAD_BYTES = 256  # the cost of a row beside its events
SPARE_PART = 16  # of a run's room, freed in excess: so not at every write
_HOUR_SECONDS = 3600.0


class RunRecord(Struct):
    id: str
    owner: str
    sandbox: str
    context: str
    created_at: float
    instance: str | None = None  # the host process that runs it; None when it has ended
    ended_at: float | None = None
    outcome: Outcome | None = None
    reason: str | None = None
    events: int = 0  # the number of the last
    bytes: int = 0  # of those that are kept
    dropped: dict[str, int] = {}  # bytes of events that made room for later ones, by kind


class EventChunk(Struct):
    """Events `first` to `last`, each a line of JSON. `sizes`: the bytes lost if the chunk is dropped, by kind."""

    first: int
    last: int
    body: bytes
    sizes: dict[str, int] = {}

    @property
    def bytes(self) -> int:
        return len(self.body) + CHUNK_OVERHEAD_BYTES


class RunEventsPage(Struct):
    """A run, and some of its events, in their order."""

    record: RunRecord
    chunks: list[EventChunk]


_COLUMNS = RunRecord.__struct_fields__
_PUT = f"INSERT INTO runs ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"
_GET = f"SELECT {', '.join(_COLUMNS)} FROM runs"
_ADD = "INSERT INTO run_events (run, first, last, sizes, bytes, body) VALUES (?, ?, ?, ?, ?, ?)"


class RunStore:
    """Keeps runs within the limits: a run's oldest events and an owner's first-ended runs make room.

    Every method raises Unavailable where the file cannot be read or written.
    """

    def __init__(self, database: Database, limits: RunsConfig):
        self._database = database
        self._limits = limits
        self.allow: CheckAllowance = allow_anything

    async def add(self, record: RunRecord) -> None:
        """Returns after it is stored. Raises QuotaExceeded."""
        await self.allow(record.owner, 0)
        await self._run_work(lambda db: self._insert_run(db, record))

    async def write(self, id: str, chunks: Sequence[EventChunk], ended: Ended | None = None) -> None:
        """Appends events, the last ones if it `ended`. Ignored if the run was removed meanwhile."""
        await self._run_work(lambda db: self._write_chunks(db, id, chunks, ended))

    async def get(self, id: str, owner: str | None = None) -> RunRecord | None:
        """Returns the run; with an owner, only theirs. A foreign run takes as long to look up as an unknown one."""
        return await self._run_work(lambda db: _get_run(db, id, owner))

    async def list(self, owner: str | None, sandbox: str | None) -> list[RunRecord]:
        """Lists runs, the newest first. None matches any."""
        return await self._run_work(lambda db: _list_runs(db, owner, sandbox))

    async def page(self, id: str, after: int, max_bytes: int) -> RunEventsPage | None:
        """Returns the events after `after`, up to `max_bytes` but for the first chunk.

        None if there is no such run.
        """
        return await self._run_work(lambda db: _read_page(db, id, after, max_bytes))

    async def lose(self, id: str, instance: str) -> None:
        """Marks it as ended with its host process, unless it ended otherwise meanwhile."""
        await self._run_work(lambda db: self._mark_lost(db, id, instance))

    async def remove(self, id: str) -> None:
        await self._run_work(lambda db: _delete_runs(db, [id]))
        self._database.scrub_soon()

    def remove_later(self, id: str) -> None:
        """As `remove`, but never waits."""
        self._database.do_later(lambda db: _delete_runs(db, [id]))

    def prune_old(self, is_left: Callable[[str], bool]) -> None:
        """Ends runs of dead host processes, and removes runs that ended long ago. Never waits."""
        self._database.do_later(lambda db: self._prune_runs(db, is_left))

    async def _run_work(self, work: Work[T]) -> T:
        try:
            return await self._database.do(work)
        except Unusable:
            raise
        except sqlite3.Error as error:
            raise errors.Unavailable(f"the records of detached runs cannot be used: {error}") from None

    # -- in the database's thread

    def _insert_run(self, db: sqlite3.Connection, record: RunRecord) -> None:
        with db:
            db.execute(_PUT, _encode_row(record))
            over = _count_runs(db, record.owner) - self._limits.per_owner
            _delete_run_rows(db, _ended_first(db, record.owner)[: max(over, 0)])

    def _write_chunks(self, db: sqlite3.Connection, id: str, chunks: Sequence[EventChunk], ended: Ended | None) -> None:
        with db:
            record = _get_run(db, id)
            if record is None or record.instance is None or not chunks:
                return
            db.executemany(_ADD, [_chunk_row(id, chunk) for chunk in chunks])
            size = record.bytes + sum(chunk.bytes for chunk in chunks)
            dropped, freed = self._make_room(db, record, size, chunks[-1].first)
            db.execute(
                "UPDATE runs SET events = ?, bytes = ?, dropped = ? WHERE id = ?",
                (chunks[-1].last, size - freed, msgspec.json.encode(dropped).decode(), id),
            )
            if ended is not None:
                db.execute(
                    "UPDATE runs SET instance = NULL, ended_at = ?, outcome = ?, reason = ? WHERE id = ?",
                    (time.time(), ended.outcome, ended.reason, id),
                )

    def _make_room(
        self, db: sqlite3.Connection, record: RunRecord, size: int, newest: int
    ) -> tuple[Mapping[str, int], int]:
        """Makes room. Returns all losses of the run so far, and the bytes freed now."""
        of_owner = _sum_bytes(db, record.owner) - record.bytes + size
        over_owner = of_owner - self._limits.owner_bytes
        for id, bytes_ in _sizes_of_ended(db, record.owner) if over_owner > 0 else ():
            if over_owner <= 0:
                break
            _delete_run_rows(db, [id])
            over_owner -= bytes_
        over = max(size - self._limits.events_bytes, over_owner)
        if over <= 0:
            return record.dropped, 0
        return _drop_chunks(db, record, over + self._limits.events_bytes // SPARE_PART, newest)

    def _mark_lost(self, db: sqlite3.Connection, id: str, instance: str) -> None:
        record = _get_run(db, id)
        if record is not None and record.instance == instance:
            number, ended = record.events + 1, Ended(outcome="died", reason=RUN_HOST_DIED)
            self._write_chunks(db, id, [EventChunk(first=number, last=number, body=encode_event(ended))], ended)

    def _prune_runs(self, db: sqlite3.Connection, is_left: Callable[[str], bool]) -> None:
        for id, instance in db.execute("SELECT id, instance FROM runs WHERE instance IS NOT NULL").fetchall():
            if is_left(instance):
                self._mark_lost(db, id, instance)
        before = retention_now() - self._limits.kept_hours * _HOUR_SECONDS
        for (id,) in db.execute("SELECT id FROM runs WHERE ended_at < ?", (before,)).fetchall():
            _delete_runs(db, [id])  # one by one: others want to write, too


def _get_run(db: sqlite3.Connection, id: str, owner: str | None = None) -> RunRecord | None:
    row = db.execute(f"{_GET} WHERE id = ?1 AND (?2 IS NULL OR owner = ?2)", (id, owner)).fetchone()
    return None if row is None else _decode_record(row)


def _list_runs(db: sqlite3.Connection, owner: str | None, sandbox: str | None) -> list[RunRecord]:
    conditions = "WHERE owner = COALESCE(?1, owner) AND sandbox = COALESCE(?2, sandbox)"
    found = db.execute(f"{_GET} {conditions} ORDER BY created_at DESC, id LIMIT 1000", (owner, sandbox))
    return [_decode_record(row) for row in found]


def _read_page(db: sqlite3.Connection, id: str, after: int, max_bytes: int) -> RunEventsPage | None:
    record = _get_run(db, id)
    if record is None:
        return None
    chunks: list[EventChunk] = []
    rows = db.execute("SELECT first, last, body FROM run_events WHERE run = ? AND last > ? ORDER BY first", (id, after))
    for first, last, body in rows:
        chunks.append(EventChunk(first=first, last=last, body=body))
        max_bytes -= len(body)
        if max_bytes <= 0:
            break
    rows.close()
    return RunEventsPage(record=record, chunks=chunks)


def _drop_chunks(db: sqlite3.Connection, record: RunRecord, over: int, newest: int) -> tuple[Mapping[str, int], int]:
    """Removes the oldest chunks but for the first, which has `Started`, and the newest."""
    dropped, freed, numbers = Counter(record.dropped), 0, []
    query = "SELECT first, bytes, sizes FROM run_events WHERE run = ? AND first > 1 AND first < ? ORDER BY first"
    for first, size, sizes in db.execute(query, (record.id, newest)):
        if freed >= over:
            break
        numbers.append((record.id, first))
        dropped.update(msgspec.json.decode(sizes))
        freed += size
    db.executemany("DELETE FROM run_events WHERE run = ? AND first = ?", numbers)
    return dropped, freed


def _count_runs(db: sqlite3.Connection, owner: str) -> int:
    return int(db.execute("SELECT COUNT(*) FROM runs WHERE owner = ?", (owner,)).fetchone()[0])


def _sum_bytes(db: sqlite3.Connection, owner: str) -> int:
    return int(db.execute("SELECT COALESCE(SUM(bytes), 0) FROM runs WHERE owner = ?", (owner,)).fetchone()[0])


def _sizes_of_ended(db: sqlite3.Connection, owner: str) -> list[tuple[str, int]]:
    query = "SELECT id, bytes FROM runs WHERE owner = ? AND ended_at IS NOT NULL ORDER BY ended_at"
    return db.execute(query, (owner,)).fetchall()


def _ended_first(db: sqlite3.Connection, owner: str) -> list[str]:
    return [id for id, _ in _sizes_of_ended(db, owner)]


def _delete_runs(db: sqlite3.Connection, ids: Sequence[str]) -> None:
    if ids:
        with db:
            _delete_run_rows(db, ids)


def _delete_run_rows(db: sqlite3.Connection, ids: Iterable[str]) -> None:
    named = [(id,) for id in ids]
    db.executemany("DELETE FROM run_events WHERE run = ?", named)
    db.executemany("DELETE FROM runs WHERE id = ?", named)


def _chunk_row(run: str, chunk: EventChunk) -> tuple[object, ...]:
    return run, chunk.first, chunk.last, msgspec.json.encode(chunk.sizes).decode(), chunk.bytes, chunk.body


def _encode_row(record: RunRecord) -> tuple[object, ...]:
    values = msgspec.structs.asdict(record)
    values["dropped"] = msgspec.json.encode(record.dropped).decode()
    return tuple(values[name] for name in _COLUMNS)


def _decode_record(row: Sequence[object]) -> RunRecord:
    fields = dict(zip(_COLUMNS, row, strict=True))
    fields["dropped"] = msgspec.json.decode(str(fields["dropped"]))
    return msgspec.convert(fields, RunRecord)
