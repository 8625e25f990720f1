"""Records in SQLite: one file that several host processes share.

Writes are batched in a thread of their own, a moment later: a sandbox's creation does not wait for a disk.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cloche import errors
from cloche.store.base import SandboxRecord
from cloche.telemetry import log

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

BATCH_SECONDS = 0.02
KEPT_SECONDS = 30 * 86400.0
BUSY_MILLISECONDS = 10_000

MIGRATIONS = (
    """
    CREATE TABLE sandboxes (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        template TEXT NOT NULL,
        state TEXT NOT NULL,
        instance TEXT NOT NULL,
        created_at REAL NOT NULL,
        deadline_at REAL,
        ended_at REAL,
        end_reason TEXT,
        metadata TEXT NOT NULL,
        limits TEXT NOT NULL
    ) WITHOUT ROWID;
    CREATE INDEX sandboxes_by_owner ON sandboxes (owner, created_at);
    CREATE INDEX sandboxes_running ON sandboxes (instance) WHERE state = 'running';
    CREATE INDEX sandboxes_ended ON sandboxes (ended_at) WHERE ended_at IS NOT NULL;
    """,
)
"""Each one leads from the version that is its index to the next. Never changed once released."""

_COLUMNS = SandboxRecord.__struct_fields__
_PUT = f"INSERT OR REPLACE INTO sandboxes ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"
_GET = f"SELECT {', '.join(_COLUMNS)} FROM sandboxes"
_JSON = ("metadata", "limits")


class SqliteRecords:
    """Records in the file `path`, which is made at `open`."""

    def __init__(self, path: Path):
        self._path = path
        self._jobs: queue.SimpleQueue[Callable[[], bool]] = queue.SimpleQueue()
        self._unwritten: list[SandboxRecord] = []
        self._timer: asyncio.TimerHandle | None = None
        self._thread: threading.Thread | None = None
        self._connection: sqlite3.Connection | None = None

    async def open(self) -> None:
        self._thread = threading.Thread(target=self._work, name="cloche-records", daemon=True)
        self._thread.start()
        try:
            await self._do_first(lambda: _connect(self._path))
        except (OSError, sqlite3.Error) as error:
            self._jobs.put(lambda: False)
            self._thread = None
            raise errors.Unavailable(f"cannot open the records in {self._path}: {error}") from None
        await self._do(_prune)

    def put(self, record: SandboxRecord) -> None:
        self._unwritten.append(record)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(BATCH_SECONDS, self._write)

    async def get(self, id: str) -> SandboxRecord | None:
        found = await self._do(lambda db: db.execute(f"{_GET} WHERE id = ?", (id,)).fetchone())
        return None if found is None else _record(found)

    async def list(self, owner: str) -> list[SandboxRecord]:
        query = f"{_GET} WHERE owner = ? ORDER BY created_at DESC"
        return [_record(row) for row in await self._do(lambda db: db.execute(query, (owner,)).fetchall())]

    async def mark_lost(self, is_live: Callable[[str], bool], at: float) -> int:
        return await self._do(lambda db: _mark_lost(db, is_live, at))

    async def aclose(self) -> None:
        if self._thread is None:
            return
        await self._do(lambda db: db.close())
        self._jobs.put(lambda: False)
        self._thread = None

    # -- the loop's side

    def _write(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        records, self._unwritten = self._unwritten, []
        if records:
            self._jobs.put(lambda: self._write_batch(records))

    async def _do(self, work: Work[T]) -> T:
        """Does `work` in the thread, after all that was put before."""
        self._write()

        def with_connection() -> T:
            assert self._connection is not None
            return work(self._connection)

        return await self._call(with_connection)

    async def _do_first(self, connect: Callable[[], sqlite3.Connection]) -> None:
        self._connection = await self._call(connect)

    async def _call(self, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def job() -> bool:
            try:
                answer = work()
            except (OSError, sqlite3.Error) as error:
                loop.call_soon_threadsafe(_settle, future, error, None)
            else:
                loop.call_soon_threadsafe(_settle, future, None, answer)
            return True

        self._jobs.put(job)
        return await future

    # -- the thread's side

    def _work(self) -> None:
        while self._jobs.get()():
            pass

    def _write_batch(self, records: Sequence[SandboxRecord]) -> bool:
        assert self._connection is not None
        try:
            with self._connection as db:
                db.executemany(_PUT, [_row(record) for record in records])
        except sqlite3.Error as error:
            log.error("records.not_written", records=len(records), error=str(error))
        return True


def _settle(future: asyncio.Future[Any], error: BaseException | None, answer: object) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(answer)


def _connect(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    db = sqlite3.connect(path, check_same_thread=False, timeout=BUSY_MILLISECONDS / 1000)
    db.execute(f"PRAGMA busy_timeout = {BUSY_MILLISECONDS}")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    _migrate(db)
    return db


def _migrate(db: sqlite3.Connection) -> None:
    db.isolation_level = None  # one transaction of ours around all, also around CREATE
    db.execute("BEGIN IMMEDIATE")
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    if version > len(MIGRATIONS):
        db.execute("ROLLBACK")
        raise sqlite3.DatabaseError(f"its version {version} is newer than this Cloche, which knows {len(MIGRATIONS)}")
    for migration in MIGRATIONS[version:]:
        for statement in filter(None, map(str.strip, migration.split(";"))):
            db.execute(statement)
    db.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
    db.execute("COMMIT")
    db.isolation_level = "DEFERRED"


def _prune(db: sqlite3.Connection) -> None:
    with db:
        db.execute("DELETE FROM sandboxes WHERE ended_at < ?", (time.time() - KEPT_SECONDS,))


def _mark_lost(db: sqlite3.Connection, is_live: Callable[[str], bool], at: float) -> int:
    found = db.execute("SELECT DISTINCT instance FROM sandboxes WHERE state = 'running'").fetchall()
    dead = [(at, name) for (name,) in found if not is_live(name)]
    with db:
        update = "UPDATE sandboxes SET state = 'lost', ended_at = ?, end_reason = 'its host process died'"
        return db.executemany(f"{update} WHERE instance = ? AND state = 'running'", dead).rowcount if dead else 0


def _row(record: SandboxRecord) -> tuple[object, ...]:
    return tuple(
        msgspec.json.encode(value).decode() if name in _JSON else value
        for name, value in zip(_COLUMNS, _values(record), strict=True)
    )


def _values(record: SandboxRecord) -> Iterable[object]:
    return (getattr(record, name) for name in _COLUMNS)


def _record(row: tuple[object, ...]) -> SandboxRecord:
    fields = dict(zip(_COLUMNS, row, strict=True))
    for name in _JSON:
        fields[name] = msgspec.json.decode(str(fields[name]))
    return msgspec.convert(fields, SandboxRecord)
