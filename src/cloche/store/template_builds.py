"""Templates that were built by steps, in SQLite: their names, their builds, and which build a tag means.

What a build made is a snapshot. Both come into being in one transaction, with the tags that point there: after a crash
there is all of it or nothing.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import msgspec

from cloche import errors
from cloche.model import Limits, Snapshot, Struct, new_id
from cloche.store.database import Database
from cloche.store.snapshots import insert_snapshot

T = TypeVar("T")
BuildState = Literal["waiting", "building", "ready", "error"]
Level = Literal["debug", "info", "warn", "error"]

DEFAULT_TAG = "default"
KEPT_UNTAGGED = 10  # builds of a template that no tag means any more
KEPT_SECONDS = 7 * 86400.0  # of builds that failed or never began

_BUILD = "SELECT body FROM template_builds"
_BUILD_WITHOUT_LOGS = "SELECT json_remove(body, '$.logs') FROM template_builds"


class BuiltTemplate(Struct):
    id: str
    owner: str
    name: str
    created_at: float


class LogEntry(Struct):
    at: float
    level: Level
    message: str
    step: str | None = None


class Build(Struct):
    """One build, which is a version of its template for good."""

    id: str  # a UUID
    template: str  # its id
    owner: str
    tags: tuple[str, ...]  # that mean it once it is ready
    limits: Limits  # of its sandboxes
    created_at: float
    updated_at: float
    state: BuildState = "waiting"
    instance: str | None = None  # the host process that builds it
    snapshot: str | None = None  # what it made
    recipe: str | None = None  # a digest of all that it was made of
    reason: str | None = None  # why it failed
    step: str | None = None  # at which step
    logs: tuple[LogEntry, ...] = ()  # the last of them, once it has ended


class Tag(Struct):
    tag: str
    build: str
    created_at: float


class StoredBuilds:
    """Those of one database, which somebody else opens and closes. All raise sqlite3.Error where it cannot be used."""

    def __init__(self, database: Database):
        self._database = database

    async def request(self, name: str, build: Build) -> BuiltTemplate:
        """The template of that name, made if need be, with this build, whose `template` is filled in here."""
        return await self._database.do(lambda db: _request(db, name, build))

    async def template(self, ref: str, owner: str) -> BuiltTemplate | None:
        """The one of that id or name."""
        return await self._database.do(lambda db: _template(db, ref, owner))

    async def owner_of(self, id: str) -> str | None:
        query = "SELECT owner FROM built_templates WHERE id = ?"
        row = await self._database.do(lambda db: db.execute(query, (id,)).fetchone())
        return None if row is None else str(row[0])

    async def templates(self, owner: str) -> Sequence[BuiltTemplate]:
        """By name."""
        query = "SELECT id, owner, name, created_at FROM built_templates WHERE owner = ? ORDER BY name"
        rows = await self._database.do(lambda db: db.execute(query, (owner,)).fetchall())
        return [_built(row) for row in rows]

    async def build(self, id: str, owner: str) -> Build | None:
        query = f"{_BUILD} WHERE id = ? AND owner = ?"
        row = await self._database.do(lambda db: db.execute(query, (id, owner)).fetchone())
        return None if row is None else _decoded(row)

    async def builds(self, template: str) -> Sequence[Build]:
        """The newest first, without their logs."""
        query = f"{_BUILD_WITHOUT_LOGS} WHERE template = ? ORDER BY created_at DESC, id"
        rows = await self._database.do(lambda db: db.execute(query, (template,)).fetchall())
        return [_decoded(row) for row in rows]

    async def count(self, owner: str) -> int:
        """How many builds are known."""
        query = "SELECT COUNT(*) FROM template_builds WHERE owner = ?"
        return int((await self._database.do(lambda db: db.execute(query, (owner,)).fetchone()))[0])

    async def begin(self, build: Build) -> bool:
        """Whether it waited until now: of two that start it, one does."""
        return await self._database.do(lambda db: _begin(db, build))

    async def put(self, build: Build) -> None:
        """As it is now, if it is still there."""
        await self._database.do(lambda db: _in_transaction(db, lambda: _update(db, build)))

    async def finish(self, build: Build, snapshot: Snapshot | None) -> Sequence[str]:
        """It is ready, its tags mean it, and `snapshot` is what it made; None: one that there is already.

        The images that nobody needs any more, because no tag means their builds, and newer ones are there. One that was
        removed meanwhile leaves nothing: then its own image is among them. Raises TemplateBuildFailed where what there
        was is gone.
        """
        return await self._database.do(lambda db: _in_transaction(db, lambda: _finish(db, build, snapshot)))

    async def same(self, owner: str, recipe: str) -> str | None:
        """The snapshot of a ready build that was made of the same."""
        query = """SELECT snapshots.id FROM template_builds JOIN snapshots ON snapshots.id = template_builds.snapshot
            WHERE template_builds.owner = ? AND recipe = ? ORDER BY template_builds.created_at DESC LIMIT 1"""
        row = await self._database.do(lambda db: db.execute(query, (owner, recipe)).fetchone())
        return None if row is None else str(row[0])

    async def tags(self, template: str) -> Sequence[Tag]:
        """The newest first."""
        query = "SELECT tag, build, created_at FROM template_tags WHERE template = ? ORDER BY created_at DESC, tag"
        rows = await self._database.do(lambda db: db.execute(query, (template,)).fetchall())
        return [Tag(tag=tag, build=build, created_at=created_at) for tag, build, created_at in rows]

    async def assign(self, template: str, tags: Sequence[str], build: str) -> None:
        """Those tags mean that build from now on."""
        await self._database.do(lambda db: _in_transaction(db, lambda: _assign(db, template, tags, build)))

    async def unassign(self, template: str, tags: Sequence[str]) -> int:
        """How many of them there were."""
        return await self._database.do(lambda db: _in_transaction(db, lambda: _unassign(db, template, tags)))

    async def remove(self, template: str) -> Sequence[str]:
        """The template with all its builds is gone. The images that nobody needs any more."""
        return await self._database.do(lambda db: _in_transaction(db, lambda: _remove(db, template)))

    async def clean(self, is_live: Callable[[str], bool], why: str) -> int:
        """Builds of host processes that are dead have failed, for that reason; what is old is gone. How many failed."""
        return await self._database.do(lambda db: _in_transaction(db, lambda: _clean(db, is_live, why)))


def _in_transaction(db: sqlite3.Connection, work: Callable[[], T]) -> T:
    with db:
        return work()


def _built(row: tuple[str, str, str, float]) -> BuiltTemplate:
    id, owner, name, created_at = row
    return BuiltTemplate(id=id, owner=owner, name=name, created_at=created_at)


def _decoded(row: tuple[str]) -> Build:
    return msgspec.json.decode(row[0], type=Build)


def _template(db: sqlite3.Connection, ref: str, owner: str) -> BuiltTemplate | None:
    query = "SELECT id, owner, name, created_at FROM built_templates WHERE owner = ? AND (id = ? OR name = ?)"
    row = db.execute(query, (owner, ref, ref)).fetchone()
    return None if row is None else _built(row)


def _request(db: sqlite3.Connection, name: str, build: Build) -> BuiltTemplate:
    with db:
        template = BuiltTemplate(id=new_id("t"), owner=build.owner, name=name, created_at=build.created_at)
        db.execute("INSERT OR IGNORE INTO built_templates VALUES (?, ?, ?, ?)", msgspec.structs.astuple(template))
        found = _template(db, name, build.owner)
        assert found is not None
        build = msgspec.structs.replace(build, template=found.id)
        db.execute("INSERT INTO template_builds VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (build.id, *_row(build)))
        return found


def _row(build: Build) -> tuple[object, ...]:
    body = msgspec.json.encode(build).decode()
    named = (build.template, build.owner, build.state, build.instance, build.snapshot, build.recipe, build.created_at)
    return (*named, body)


def _begin(db: sqlite3.Connection, build: Build) -> bool:
    with db:
        query = "SELECT 1 FROM template_builds WHERE id = ? AND state = 'waiting' AND instance IS NULL"
        return db.execute(query, (build.id,)).fetchone() is not None and _update(db, build)


def _update(db: sqlite3.Connection, build: Build) -> bool:
    columns = "template = ?, owner = ?, state = ?, instance = ?, snapshot = ?, recipe = ?, created_at = ?, body = ?"
    return bool(db.execute(f"UPDATE template_builds SET {columns} WHERE id = ?", (*_row(build), build.id)).rowcount)


def _finish(db: sqlite3.Connection, build: Build, snapshot: Snapshot | None) -> list[str]:
    if not _update(db, build):
        return [] if snapshot is None else [snapshot.image]
    if snapshot is not None:
        insert_snapshot(db, snapshot)
    elif db.execute("SELECT 1 FROM snapshots WHERE id = ?", (build.snapshot,)).fetchone() is None:
        raise errors.TemplateBuildFailed("the same was built before, and deleted just now: build it again")
    _assign(db, build.template, build.tags, build.id)
    return _remove_superseded(db, build.template)


def _remove_superseded(db: sqlite3.Connection, template: str) -> list[str]:
    query = """SELECT id FROM template_builds WHERE template = ?1 AND state = 'ready' AND id NOT IN
        (SELECT build FROM template_tags WHERE template = ?1) ORDER BY created_at DESC LIMIT -1 OFFSET ?2"""
    old = [id for (id,) in db.execute(query, (template, KEPT_UNTAGGED)).fetchall()]
    return _remove_builds(db, old)


def _remove_builds(db: sqlite3.Connection, builds: Sequence[str]) -> list[str]:
    """The images of those whose snapshots no other build has."""
    images = []
    for id in builds:
        (snapshot,) = db.execute("SELECT snapshot FROM template_builds WHERE id = ?", (id,)).fetchone()
        db.execute("DELETE FROM template_builds WHERE id = ?", (id,))
        if db.execute("SELECT 1 FROM template_builds WHERE snapshot = ?", (snapshot,)).fetchone() is None:
            images += db.execute("SELECT image FROM snapshots WHERE id = ?", (snapshot,)).fetchall()
            db.execute("DELETE FROM snapshots WHERE id = ?", (snapshot,))
    return [image for (image,) in images]


def _assign(db: sqlite3.Connection, template: str, tags: Sequence[str], build: str) -> None:
    rows = [(template, tag, build, time.time()) for tag in tags]
    db.executemany("INSERT OR REPLACE INTO template_tags VALUES (?, ?, ?, ?)", rows)


def _unassign(db: sqlite3.Connection, template: str, tags: Sequence[str]) -> int:
    query = "DELETE FROM template_tags WHERE template = ? AND tag = ?"
    return sum(db.execute(query, (template, tag)).rowcount for tag in tags)


def _remove(db: sqlite3.Connection, template: str) -> list[str]:
    builds = db.execute("SELECT id FROM template_builds WHERE template = ?", (template,)).fetchall()
    images = _remove_builds(db, [id for (id,) in builds])
    db.execute("DELETE FROM template_tags WHERE template = ?", (template,))
    db.execute("DELETE FROM built_templates WHERE id = ?", (template,))
    return images


def _clean(db: sqlite3.Connection, is_live: Callable[[str], bool], why: str) -> int:
    failed = 0
    for row in db.execute(f"{_BUILD} WHERE state IN ('waiting', 'building') AND instance IS NOT NULL").fetchall():
        build = _decoded(row)
        if build.instance is not None and not is_live(build.instance):
            said = LogEntry(at=time.time(), level="error", message=why)
            _update(db, msgspec.structs.replace(build, state="error", reason=why, logs=(*build.logs, said)))
            failed += 1
    before = time.time() - KEPT_SECONDS
    over = "(state = 'error' OR state = 'waiting' AND instance IS NULL)"
    db.execute(f"DELETE FROM template_builds WHERE created_at < ? AND {over}", (before,))
    unused = "id NOT IN (SELECT template FROM template_builds)"
    db.execute(f"DELETE FROM built_templates WHERE created_at < ? AND {unused}", (before,))
    return failed
