"""Built templates in SQLite: their names, their builds, and the build of each tag.

A build produces a snapshot. Both are written in one transaction, with the tags that point there: after a
crash there is all of it or nothing.
"""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from cloche import errors
from cloche.model import GIB, Limits, Snapshot, Struct, new_id
from cloche.store.base import CheckAllowance, allow_anything
from cloche.store.blobs import Blobs
from cloche.store.database import Database
from cloche.store.retention_clock import retention_now
from cloche.store.snapshots import delete_snapshot, insert_snapshot

T = TypeVar("T")
BuildState = Literal["waiting", "building", "ready", "error"]
BuildLogLevel = Literal["debug", "info", "warn", "error"]

DEFAULT_TAG = "default"
MAX_UNTAGGED_BUILDS = 10  # builds of a template that no tag means any more
BUILD_KEPT_SECONDS = 7 * 86400.0  # of builds that failed or never began
MAX_BUILDS = 1000  # of one owner, that are known
MAX_TAGS = 1000  # of a template
MAX_OWNER_TAGS = 10_000  # of all templates of one owner

_BUILD = "SELECT body FROM template_builds"  # without its logs, which can be long
_LOGS = "SELECT logs FROM template_build_logs WHERE id = ?"


class BuiltTemplate(Struct):
    id: str
    owner: str
    name: str
    created_at: float


class BuildLogEntry(Struct):
    at: float
    level: BuildLogLevel
    message: str
    step: str | None = None


class TemplateBuild(Struct):
    """One build, a permanent version of its template."""

    id: str  # a UUID
    template: str  # its id
    owner: str
    tags: tuple[str, ...]  # that mean it once it is ready
    limits: Limits  # of its sandboxes
    created_at: float
    updated_at: float
    state: BuildState = "waiting"
    instance: str | None = None  # the host process that builds it
    snapshot: str | None = None  # its result
    recipe: str | None = None  # a digest of all that it was made of
    reason: str | None = None  # why it failed
    step: str | None = None  # at which step
    logs: tuple[BuildLogEntry, ...] = ()  # the last of them, once it has ended


class TemplateTag(Struct):
    tag: str
    build: str
    created_at: float


