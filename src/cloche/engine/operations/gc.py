"""Garbage collection of a data directory: at a server's start, every hour, and on request.

Most stored things have limits where they are stored, and are removed there when their time is over. This
removes the rest: leftovers of killed processes, and things that nothing else bounds. Nothing is removed
that any process uses.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from cloche import errors
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.model import MIB
from cloche.store import audit, builds, files, librechat, sandboxes
from cloche.store.blobs import DRAFT_PREFIX, ORPHAN_SECONDS
from cloche.store.database import explain_unusable
from cloche.store.images import ImageFiles
from cloche.store.migrations import MIGRATIONS
from cloche.store.retention_clock import retention_now
from cloche.store.sandboxes import KEPT_SECONDS as RECORD_SECONDS
from cloche.telemetry import log
from cloche.templates.catalogue import Catalogue, unneeded_versions
from cloche.templates.catalogue import collect_version as collect_template

ROWS_REMOVED_AT_ONCE = 5_000  # rows: other users of the store have their turn between
VACUUM_BYTES = 64 * MIB  # that are free in the store, and half of it: then it is written anew, on request
# of a store in use, while a server has it: that much is written anew in less time than others wait for their turn
SERVED_VACUUM_BYTES = 64 * MIB
BUSY_SECONDS = 10.0

_BLOB_PREFIXES = (files.FILE_PREFIX, files.CONTAINER_FILE_PREFIX, librechat.CODE_FILE_PREFIX)
_KNOWN_IMAGES = """SELECT image FROM snapshots UNION SELECT image FROM volumes WHERE image IS NOT NULL
    UNION SELECT json_extract(revival, '$.image') FROM sandboxes WHERE state = 'paused'"""
_KNOWN_BLOBS = f"""SELECT id FROM files UNION SELECT id FROM container_files WHERE kept
    UNION SELECT '{librechat.CODE_FILE_PREFIX}' || id FROM code_files"""
_TEMPLATES_IN_USE = """SELECT template FROM sandboxes WHERE state IN ('running', 'paused')
    UNION SELECT json_extract(body, '$.template') FROM snapshots"""


class CollectedItem(NamedTuple):
    """A thing that can be removed, or was."""

    kind: str
    name: str  # empty, where it is many
    bytes: int
    why: str
    things: int = 1


class GarbageCollector:
    """All methods block: call them in a thread. `is_live`: whether the host process of that name runs.

    `compact`: a store that is mostly free is rewritten, if no more than `vacuum_bytes` of it are in use.
    """

    def __init__(
        self,
        config: Config,
        is_live: Callable[[str], bool],
        *,
        dry: bool = False,
        compact: bool = False,
        vacuum_bytes: float = SERVED_VACUUM_BYTES,
    ):
        self._config = config
        self._data_dir = Path(config.data_dir)
        self._is_live = is_live
        self._dry = dry  # only look
        self._compact = compact
        self._vacuum_bytes = vacuum_bytes
        self.failed: list[str] = []  # why parts of it could not be looked at
        self._catalogue = Catalogue(config.data_dir, config.aliases)

    def run(self) -> list[CollectedItem]:
        """Returns the removed items; with `dry`, the removable ones. Failed parts are in `failed`; others go on."""
        found: list[CollectedItem] = []
        with self._open_store() as db:
            parts: list[Callable[[], Iterable[CollectedItem]]] = [
                self._collect_abandoned_builds,
                self._collect_packages,
                self._collect_audit_files,
            ]
            if db is not None:
                parts += [
                    lambda: self._collect_templates(db),
                    lambda: self._collect_images(db),
                    lambda: self._collect_blobs("blobs", _BLOB_PREFIXES, db, _KNOWN_BLOBS),
                    lambda: self._collect_build_files(db),
                    lambda: self._collect_records(db),
                    lambda: self._compact_store(db),
                ]
            for part in parts:
                try:
                    found += part()
                except (OSError, sqlite3.Error) as error:
                    self._add_failure(error)
        return found

    def _add_failure(self, error: Exception) -> None:
        self.failed.append(str((explain_unusable(error) if isinstance(error, sqlite3.Error) else None) or error))

    @contextlib.contextmanager
    def _open_store(self) -> Iterator[sqlite3.Connection | None]:
        """The store, if there is one of this version: another version may have rows that this one does not know."""
        db: sqlite3.Connection | None = None
        try:
            db = self._connect_store(self._data_dir / "store.sqlite3")
        except (OSError, sqlite3.Error) as error:
            self._add_failure(error)
        try:
            yield db
        finally:
            if db is not None:
                db.close()

    def _connect_store(self, path: Path) -> sqlite3.Connection | None:
        """None where there is no store yet, or one of another version. Raises OSError, sqlite3.Error."""
        try:
            path.stat()
        except FileNotFoundError:
            return None
        db = sqlite3.connect(path, timeout=BUSY_SECONDS)
        try:
            db.execute("PRAGMA secure_delete = ON")
            version = int(db.execute("PRAGMA user_version").fetchone()[0])
        except sqlite3.Error:
            db.close()
            raise
        if version == len(MIGRATIONS):
            return db
        db.close()
        if version > len(MIGRATIONS):
            known = f"this Cloche knows {len(MIGRATIONS)}: use the one that runs the server"
            self.failed.append(f"the store is of version {version}, and {known}")
        return None

    # -- templates

    def _collect_templates(self, db: sqlite3.Connection) -> Iterator[CollectedItem]:
        in_use = {ref for (ref,) in db.execute(_TEMPLATES_IN_USE)} | self._configured_templates()
        for template, why in unneeded_versions(self._catalogue, in_use, self._config.disk, retention_now()):
            if self._dry or collect_template(self._catalogue, template):
                yield CollectedItem("template", template.ref, template.size_bytes, why)

    def _configured_templates(self) -> set[str]:
        """The template versions that the configuration names: they are needed even while unused."""
        named = tuple(each for each in (self._config.librechat.template, *self._config.aliases.values()) if "@" in each)
        known = self._catalogue.list() if named else ()
        return {each.ref for each in known if f"{each.name}@{each.version}".startswith(named)}

    def _collect_abandoned_builds(self) -> Iterator[CollectedItem]:
        abandoned = self._catalogue.find_abandoned()
        if not self._dry:
            self._catalogue.remove_abandoned()
        for path in abandoned:
            yield CollectedItem("template", f"{path.parent.name}/{path.name}", 0, "its build was killed")

    # -- files

    def _collect_images(self, db: sqlite3.Connection) -> Iterator[CollectedItem]:
        """As for blobs, the known images are read after their makers were found dead."""
        left = ImageFiles(self._data_dir / "images", "").left(self._is_live)
        known = {name for (name,) in db.execute(_KNOWN_IMAGES)}
        for path in left:
            if path.name not in known:
                yield from self._remove_file("image", path, "the process that made it is gone, and nothing needs it")

    def _collect_blobs(
        self, directory: str, prefixes: tuple[str, ...], db: sqlite3.Connection, query: str
    ) -> Iterator[CollectedItem]:
        """Lists files first and known ids afterwards: one that is made meanwhile is known, or younger than an hour."""
        old = [
            path
            for path in _list_old_files(self._data_dir / directory)
            if path.name.startswith((DRAFT_PREFIX, *prefixes))
        ]
        known = {name for (name,) in db.execute(query)}
        for path in old:
            if path.name not in known:
                yield from self._remove_file(directory, path, "no file has this content")

    def _collect_build_files(self, db: sqlite3.Connection) -> Iterator[CollectedItem]:
        before = retention_now() - builds.ARCHIVE_KEPT_SECONDS
        old = db.execute("SELECT id, bytes FROM template_files WHERE used_at < ?", (before,)).fetchall()
        if not self._dry and old:
            with db:
                db.executemany("DELETE FROM template_files WHERE id = ?", [(id,) for id, _ in old])
        for id, size in old:
            if not self._dry:
                (self._data_dir / "build-files" / id).unlink(missing_ok=True)
            yield CollectedItem("build-files", id, size, "no build used it for a week")
        if not self._dry or not old:
            yield from self._collect_blobs("build-files", (builds.ARCHIVE_PREFIX,), db, "SELECT id FROM template_files")

    def _collect_packages(self) -> Iterator[CollectedItem]:
        directory, limit = self._data_dir / "cache" / "packages", self._config.packages.cache_bytes
        sizes = [size for path in directory.glob("*/*") if (size := _file_size(path)) is not None]
        if sum(sizes) > limit:
            if not self._dry:
                from cloche.egress.packages.cache import PackageCache  # here: most servers have no need of it

                PackageCache(directory, limit).make_room()
            yield CollectedItem("packages", "", sum(sizes) - limit, "there is more than packages.cache_bytes")

    def _collect_audit_files(self) -> Iterator[CollectedItem]:
        """A server prunes its own log: the removal has to be a line of that log, in its place."""
        config, directory = self._config.audit, self._data_dir / "audit"
        if self._dry:
            found = audit.find_prunable(directory, config.days, config.max_bytes)
        else:
            found = audit.prune_old(directory, config.days, config.max_bytes) if self._compact else []
        if found and not self._dry:
            audit.append_once(directory, config.max_bytes, [audit.removal_line(each) for each in found])
        for each in found:
            yield CollectedItem("audit", each.name, each.bytes, each.why)

    def _remove_file(self, kind: str, path: Path, why: str) -> Iterator[CollectedItem]:
        size = _file_size(path)
        if size is not None:
            if not self._dry:
                path.unlink(missing_ok=True)
            yield CollectedItem(kind, path.name, size, why)

    # -- the store

    def _collect_records(self, db: sqlite3.Connection) -> Iterator[CollectedItem]:
        before = retention_now() - RECORD_SECONDS
        old = [id for (id,) in db.execute("SELECT id FROM sandboxes WHERE ended_at <= ?", (before,)).fetchall()]
        going = {*old, *sandboxes.find_surplus(db)}
        if not self._dry:
            _delete_rows(db, "sandboxes", going)
        if going:
            yield CollectedItem("records", "", 0, "sandboxes that ended long ago, or are too many", len(going))

    def _compact_store(self, db: sqlite3.Connection) -> Iterator[CollectedItem]:
        """Shrinks the store's file, which otherwise stays as large as it ever was: free pages are only reused."""
        pages, free, size = (db.execute(f"PRAGMA {each}").fetchone()[0] for each in _PAGE_PRAGMAS)
        if free * size < VACUUM_BYTES or free * 2 < pages or (pages - free) * size > self._vacuum_bytes:
            return
        if self._compact and not self._dry:
            db.execute("VACUUM")
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if self._compact or self._dry:
            yield CollectedItem("store", "store.sqlite3", free * size, "more than half of it is free")


