"""The SQLite file that several host processes share: a thread with a connection, and numbered migrations."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from cloche import errors
from cloche.model import MIB
from cloche.store.migrations import MIGRATIONS
from cloche.telemetry import log

# Outages of the store (locked, full or read-only): their error, and the work that waits for their end.

HeldWork: TypeAlias = Callable[[sqlite3.Connection], None]

MAX_HELD = 512
UNUSABLE_REASONS = {
    sqlite3.SQLITE_BUSY: "another process holds its lock: try again in a moment",
    sqlite3.SQLITE_LOCKED: "another process holds its lock: try again in a moment",
    sqlite3.SQLITE_FULL: "its disk is full: the operator must make room",
    sqlite3.SQLITE_READONLY: "it cannot be written: its file or file system is read-only",
    sqlite3.SQLITE_PERM: "it cannot be written: its file belongs to another user",
    sqlite3.SQLITE_IOERR: "its disk fails, or is full",
    sqlite3.SQLITE_CANTOPEN: "its file, or one beside it, cannot be opened",
    sqlite3.SQLITE_CORRUPT: "its file is damaged: move it away, or put a copy of it back, and start again",
    sqlite3.SQLITE_NOTADB: "its file is damaged: move it away, or put a copy of it back, and start again",
}
"""By SQLite's primary code. Any other code is a mistake of ours."""


class Unusable(errors.Unavailable, sqlite3.OperationalError):
    """The store cannot be used now. Also an sqlite3.Error, for callers that continue without it."""

    retry_after_seconds = 2.0

    def __init__(self, message: str, *, locked: bool):
        super().__init__(message)
        self.locked = locked


def explain_unusable(error: sqlite3.Error) -> Unusable | None:
    """Returns the error if the store cannot be used now; None for a mistake of the caller."""
    code = getattr(error, "sqlite_errorcode", -1) & 0xFF
    if code not in UNUSABLE_REASONS:
        return None
    return Unusable(f"the store cannot be used: {UNUSABLE_REASONS[code]}", locked=_is_locked(error))