class StoredBuilds:
    """The builds of one database, which the caller opens and closes. All raise sqlite3.Error if it is unusable."""

    def __init__(self, database: Database):
        self._database = database

    async def request(self, name: str, build: TemplateBuild) -> BuiltTemplate:
        """Returns the template of that name, made if need be, with this build; fills in the build's `template`.

        Raises InvalidRequest where there are too many builds.
        """
        return await self._database.do(lambda db: _request_build(db, name, build))

    async def template(self, ref: str, owner: str) -> BuiltTemplate | None:
        """Returns the template of that id or name."""
        return await self._database.do(lambda db: _find_template(db, ref, owner))

    async def owner_of(self, id: str) -> str | None:
        query = "SELECT owner FROM built_templates WHERE id = ?"
        row = await self._database.do(lambda db: db.execute(query, (id,)).fetchone())
        return None if row is None else str(row[0])

    async def templates(self, owner: str | None) -> Sequence[BuiltTemplate]:
        """Lists templates by name; with None as the owner, of all."""
        query = """SELECT id, owner, name, created_at FROM built_templates WHERE ?1 IS NULL OR owner = ?1
            ORDER BY name, owner"""
        rows = await self._database.do(lambda db: db.execute(query, (owner,)).fetchall())
        return [_decode_template(row) for row in rows]

    async def build(self, id: str, owner: str) -> TemplateBuild | None:
        """Returns the build with its logs."""
        return await self._database.do(lambda db: _get_build(db, id, owner))

    async def builds(self, template: str) -> Sequence[TemplateBuild]:
        """Lists the builds, the newest first, without their logs."""
        query = f"{_BUILD} WHERE template = ? ORDER BY created_at DESC, id"
        rows = await self._database.do(lambda db: db.execute(query, (template,)).fetchall())
        return [_decode_build(row) for row in rows]

    async def begin(self, build: TemplateBuild) -> bool:
        """Starts the build if it still waits. Whether it did: of two callers, one starts it."""
        return await self._database.do(lambda db: _begin_build(db, build))

    async def put(self, build: TemplateBuild) -> None:
        """Updates the build, if it still exists and is in progress."""
        await self._database.do(
            lambda db: _in_transaction(db, lambda: _update_build(db, build, "AND state = 'building'"))
        )

    async def finish(self, build: TemplateBuild, snapshot: Snapshot | None) -> Sequence[str]:
        """Marks it ready, with its tags and the new `snapshot`; None: it uses an existing one.

        Returns the images that are no longer needed: no tag refers to their builds, and newer ones exist. A build
        that was removed meanwhile leaves nothing: then its own image is among them. Raises TemplateBuildFailed where
        the existing snapshot is gone, InvalidRequest where there are too many tags.
        """
        superseded = await self._database.do(lambda db: _in_transaction(db, lambda: _finish_build(db, build, snapshot)))
        if superseded:
            self._database.scrub_soon()  # of their environments
        return superseded

    async def same(self, owner: str, recipe: str) -> str | None:
        """Returns the snapshot of a ready build with the same recipe."""
        query = """SELECT snapshots.id FROM template_builds JOIN snapshots ON snapshots.id = template_builds.snapshot
            WHERE template_builds.owner = ? AND recipe = ? ORDER BY template_builds.created_at DESC LIMIT 1"""
        row = await self._database.do(lambda db: db.execute(query, (owner, recipe)).fetchone())
        return None if row is None else str(row[0])

    async def tags(self, template: str) -> Sequence[TemplateTag]:
        """Lists the tags, the newest first."""
        query = "SELECT tag, build, created_at FROM template_tags WHERE template = ? ORDER BY created_at DESC, tag"
        rows = await self._database.do(lambda db: db.execute(query, (template,)).fetchall())
        return [TemplateTag(tag=tag, build=build, created_at=created_at) for tag, build, created_at in rows]

    async def tag_names(self, template: str, limit: int) -> Sequence[str]:
        """Returns up to `limit` names of tags."""
        query = "SELECT tag FROM template_tags WHERE template = ? ORDER BY tag LIMIT ?"
        return [tag for (tag,) in await self._database.do(lambda db: db.execute(query, (template, limit)).fetchall())]

    async def meant(self, template: str, tag: str) -> str | None:
        """Returns the build of the tag."""
        return await self._database.do(lambda db: _tagged_build(db, template, tag))

    async def assign(self, template: str, tags: Sequence[str], like: str) -> str | None:
        """Assigns the tags to the build of the tag `like` and returns it; None if there is no such tag.

        Raises InvalidRequest where there are too many tags.
        """
        return await self._database.do(lambda db: _in_transaction(db, lambda: _assign_like(db, template, tags, like)))

    async def unassign(self, template: str, tags: Sequence[str]) -> int:
        """Removes the tags. Returns the number of those that existed."""
        return await self._database.do(lambda db: _in_transaction(db, lambda: _remove_tags(db, template, tags)))

    async def remove(self, template: str) -> Sequence[str]:
        """Removes the template with all its builds. Returns the images that are no longer needed."""
        images = await self._database.do(lambda db: _in_transaction(db, lambda: _remove_template(db, template)))
        self._database.scrub_soon()
        return images

    async def clean(self, is_live: Callable[[str], bool], why: str) -> int:
        """Fails builds of dead host processes, for that reason, and removes old ones.

        Returns the number of failed builds.
        """
        failed = await self._database.do(lambda db: _in_transaction(db, lambda: _clean_builds(db, is_live, why)))
        self._database.scrub_soon()
        return failed


def _in_transaction(db: sqlite3.Connection, work: Callable[[], T]) -> T:
    with db:
        return work()


def _decode_template(row: tuple[str, str, str, float]) -> BuiltTemplate:
    id, owner, name, created_at = row
    return BuiltTemplate(id=id, owner=owner, name=name, created_at=created_at)


def _decode_build(row: tuple[str]) -> TemplateBuild:
    return msgspec.json.decode(row[0], type=TemplateBuild)