_PAGE_PRAGMAS = ("page_count", "freelist_count", "page_size")


def _delete_rows(db: sqlite3.Connection, table: str, ids: AbstractSet[str]) -> None:
    """Deletes in batches."""
    rows = iter([(id,) for id in ids])
    while some := list(islice(rows, ROWS_REMOVED_AT_ONCE)):
        with db:
            db.executemany(f"DELETE FROM {table} WHERE id = ?", some)


def _list_old_files(directory: Path) -> Iterator[Path]:
    """As `Blobs.remove_orphans`: a writer of a blob makes it known only a moment later."""
    before = time.time() - ORPHAN_SECONDS
    for entry in os.scandir(directory) if directory.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):
            if entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_ctime < before:
                yield Path(entry.path)


def _file_size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


# Periodic garbage collection while a server runs: see `collection`.


@contextlib.asynccontextmanager
async def collect_periodically(engine: Engine) -> AsyncIterator[None]:
    """Collects now and at intervals, in a thread."""
    task = asyncio.create_task(_collect_forever(engine))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _collect_forever(engine: Engine) -> None:
    compact = True  # at the start only: it blocks all writers, so only a small store is written anew
    while True:
        work = GarbageCollector(engine.config, engine.instance.is_live, compact=compact)
        log_collected_items(engine, await asyncio.to_thread(work.run))
        for why in work.failed:
            log.error("disk.not_collected", why=why)
        try:
            await engine.builds.clean()
        except (errors.ClocheError, sqlite3.Error, OSError) as error:
            log.error("disk.not_collected", error=type(error).__name__, why=str(error))
        compact = False
        await asyncio.sleep(engine.config.disk.collect_hours * 3600.0)


def log_collected_items(engine: Engine, found: Sequence[CollectedItem]) -> None:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for each in found:
        counts[each.kind] += each.things
        sizes[each.kind] += each.bytes
        if each.kind == "template":
            engine.audit_log.record("template.removed", "", id=each.name, about=each.why, bytes=each.bytes, itself=True)
    for kind, count in counts.items():
        log.info("disk.collected", kind=kind, count=count, bytes=sizes[kind])
