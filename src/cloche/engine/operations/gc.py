"""What a data directory holds that nobody needs: found, and removed, at a server's start, every hour, and when asked.

Most of what is kept has limits where it is kept, and goes there when its time is over. This is for what would be left:
by processes that were killed, or because nothing else bounds it. Nothing goes that is in use, by any process.
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
from cloche.store.blobs import DRAFT, ORPHAN_SECONDS
from cloche.store.database import unusable
from cloche.store.images import ImageFiles
from cloche.store.migrations import MIGRATIONS
from cloche.store.retention_clock import surely_past
from cloche.store.sandboxes import KEPT_SECONDS as RECORD_SECONDS
from cloche.telemetry import log
from cloche.templates.catalogue import Catalogue, unneeded
from cloche.templates.catalogue import collect as collect_template

REMOVED_AT_ONCE = 5_000  # rows: others who need the store have their turn between
VACUUM_BYTES = 64 * MIB  # that are free in the store, and half of it: then it is written anew, where that is asked for
# of a store in use, while a server has it: that much is written anew in less time than others wait for their turn
SERVED_VACUUM_BYTES = 64 * MIB
BUSY_SECONDS = 10.0

_BLOBS = (files.FILE_PREFIX, files.CONTAINER_FILE_PREFIX, librechat.PREFIX)
_KNOWN_IMAGES = """SELECT image FROM snapshots UNION SELECT image FROM volumes WHERE image IS NOT NULL
    UNION SELECT json_extract(revival, '$.image') FROM sandboxes WHERE state = 'paused'"""
_KNOWN_BLOBS = f"""SELECT id FROM files UNION SELECT id FROM container_files WHERE kept
    UNION SELECT '{librechat.PREFIX}' || id FROM code_files"""
_IN_USE = """SELECT template FROM sandboxes WHERE state IN ('running', 'paused')
    UNION SELECT json_extract(body, '$.template') FROM snapshots"""


class Found(NamedTuple):
    """Something that can go, or has gone."""

    kind: str
    name: str  # empty, where it is many
    bytes: int
    why: str
    things: int = 1


class Collection:
    """All of it blocks: call it in a thread. `is_live`: whether the host process of that name runs.

    `compact`: a store that is mostly free is written anew, if no more than `vacuum_bytes` of it are in use.
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

    def run(self) -> list[Found]:
        """What went; with `dry`, what would. One part that cannot be looked at keeps no other from it: see `failed`."""
        found: list[Found] = []
        with self._opened() as db:
            parts: list[Callable[[], Iterable[Found]]] = [self._scratch, self._packages, self._audit]
            if db is not None:
                parts += [
                    lambda: self._templates(db),
                    lambda: self._images(db),
                    lambda: self._blobs("blobs", _BLOBS, db, _KNOWN_BLOBS),
                    lambda: self._build_files(db),
                    lambda: self._records(db),
                    lambda: self._store(db),
                ]
            for part in parts:
                try:
                    found += part()
                except (OSError, sqlite3.Error) as error:
                    self._fail(error)
        return found

    def _fail(self, error: Exception) -> None:
        self.failed.append(str((unusable(error) if isinstance(error, sqlite3.Error) else None) or error))

    @contextlib.contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection | None]:
        """The store, if there is one, of this version: who does not know it all must not say what is unknown."""
        db: sqlite3.Connection | None = None
        try:
            db = self._connected(self._data_dir / "store.sqlite3")
        except (OSError, sqlite3.Error) as error:
            self._fail(error)
        try:
            yield db
        finally:
            if db is not None:
                db.close()

    def _connected(self, path: Path) -> sqlite3.Connection | None:
        """None where there is no store yet, or one that is not ours to judge. Raises OSError, sqlite3.Error."""
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

    def _templates(self, db: sqlite3.Connection) -> Iterator[Found]:
        in_use = {ref for (ref,) in db.execute(_IN_USE)} | self._configured()
        for template, why in unneeded(self._catalogue, in_use, self._config.disk, surely_past()):
            if self._dry or collect_template(self._catalogue, template):
                yield Found("template", template.ref, template.size_bytes, why)

    def _configured(self) -> set[str]:
        """The versions that the configuration names: nobody need use one now for it to be needed tomorrow."""
        named = tuple(each for each in (self._config.librechat.template, *self._config.aliases.values()) if "@" in each)
        known = self._catalogue.list() if named else ()
        return {each.ref for each in known if f"{each.name}@{each.version}".startswith(named)}

    def _scratch(self) -> Iterator[Found]:
        abandoned = self._catalogue.abandoned()
        if not self._dry:
            self._catalogue.remove_abandoned()
        for path in abandoned:
            yield Found("template", f"{path.parent.name}/{path.name}", 0, "its build was killed")

    # -- files

    def _images(self, db: sqlite3.Connection) -> Iterator[Found]:
        """As for blobs: what is known is read when their makers were found to be gone."""
        left = ImageFiles(self._data_dir / "images", "").left(self._is_live)
        known = {name for (name,) in db.execute(_KNOWN_IMAGES)}
        for path in left:
            if path.name not in known:
                yield from self._removed("image", path, "the process that made it is gone, and nothing needs it")

    def _blobs(self, directory: str, prefixes: tuple[str, ...], db: sqlite3.Connection, query: str) -> Iterator[Found]:
        """Those first, what is known then: what is made meanwhile is known, or younger than an hour."""
        old = [path for path in _untouched(self._data_dir / directory) if path.name.startswith((DRAFT, *prefixes))]
        known = {name for (name,) in db.execute(query)}
        for path in old:
            if path.name not in known:
                yield from self._removed(directory, path, "no file has this content")

    def _build_files(self, db: sqlite3.Connection) -> Iterator[Found]:
        before = surely_past() - builds.BUILD_FILES_KEPT_SECONDS
        old = db.execute("SELECT id, bytes FROM template_files WHERE used_at < ?", (before,)).fetchall()
        if not self._dry and old:
            with db:
                db.executemany("DELETE FROM template_files WHERE id = ?", [(id,) for id, _ in old])
        for id, size in old:
            if not self._dry:
                (self._data_dir / "build-files" / id).unlink(missing_ok=True)
            yield Found("build-files", id, size, "no build used it for a week")
        if not self._dry or not old:
            yield from self._blobs("build-files", (builds.PREFIX,), db, "SELECT id FROM template_files")

    def _packages(self) -> Iterator[Found]:
        directory, limit = self._data_dir / "cache" / "packages", self._config.packages.cache_bytes
        sizes = [size for path in directory.glob("*/*") if (size := _size(path)) is not None]
        if sum(sizes) > limit:
            if not self._dry:
                from cloche.egress.packages.cache import Cache  # here: most servers have no need of it

                Cache(directory, limit).make_room()
            yield Found("packages", "", sum(sizes) - limit, "there is more than packages.cache_bytes")

    def _audit(self) -> Iterator[Found]:
        """A server does it itself: the log has to say so, in its place."""
        config, directory = self._config.audit, self._data_dir / "audit"
        if self._dry:
            found = audit.prunable(directory, config.days, config.max_bytes)
        else:
            found = audit.prune(directory, config.days, config.max_bytes) if self._compact else []
        if found and not self._dry:
            audit.append_once(directory, config.max_bytes, [audit.removal(each) for each in found])
        for each in found:
            yield Found("audit", each.name, each.bytes, each.why)

    def _removed(self, kind: str, path: Path, why: str) -> Iterator[Found]:
        size = _size(path)
        if size is not None:
            if not self._dry:
                path.unlink(missing_ok=True)
            yield Found(kind, path.name, size, why)

    # -- the store

    def _records(self, db: sqlite3.Connection) -> Iterator[Found]:
        before = surely_past() - RECORD_SECONDS
        old = [id for (id,) in db.execute("SELECT id FROM sandboxes WHERE ended_at <= ?", (before,)).fetchall()]
        going = {*old, *sandboxes.surplus(db)}
        if not self._dry:
            _delete(db, "sandboxes", going)
        if going:
            yield Found("records", "", 0, "sandboxes that ended long ago, or are too many", len(going))

    def _store(self, db: sqlite3.Connection) -> Iterator[Found]:
        """Free pages are used again, so its file is as large as it ever had to be; here it can become smaller."""
        pages, free, size = (db.execute(f"PRAGMA {each}").fetchone()[0] for each in _PAGES)
        if free * size < VACUUM_BYTES or free * 2 < pages or (pages - free) * size > self._vacuum_bytes:
            return
        if self._compact and not self._dry:
            db.execute("VACUUM")
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if self._compact or self._dry:
            yield Found("store", "store.sqlite3", free * size, "more than half of it is free")