def _get_build(db: sqlite3.Connection, id: str, owner: str) -> TemplateBuild | None:
    row = db.execute(f"{_BUILD} WHERE id = ? AND owner = ?", (id, owner)).fetchone()
    if row is None:
        return None
    logs = db.execute(_LOGS, (id,)).fetchone()
    entries = () if logs is None else msgspec.json.decode(logs[0], type=tuple[BuildLogEntry, ...])
    return msgspec.structs.replace(_decode_build(row), logs=entries)


def _find_template(db: sqlite3.Connection, ref: str, owner: str) -> BuiltTemplate | None:
    query = "SELECT id, owner, name, created_at FROM built_templates WHERE owner = ? AND (id = ? OR name = ?)"
    row = db.execute(query, (owner, ref, ref)).fetchone()
    return None if row is None else _decode_template(row)


def _request_build(db: sqlite3.Connection, name: str, build: TemplateBuild) -> BuiltTemplate:
    with db:
        template = BuiltTemplate(id=new_id("t"), owner=build.owner, name=name, created_at=build.created_at)
        db.execute("INSERT OR IGNORE INTO built_templates VALUES (?, ?, ?, ?)", msgspec.structs.astuple(template))
        found = _find_template(db, name, build.owner)
        assert found is not None
        build = msgspec.structs.replace(build, template=found.id)
        db.execute("INSERT INTO template_builds VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (build.id, *_encode_build(build)))
        (count,) = db.execute("SELECT COUNT(*) FROM template_builds WHERE owner = ?", (build.owner,)).fetchone()
        if count > MAX_BUILDS:  # nothing of this is kept then
            raise errors.InvalidRequest(f"{MAX_BUILDS} builds are known already: delete templates that you do not need")
        return found


def _encode_build(build: TemplateBuild) -> tuple[object, ...]:
    body = msgspec.json.encode(msgspec.structs.replace(build, logs=())).decode()
    named = (build.template, build.owner, build.state, build.instance, build.snapshot, build.recipe, build.created_at)
    return (*named, body)


def _begin_build(db: sqlite3.Connection, build: TemplateBuild) -> bool:
    with db:
        return _update_build(db, build, "AND state = 'waiting' AND instance IS NULL")


def _update_build(db: sqlite3.Connection, build: TemplateBuild, only: str = "") -> bool:
    columns = "template = ?, owner = ?, state = ?, instance = ?, snapshot = ?, recipe = ?, created_at = ?, body = ?"
    query = f"UPDATE template_builds SET {columns} WHERE id = ? {only}"
    is_there = bool(db.execute(query, (*_encode_build(build), build.id)).rowcount)
    if is_there and build.logs:
        logs = msgspec.json.encode(build.logs).decode()
        db.execute("INSERT OR REPLACE INTO template_build_logs VALUES (?, ?)", (build.id, logs))
    return is_there


def _finish_build(db: sqlite3.Connection, build: TemplateBuild, snapshot: Snapshot | None) -> list[str]:
    if not _update_build(db, build):
        return [] if snapshot is None else [snapshot.image]
    if snapshot is not None:
        insert_snapshot(db, snapshot)
    elif db.execute("SELECT 1 FROM snapshots WHERE id = ?", (build.snapshot,)).fetchone() is None:
        raise errors.TemplateBuildFailed("the same was built before, and deleted just now: build it again")
    _assign_tags(db, build.template, build.tags, build.id)
    return _remove_superseded(db, build.template)


def _remove_superseded(db: sqlite3.Connection, template: str) -> list[str]:
    query = """SELECT id FROM template_builds WHERE template = ?1 AND state = 'ready' AND id NOT IN
        (SELECT build FROM template_tags WHERE template = ?1) ORDER BY created_at DESC LIMIT -1 OFFSET ?2"""
    old = [id for (id,) in db.execute(query, (template, MAX_UNTAGGED_BUILDS)).fetchall()]
    return _remove_builds(db, old)


def _remove_builds(db: sqlite3.Connection, builds: Sequence[str]) -> list[str]:
    """Removes the builds. Returns the images of snapshots that no other build has."""
    images = []
    for id in builds:
        (snapshot,) = db.execute("SELECT snapshot FROM template_builds WHERE id = ?", (id,)).fetchone()
        db.execute("DELETE FROM template_builds WHERE id = ?", (id,))
        db.execute("DELETE FROM template_build_logs WHERE id = ?", (id,))
        if db.execute("SELECT 1 FROM template_builds WHERE snapshot = ?", (snapshot,)).fetchone() is None:
            images += db.execute("SELECT image FROM snapshots WHERE id = ?", (snapshot,)).fetchall()
            delete_snapshot(db, snapshot)
    return [image for (image,) in images]


def _assign_tags(db: sqlite3.Connection, template: str, tags: Sequence[str], build: str) -> None:
    rows = [(template, tag, build, time.time()) for tag in tags]
    db.executemany("INSERT OR REPLACE INTO template_tags VALUES (?, ?, ?, ?)", rows)
    _check_tags(db, template)


def _check_tags(db: sqlite3.Connection, template: str) -> None:
    """Call within the transaction that has just added tags: they are not kept if there are too many."""
    (count,) = db.execute("SELECT COUNT(*) FROM template_tags WHERE template = ?", (template,)).fetchone()
    if count > MAX_TAGS:
        raise errors.InvalidRequest(f"a template can have {MAX_TAGS} tags: remove some that you do not need")
    query = """SELECT COUNT(*) FROM built_templates JOIN template_tags ON template_tags.template = built_templates.id
        WHERE owner = (SELECT owner FROM built_templates WHERE id = ?)"""
    (count,) = db.execute(query, (template,)).fetchone()
    if count > MAX_OWNER_TAGS:
        raise errors.InvalidRequest(f"your templates can have {MAX_OWNER_TAGS} tags together: remove some")


def _tagged_build(db: sqlite3.Connection, template: str, tag: str) -> str | None:
    row = db.execute("SELECT build FROM template_tags WHERE template = ? AND tag = ?", (template, tag)).fetchone()
    return None if row is None else str(row[0])


def _assign_like(db: sqlite3.Connection, template: str, tags: Sequence[str], like: str) -> str | None:
    build = _tagged_build(db, template, like)
    if build is not None:
        _assign_tags(db, template, tags, build)
    return build


def _remove_tags(db: sqlite3.Connection, template: str, tags: Sequence[str]) -> int:
    query = "DELETE FROM template_tags WHERE template = ? AND tag = ?"
    return sum(db.execute(query, (template, tag)).rowcount for tag in tags)


def _remove_template(db: sqlite3.Connection, template: str) -> list[str]:
    builds = db.execute("SELECT id FROM template_builds WHERE template = ?", (template,)).fetchall()
    images = _remove_builds(db, [id for (id,) in builds])
    db.execute("DELETE FROM template_tags WHERE template = ?", (template,))
    db.execute("DELETE FROM built_templates WHERE id = ?", (template,))
    return images


def _clean_builds(db: sqlite3.Connection, is_live: Callable[[str], bool], why: str) -> int:
    failed = 0
    for row in db.execute(f"{_BUILD} WHERE state IN ('waiting', 'building') AND instance IS NOT NULL").fetchall():
        build = _decode_build(row)
        if build.instance is not None and not is_live(build.instance):
            said = BuildLogEntry(at=time.time(), level="error", message=why)
            _update_build(db, msgspec.structs.replace(build, state="error", reason=why, logs=(*build.logs, said)))
            failed += 1
    before = retention_now() - BUILD_KEPT_SECONDS
    over = "(state = 'error' OR state = 'waiting' AND instance IS NULL)"
    db.execute(f"DELETE FROM template_builds WHERE created_at < ? AND {over}", (before,))
    db.execute("DELETE FROM template_build_logs WHERE id NOT IN (SELECT id FROM template_builds)")
    unused = "id NOT IN (SELECT template FROM template_builds)"
    db.execute(f"DELETE FROM built_templates WHERE created_at < ? AND {unused}", (before,))
    return failed


# Archives of files that template builds copy, kept by owner and by the client's own digest of them.

MAX_OWNER_ARCHIVE_BYTES = 4 * GIB  # of one owner; the least recently used go first
MAX_OWNER_ARCHIVES = 1000
ARCHIVE_KEPT_SECONDS = 7 * 86400.0  # after their last use
ARCHIVE_PREFIX = "bf"


class BuildFiles:
    """The archives.

    A digest is the client's name for its files and proves nothing, so each owner has their own.
    """

    def __init__(self, database: Database, directory: Path):
        self._database = database
        self.allow: CheckAllowance = allow_anything
        self._blobs = Blobs(directory)

    async def has(self, owner: str, digest: str) -> bool:
        """Whether it is there. That counts as a use."""
        now, id = time.time(), _archive_id(owner, digest)
        return await self._database.do(lambda db: _touch_archive(db, id, now))

    async def put(self, owner: str, digest: str, chunks: AsyncIterable[bytes], max_bytes: int) -> None:
        """Raises TooLarge, Unavailable, QuotaExceeded, and the errors of the chunks; an older archive stays then."""
        await self.allow(owner, 0)
        id = _archive_id(owner, digest)
        size = await self._blobs.put(id, chunks, max_bytes)
        for old in await self._database.do(lambda db: _insert_archive(db, id, owner, size)):
            await self._blobs.remove(old)

    async def chunks(self, owner: str, digest: str) -> AsyncGenerator[bytes, None]:
        """Raises FileNotFound."""
        id = _archive_id(owner, digest)
        try:
            return await self._blobs.chunks(id)
        except errors.FileNotFound:  # it was removed: a new upload must not be refused as known
            await self._database.do(lambda db: _delete_archives(db, [id]))
            raise

    async def clean(self) -> None:
        """Removes archives that were not used for long, and leftovers of killed processes."""
        before = retention_now() - ARCHIVE_KEPT_SECONDS
        for old in await self._database.do(lambda db: _delete_archives_before(db, before)):
            await self._blobs.remove(old)
        await self._blobs.remove_orphans((ARCHIVE_PREFIX,), self._known_archives)

    async def _known_archives(self, ids: list[str]) -> set[str]:
        found = await self._database.do(lambda db: db.execute("SELECT id FROM template_files").fetchall())
        return {id for (id,) in found} & set(ids)


def _archive_id(owner: str, digest: str) -> str:
    return ARCHIVE_PREFIX + hashlib.sha256(f"{owner}\0{digest}".encode()).hexdigest()


def _touch_archive(db: sqlite3.Connection, id: str, now: float) -> bool:
    with db:
        return bool(db.execute("UPDATE template_files SET used_at = ? WHERE id = ?", (now, id)).rowcount)


def _insert_archive(db: sqlite3.Connection, id: str, owner: str, size: int) -> Sequence[str]:
    """Inserts an archive. Returns the ids of those that were removed to make room."""
    with db:
        db.execute("INSERT OR REPLACE INTO template_files VALUES (?, ?, ?, ?)", (id, owner, size, time.time()))
        query = "SELECT id, bytes FROM template_files WHERE owner = ? ORDER BY used_at DESC"
        kept, gone = 0, []
        for number, (each, bytes) in enumerate(db.execute(query, (owner,)).fetchall(), 1):
            kept += bytes
            if (kept > MAX_OWNER_ARCHIVE_BYTES or number > MAX_OWNER_ARCHIVES) and each != id:
                gone.append(each)
        _delete_archive_rows(db, gone)
        return gone


def _delete_archives_before(db: sqlite3.Connection, before: float) -> Sequence[str]:
    with db:
        old = [id for (id,) in db.execute("SELECT id FROM template_files WHERE used_at < ?", (before,)).fetchall()]
        _delete_archive_rows(db, old)
        return old


def _delete_archives(db: sqlite3.Connection, ids: Sequence[str]) -> None:
    with db:
        _delete_archive_rows(db, ids)


def _delete_archive_rows(db: sqlite3.Connection, ids: Sequence[str]) -> None:
    db.executemany("DELETE FROM template_files WHERE id = ?", [(id,) for id in ids])