def _is_locked(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", -1) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


class HeldWrites:
    """Deferred work, in order. When there is too much of it, the oldest is dropped."""

    def __init__(self) -> None:
        self._works: deque[HeldWork] = deque()
        self._tried_at = 0.0

    def __len__(self) -> int:
        return len(self._works)

    @property
    def first(self) -> HeldWork | None:
        return self._works[0] if self._works else None

    def add(self, work: HeldWork) -> None:
        if not self._works:
            self.mark_tried()
        self._works.append(work)
        if len(self._works) > MAX_HELD:
            self._works.popleft()
            log.error("store.lost", works=1)

    def drop(self, work: HeldWork) -> None:
        """Drops the work after it is done."""
        if self.first is work:
            self._works.popleft()

    def mark_tried(self) -> None:
        self._tried_at = time.monotonic()

    def is_due(self, every_seconds: float) -> bool:
        """Whether there is held work, and the last attempt was that long ago."""
        return bool(self._works) and time.monotonic() - self._tried_at >= every_seconds


T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

BUSY_MILLISECONDS = 10_000
TROUBLED_MILLISECONDS = 200  # once a writer has waited that long in vain, others do not, until a write succeeds
RETRY_SECONDS = 1.0  # for work without a waiting caller, while the file cannot be written
JOURNAL_BYTES = 64 * MIB  # that the write-ahead log keeps when it is empty
SCRUB_MILLISECONDS = 100  # that it waits for readers: until then nothing else is done
LOCKED_SECONDS = 0.01
FAILING_SECONDS = 60.0  # for which `failing` is reported if no write was tried again
SCRUB_SECONDS = 60.0  # after which deleted data is gone from it, too
"""Each one leads from the version that is its index to the next. Never changed once released."""


class Database:
    """The file `path`, made at `open`. Work runs in a thread of its own, in the order of the calls."""

    def __init__(self, path: Path):
        self._path = path
        self._jobs: queue.SimpleQueue[Callable[[], bool]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._connection: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None
        self._scrubbing: asyncio.TimerHandle | None = None
        self._held = HeldWrites()  # writes that failed so far
        self.troubled = False  # another process has held the lock for too long, and no write has succeeded since
        self._unusable_at = -FAILING_SECONDS  # when that was last, since something was written
        self.closing = False  # background work stops

    async def open(self) -> None:
        """Raises Unavailable if the file cannot be made, read or brought to this version."""
        self._thread = threading.Thread(target=self._run_jobs, name="cloche-store", daemon=True)
        self._thread.start()
        try:
            self._connection = await self._run_in_thread(lambda: _open_connection(self._path))
            self._identity = _identify_file(self._path)
        except (OSError, sqlite3.Error) as error:
            self._end_thread()
            raise _explain_error(self._path, error) from None
        except BaseException:
            self._end_thread()
            raise

    async def do(self, work: Work[T]) -> T:
        """Returns the result of `work`. Raises sqlite3.Error, and any error of `work`.

        Raises Unusable, which is both Unavailable and an sqlite3.Error, where the file is locked, full or read-only.
        """
        return await self._run_in_thread(lambda: self._run_in_turn(work))

    def do_later(self, work: Work[None]) -> None:
        """Runs `work` when its turn comes. Never waits. Its errors are logged.

        While the file cannot be written, the work is held, in order, and done as soon as possible.
        """

        def job() -> bool:
            if self._held or not self._try_work(work):
                self._held.add(work)
            return True

        self._jobs.put(job)

    @property
    def is_behind(self) -> bool:
        """Whether there is deferred work that could not be done until now."""
        return bool(self._held)

    @property
    def failing(self) -> bool:
        """Whether the file was locked, full or otherwise unusable a moment ago, with no write since."""
        lately = time.monotonic() - self._unusable_at < FAILING_SECONDS
        return self.is_behind or lately

    def scrub_soon(self) -> None:
        """Removes deleted data from the write-ahead log within a minute. Never waits."""
        if self._scrubbing is None:
            self._scrubbing = asyncio.get_running_loop().call_later(SCRUB_SECONDS, self.scrub_log)

    def scrub_log(self) -> None:
        """Empties the write-ahead log, unless another process reads there. Never waits."""
        self._end_scrubbing()
        self.do_later(_truncate_wal)

    async def aclose(self) -> None:
        """Closes after all queued work."""
        self._end_scrubbing()
        self.closing = True
        if self._thread is not None:
            try:
                await self._run_in_thread(self._close_connection)
            finally:
                self._end_thread()

    def _live_connection(self) -> sqlite3.Connection:
        assert self._connection is not None, "used before it was opened"
        return self._connection

    def _end_scrubbing(self) -> None:
        if self._scrubbing is not None:
            self._scrubbing.cancel()
            self._scrubbing = None

    def _end_thread(self) -> None:
        self._jobs.put(lambda: False)
        self._thread = None

    async def _run_in_thread(self, work: Callable[[], T]) -> T:
        if self._thread is None:
            raise errors.Unavailable("the store is closed: this host is shutting down")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def job() -> bool:
            try:
                answer = work()
            except BaseException as error:  # noqa: BLE001 - it is the caller's, and all later work needs this thread
                _deliver_answer(loop, future, error, None)
            else:
                _deliver_answer(loop, future, None, answer)
            return True

        self._jobs.put(job)
        return await future

    # -- in the thread

    def _run_jobs(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=RETRY_SECONDS if self._held else None)
            except queue.Empty:
                self._run_held()
                continue
            if not job():
                return

    def _run_in_turn(self, work: Work[T]) -> T:
        """Runs `work`, after held work if that is due. Raises as `_run_work` does."""
        if self._held.is_due(RETRY_SECONDS):
            self._run_held()
        return self._run_work(work)

    def _run_work(self, work: Work[T]) -> T:
        """Runs `work`. Raises its errors; Unusable where the store is at fault."""
        db = self._live_connection()
        self._check_in_place()
        before = db.total_changes
        try:
            answer = work(db)
        except sqlite3.Error as error:
            if db.in_transaction:
                db.rollback()
            raise self._explain_trouble(db, error) from None
        if db.total_changes > before:
            self._unusable_at = -FAILING_SECONDS
            if self.troubled:
                self._set_patience(db, patient=True)
        return answer

    def _check_in_place(self) -> None:
        """Raises Unusable where the file was removed or replaced: what is written to the old one would be lost."""
        if _identify_file(self._path) != self._identity:
            self._unusable_at = time.monotonic()
            raise Unusable("the store cannot be used: its file was removed or replaced: start again", locked=False)

    def _explain_trouble(self, db: sqlite3.Connection, error: sqlite3.Error) -> sqlite3.Error:
        explained = explain_unusable(error)
        if explained is not None:
            self._unusable_at = time.monotonic()
        if explained is not None and explained.locked and not self.troubled:
            self._set_patience(db, patient=False)
            log.error("store.unusable", why=str(explained))  # waiting callers get the error, and the operator this line
        return explained or error

    def _set_patience(self, db: sqlite3.Connection, *, patient: bool) -> None:
        self.troubled = not patient
        db.execute(f"PRAGMA busy_timeout = {BUSY_MILLISECONDS if patient else TROUBLED_MILLISECONDS}")

    def _try_work(self, work: Work[None]) -> bool:
        """Runs `work`. False where the store is unusable; other errors are logged."""
        try:
            self._run_work(work)
        except Unusable as error:
            log.error("store.unusable", why=str(error))
            return False
        except BaseException as error:  # noqa: BLE001 - all later work needs this thread
            log.error("store.failed", error=type(error).__name__)
        return True

    def _run_held(self) -> None:
        """Runs held work in order, until one fails."""
        self._held.mark_tried()
        while (work := self._held.first) is not None and self._try_work(work):
            self._held.drop(work)

    def _close_connection(self) -> None:
        """Closes the connection, after a last attempt at held work."""
        self._run_held()
        if self._held:
            log.error("store.lost", works=len(self._held))
        self._live_connection().close()


def _explain_error(path: Path, error: OSError | sqlite3.Error) -> errors.Unavailable:
    """The error with its meaning, if known, and a remedy."""
    if isinstance(error, OSError) and (explained := errors.explain_data_dir_error(path.parent, error)):
        return explained
    reason = (explain_unusable(error) if isinstance(error, sqlite3.Error) else None) or error
    remedy = "mend this, or name another data directory with --data-dir"
    return errors.Unavailable(f"cannot open the records in {path}: {reason}; {remedy}")


def _deliver_answer(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], error: BaseException | None, answer: object
) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended: no caller waits
        loop.call_soon_threadsafe(_settle_future, future, error, answer)


def _settle_future(future: asyncio.Future[Any], error: BaseException | None, answer: object) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(answer)


def _identify_file(path: Path) -> tuple[int, int] | None:
    """What changes when another file takes its place; None where there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _open_connection(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)  # it contains the activity of owners; the files beside it get the same mode
    db = sqlite3.connect(path, check_same_thread=False, timeout=BUSY_MILLISECONDS / 1000)
    db.execute(f"PRAGMA busy_timeout = {BUSY_MILLISECONDS}")
    _enable_wal(db)
    db.execute("PRAGMA synchronous = NORMAL")
    db.execute("PRAGMA secure_delete = ON")  # deleted data is overwritten
    db.execute(f"PRAGMA journal_size_limit = {JOURNAL_BYTES}")
    _apply_migrations(db)
    return db


def _enable_wal(db: sqlite3.Connection) -> None:
    """Enables the write-ahead log.

    SQLite reports a concurrent change of mode as locked at once, without its timeout.
    """
    until = time.monotonic() + BUSY_MILLISECONDS / 1000
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if not _is_locked(error) or time.monotonic() > until:
                raise
            time.sleep(LOCKED_SECONDS)


def _truncate_wal(db: sqlite3.Connection) -> None:
    patience = int(db.execute("PRAGMA busy_timeout").fetchone()[0])
    db.execute(f"PRAGMA busy_timeout = {SCRUB_MILLISECONDS}")
    try:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    finally:
        db.execute(f"PRAGMA busy_timeout = {patience}")


def _apply_migrations(db: sqlite3.Connection) -> None:
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