_PAGES = ("page_count", "freelist_count", "page_size")


def _delete(db: sqlite3.Connection, table: str, ids: AbstractSet[str]) -> None:
    """Some at a time."""
    rows = iter([(id,) for id in ids])
    while some := list(islice(rows, REMOVED_AT_ONCE)):
        with db:
            db.executemany(f"DELETE FROM {table} WHERE id = ?", some)


def _untouched(directory: Path) -> Iterator[Path]:
    """As `Blobs.remove_orphans`: whoever writes a content makes it known a moment later."""
    before = time.time() - ORPHAN_SECONDS
    for entry in os.scandir(directory) if directory.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):
            if entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_ctime < before:
                yield Path(entry.path)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


# Collecting what nobody needs, while a server runs: see `collection`.


@contextlib.asynccontextmanager
async def collecting(engine: Engine) -> AsyncIterator[None]:
    """Now, and every so often; in a thread, so that nobody waits for it."""
    task = asyncio.create_task(_collect(engine))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _collect(engine: Engine) -> None:
    compact = True  # at the start only: nobody can write meanwhile, so only a small store is written anew
    while True:
        work = Collection(engine.config, engine.instance.is_live, compact=compact)
        tell(engine, await asyncio.to_thread(work.run))
        for why in work.failed:
            log.error("disk.not_collected", why=why)
        try:
            await engine.builds.clean()
        except (errors.ClocheError, sqlite3.Error, OSError) as error:
            log.error("disk.not_collected", error=type(error).__name__, why=str(error))
        compact = False
        await asyncio.sleep(engine.config.disk.collect_hours * 3600.0)


def tell(engine: Engine, found: Sequence[Found]) -> None:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for each in found:
        counts[each.kind] += each.things
        sizes[each.kind] += each.bytes
        if each.kind == "template":
            engine.trail.note("template.removed", "", id=each.name, about=each.why, bytes=each.bytes, itself=True)
    for kind, count in counts.items():
        log.info("disk.collected", kind=kind, count=count, bytes=sizes[kind])
