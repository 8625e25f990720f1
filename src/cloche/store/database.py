"""The SQLite file that several host processes share: a thread with a connection, and numbered migrations."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from cloche import errors
from cloche.telemetry import log

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

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
    """
    CREATE TABLE keys (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        role TEXT NOT NULL,
        name TEXT NOT NULL,
        hash TEXT NOT NULL UNIQUE,
        created_at REAL NOT NULL,
        revoked_at REAL,
        last_used_at REAL
    ) WITHOUT ROWID;
    """,
)
"""Each one leads from the version that is its index to the next. Never changed once released."""


class Database:
    """The file `path`, made at `open`. Work is done in a thread of its own, in the order in which it was asked for."""

    def __init__(self, path: Path):
        self._path = path
        self._jobs: queue.SimpleQueue[Callable[[], bool]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._connection: sqlite3.Connection | None = None

    async def open(self) -> None:
        """Raises Unavailable if the file cannot be made, read or brought to this version."""
        self._thread = threading.Thread(target=self._work, name="cloche-store", daemon=True)
        self._thread.start()
        try:
            self._connection = await self._call(lambda: _connect(self._path))
        except (OSError, sqlite3.Error) as error:
            self._end_thread()
            raise errors.Unavailable(f"cannot open the records in {self._path}: {error}") from None
        except BaseException:
            self._end_thread()
            raise

    async def do(self, work: Work[T]) -> T:
        """What `work` gives. Raises sqlite3.Error, and whatever `work` does."""
        return await self._call(lambda: work(self._live_connection()))

    def do_later(self, work: Work[None]) -> None:
        """Does `work` when its turn comes. Never waits. What it raises is logged."""

        def job() -> bool:
            try:
                work(self._live_connection())
            except BaseException as error:  # noqa: BLE001 - all later work needs this thread
                log.error("store.failed", error=type(error).__name__)
            return True

        self._jobs.put(job)

    async def aclose(self) -> None:
        """Closes after all work that was asked for."""
        if self._thread is not None:
            try:
                await self.do(lambda db: db.close())
            finally:
                self._end_thread()

    def _live_connection(self) -> sqlite3.Connection:
        assert self._connection is not None, "used before it was opened"
        return self._connection

    def _end_thread(self) -> None:
        self._jobs.put(lambda: False)
        self._thread = None

    async def _call(self, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def job() -> bool:
            try:
                answer = work()
            except BaseException as error:  # noqa: BLE001 - it is the caller's, and all later work needs this thread
                _tell(loop, future, error, None)
            else:
                _tell(loop, future, None, answer)
            return True

        self._jobs.put(job)
        return await future

    def _work(self) -> None:
        while self._jobs.get()():
            pass


def _tell(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], error: BaseException | None, answer: object
) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
        loop.call_soon_threadsafe(_settle, future, error, answer)


def _settle(future: asyncio.Future[Any], error: BaseException | None, answer: object) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(answer)


def _connect(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)  # it says who ran what when; what lies beside it gets the same mode
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
