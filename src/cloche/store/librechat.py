"""Files of LibreChat's code API, who may use them, and when they go: rows in SQLite, contents in blobs."""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable
from typing import Literal

import msgspec

from cloche import errors
from cloche.model import GIB, Struct
from cloche.store.base import Allow, anything
from cloche.store.blobs import Blobs
from cloche.store.database import Database
from cloche.store.retention_clock import surely_past

PREFIX = "lc-"
TOUCH_SECONDS = 60.0  # a use is written down once in so many seconds: most requests only read
MAX_OWNER_FILES = 200_000
MAX_OWNER_BYTES = 64 * GIB
MAX_USER_FILES = 20_000
MAX_USER_BYTES = 8 * GIB

Kind = Literal["user", "agent", "skill"]
Ref = tuple[str, str]  # storage session, file


class Space(Struct):
    """Whose a file is. Those of an agent or a skill are for all users of a tenant."""

    owner: str
    tenant: str = ""
    kind: Kind = "user"
    id: str = ""
    version: str = ""  # of a skill

    @property
    def key(self) -> str:
        """One text for each, whatever is in the parts."""
        return msgspec.json.encode((self.tenant, self.kind, self.id, self.version)).decode()

    def has(self, file: CodeFile) -> bool:
        return file.owner == self.owner and file.space == self.key


class Tenant(Struct):
    """All spaces of a tenant: what a client may use that was not told apart from others and names no space."""

    owner: str
    tenant: str = ""

    def has(self, file: CodeFile) -> bool:
        return file.owner == self.owner and file.tenant == self.tenant


Reach = Space | Tenant


class Content(Struct):
    """What was put into a blob, and is no file yet."""

    id: str
    bytes: int
    sha256: str


class CodeFile(Struct):
    id: str
    session: str  # that it was uploaded to, or that made it
    owner: str
    tenant: str
    user: str  # who brought it; empty where nobody can tell
    space: str
    name: str  # exactly as it was given, with its slashes
    bytes: int
    content_type: str
    read_only: bool
    sha256: str
    created_at: float
    used_at: float

    @property
    def ref(self) -> Ref:
        return self.session, self.id


_COLUMNS = CodeFile.__struct_fields__
_GET = f"SELECT {', '.join(_COLUMNS)} FROM code_files"
_PUT = f"INSERT INTO code_files ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"
# A file lives as long as a session whose /mnt/data it is part of, whoever else uses it.
_IN_WORKSPACE = """EXISTS (
    SELECT 1 FROM code_workspaces AS part JOIN code_sessions AS whole ON whole.key = part.key
    WHERE part.file = code_files.id AND whole.used_at > :since)"""
_ALIVE = f"(used_at > :since OR {_IN_WORKSPACE})"
# Somebody else's is looked for as long as what never was. The `+` keeps the search by id: an owner may have many.
_OWN = "+owner = :owner AND +tenant = :tenant"


def new_file(
    content: Content,
    space: Space,
    *,
    session: str,
    user: str,
    name: str,
    content_type: str,
    read_only: bool = False,
) -> CodeFile:
    """A file with that content; `add` makes it known."""
    now = time.time()
    return CodeFile(
        id=content.id,
        session=session,
        owner=space.owner,
        tenant=space.tenant,
        user=user,
        space=space.key,
        name=name,
        bytes=content.bytes,
        content_type=content_type,
        read_only=read_only,
        sha256=content.sha256,
        created_at=now,
        used_at=now,
    )


class StoredCodeFiles:
    """A file that nobody used for `kept_seconds` is gone."""

    def __init__(self, database: Database, blobs: Blobs, kept_seconds: float):
        self._database = database
        self.allow: Allow = anything
        self._blobs = blobs
        self._kept_seconds = kept_seconds + TOUCH_SECONDS

    async def check_room(self, owner: str, tenant: str = "", user: str = "", *, files: int = 1, bytes: int = 0) -> None:
        """Raises TooLarge if so much more is over what an owner, or one user of theirs, may have; QuotaExceeded."""
        await self.allow(owner, bytes)
        if await self._no_room(owner, tenant, user, files, bytes) is None:
            return
        await self.prune()
        problem = await self._no_room(owner, tenant, user, files, bytes)
        if problem is not None:
            raise errors.TooLarge(problem)

    async def put_content(self, id: str, chunks: AsyncIterable[bytes], max_bytes: int) -> Content:
        """It is no file yet: `add` makes it one. Raises TooLarge, Unavailable, and what the chunks raise."""
        digest = hashlib.sha256()
        size = await self._blobs.put(PREFIX + id, _digesting(chunks, digest.update), max_bytes)
        return Content(id=id, bytes=size, sha256=digest.hexdigest())

    async def drop(self, ids: Iterable[str]) -> None:
        """What was not to become files after all, however far it got."""
        gone = list(ids)
        await self._database.do(lambda db: _remove(db, gone))
        await self._drop_contents(gone)

    async def add(self, files: Iterable[CodeFile]) -> None:
        """Makes them known, all or none."""
        new = list(files)
        await self._database.do(lambda db: _add(db, new))

    async def get(self, reach: Reach, session: str, id: str) -> CodeFile:
        """It counts as a use. Raises FileNotFound, also for what is not within reach."""
        found = await self.find([(reach, (session, id))])
        if not found:
            raise errors.FileNotFound("File not found")
        return found[session, id]

    async def find(self, asked: Iterable[tuple[Reach, Ref]]) -> dict[Ref, CodeFile]:
        """Those of the asked files that are there and within a reach given for them. It counts as a use."""
        reaches: dict[Ref, list[Reach]] = {}
        for reach, ref in asked:
            reaches.setdefault(ref, []).append(reach)
        asking = {(reach.owner, reach.tenant) for each in reaches.values() for reach in each}
        ids, since = [id for _, id in reaches], self._since()
        rows = await self._database.do(lambda db: [row for who in asking for row in _of_ids(db, ids, since, *who)])
        files = map(_file, rows)
        found = self._used_now(file for file in files if any(each.has(file) for each in reaches.get(file.ref, ())))
        return {file.ref: file for file in found}

    async def of_session(self, reach: Reach, session: str, limit: int) -> list[CodeFile]:
        """Files of one storage session, the oldest first."""
        query = f"{_GET} WHERE session = :session AND {_OWN} AND {_ALIVE} ORDER BY created_at, id LIMIT :limit"
        whose = {"owner": reach.owner, "tenant": reach.tenant}
        values = {"session": session, "since": self._since(), "limit": limit, **whose}
        rows = await self._database.do(lambda db: db.execute(query, values).fetchall())
        return self._used_now(file for file in map(_file, rows) if reach.has(file))

    def touch(self, files: Iterable[CodeFile]) -> None:
        """They are in use now. Never waits."""
        self._used_now(files)

    async def chunks(self, file: CodeFile) -> AsyncGenerator[bytes, None]:
        """Its content. Raises FileNotFound before the first."""
        return await self._blobs.chunks(PREFIX + file.id)

    async def contents(self, files: Iterable[CodeFile]) -> list[bytes | None]:
        """Of small files, all at once. None for one that is gone."""
        return await self._blobs.contents([PREFIX + file.id for file in files])

    async def remove(self, files: Iterable[CodeFile]) -> None:
        """Their rows and contents. Harmless for those that are gone already."""
        await self.drop(file.id for file in files)
        self._database.scrub_soon()

    async def prune(self) -> None:
        """Removes files and sessions whose time is over."""
        since = surely_past() - self._kept_seconds
        await self._drop_contents(await self._database.do(lambda db: _expire(db, since)))

    def _since(self) -> float:
        return time.time() - self._kept_seconds

    def _used_now(self, files: Iterable[CodeFile]) -> list[CodeFile]:
        now = time.time()
        stale, used = [], []
        for file in files:
            if file.used_at < now - TOUCH_SECONDS:
                stale.append((now, file.id))
                file = msgspec.structs.replace(file, used_at=now)
            used.append(file)
        if stale:
            self._database.do_later(lambda db: _touch_files(db, stale))
        return used

    async def _drop_contents(self, ids: list[str]) -> None:
        for id in ids:
            await self._blobs.remove(PREFIX + id)

    async def _no_room(self, owner: str, tenant: str, user: str, files: int, bytes: int) -> str | None:
        """Why not, in words."""
        problem = _over(await self._used(owner=owner), files, bytes, MAX_OWNER_FILES, MAX_OWNER_BYTES)
        if problem is None and user:
            used = await self._used(owner=owner, tenant=tenant, user=user)
            problem = _over(used, files, bytes, MAX_USER_FILES, MAX_USER_BYTES)
        return problem

    async def _used(self, **where: str) -> tuple[int, int]:
        condition = " AND ".join(f"{column} = ?" for column in where)
        query = f"SELECT COALESCE(SUM(files), 0), COALESCE(SUM(bytes), 0) FROM code_room WHERE {condition}"
        count, size = await self._database.do(lambda db: db.execute(query, tuple(where.values())).fetchone())
        return int(count), int(size)


def _over(used: tuple[int, int], files: int, bytes: int, most_files: int, most_bytes: int) -> str | None:
    count, size = used
    if count + files <= most_files and size + bytes <= most_bytes:
        return None
    return (
        f"You have {count} files of {size} bytes, and {most_files} of {most_bytes} bytes are possible: "
        "delete some first, or wait until those that nobody uses expire"
    )


async def _digesting(chunks: AsyncIterable[bytes], update: Callable[[bytes], object]) -> AsyncGenerator[bytes, None]:
    async for chunk in chunks:
        update(chunk)
        yield chunk


def _add(db: sqlite3.Connection, files: list[CodeFile]) -> None:
    with db:
        db.executemany(_PUT, [msgspec.structs.astuple(file) for file in files])
        _count(db, [file.id for file in files], 1)


def _count(db: sqlite3.Connection, ids: list[str], sign: int) -> None:
    """What each user has is written down: to count it at each upload would take longer than the upload."""
    query = """SELECT owner, tenant, user, COUNT(*), SUM(bytes) FROM code_files
        WHERE id IN (SELECT value FROM json_each(?)) GROUP BY owner, tenant, user"""
    for *who, files, size in db.execute(query, (_json(ids),)).fetchall():
        put = "INSERT INTO code_room (owner, tenant, user, files, bytes) VALUES (?, ?, ?, ?, ?)"
        more = "ON CONFLICT DO UPDATE SET files = files + excluded.files, bytes = bytes + excluded.bytes"
        db.execute(f"{put} {more}", (*who, sign * files, sign * size))
        db.execute("DELETE FROM code_room WHERE owner = ? AND tenant = ? AND user = ? AND files <= 0", who)


def _json(ids: list[str]) -> str:
    return msgspec.json.encode(ids).decode()


def _of_ids(db: sqlite3.Connection, ids: list[str], since: float, owner: str, tenant: str) -> list[tuple[object, ...]]:
    query = f"{_GET} WHERE id IN (SELECT value FROM json_each(:ids)) AND {_OWN} AND {_ALIVE}"
    return db.execute(query, {"ids": _json(ids), "since": since, "owner": owner, "tenant": tenant}).fetchall()


def _touch_files(db: sqlite3.Connection, stale: list[tuple[float, str]]) -> None:
    with db:
        db.executemany("UPDATE code_files SET used_at = ? WHERE id = ?", stale)


def _expire(db: sqlite3.Connection, since: float) -> list[str]:
    """The files that were removed."""
    with db:
        gone = "SELECT key FROM code_sessions WHERE used_at <= ?"
        db.execute(f"DELETE FROM code_workspaces WHERE key IN ({gone})", (since,))
        db.execute("DELETE FROM code_sessions WHERE used_at <= ?", (since,))
        query = f"SELECT id FROM code_files WHERE used_at <= :since AND NOT {_IN_WORKSPACE}"
        ids = [str(id) for (id,) in db.execute(query, {"since": since}).fetchall()]
        _delete(db, ids)
        return ids


def _remove(db: sqlite3.Connection, ids: list[str]) -> None:
    with db:
        _delete(db, ids)
        db.executemany("DELETE FROM code_workspaces WHERE file = ?", [(id,) for id in ids])


def _delete(db: sqlite3.Connection, ids: list[str]) -> None:
    _count(db, ids, -1)
    db.executemany("DELETE FROM code_files WHERE id = ?", [(id,) for id in ids])


def _file(row: tuple[object, ...]) -> CodeFile:
    return msgspec.convert(dict(zip(_COLUMNS, row, strict=True)), CodeFile, strict=False)


# What was in /mnt/data of LibreChat's runtime sessions, so that one that has ended goes on where it was.

MAX_SESSIONS = 10_000


class WorkspaceEntry(Struct):
    """A file of a /mnt/data, or an empty directory: that has no file."""

    path: str  # relative
    session: str = ""
    file: str = ""


class StoredCodeSessions:
    """A session that nobody used for `kept_seconds` is forgotten. Until then, the files of its workspace are kept.

    A `key` is the caller's own: let it be a hash of who asks and of what they call the session. An `owner` is whoever
    shall not have more than `most` of them.
    """

    def __init__(self, database: Database, kept_seconds: float):
        self._database = database
        self._kept_seconds = kept_seconds + TOUCH_SECONDS

    async def remember_workspace(
        self, key: str, owner: str, entries: Iterable[WorkspaceEntry], *, most: int = MAX_SESSIONS
    ) -> None:
        """It is this now, and in use. Of too many, those are forgotten that nobody used for longest."""
        rows = [(key, entry.path, entry.session, entry.file) for entry in entries]
        await self._database.do(lambda db: _remember(db, key, owner, rows, most))

    async def workspace(self, key: str, owner: str) -> list[WorkspaceEntry] | None:
        """What it was, in the order of its paths; None for one that is not known. It counts as a use."""
        since = time.time() - self._kept_seconds
        rows = await self._database.do(lambda db: _recall(db, key, owner, since))
        if rows is None:
            return None
        return [WorkspaceEntry(path=path, session=session, file=file) for path, session, file in rows]

    def touch(self, key: str, owner: str) -> None:
        """It is in use now. Never waits."""
        self._database.do_later(lambda db: _touch_session(db, key, owner))

    async def forget(self, key: str, owner: str) -> None:
        """Harmless when it is not known. Its files live on their own time."""
        await self._database.do(lambda db: _forget(db, key, owner))


def _remember(db: sqlite3.Connection, key: str, owner: str, rows: list[tuple[str, str, str, str]], most: int) -> None:
    with db:
        put = "INSERT INTO code_sessions (key, owner, used_at) VALUES (?, ?, ?)"
        db.execute(f"{put} ON CONFLICT (key) DO UPDATE SET used_at = excluded.used_at", (key, owner, time.time()))
        db.execute("DELETE FROM code_workspaces WHERE key = ?", (key,))
        db.executemany("INSERT OR REPLACE INTO code_workspaces (key, path, session, file) VALUES (?, ?, ?, ?)", rows)
        old = "SELECT key FROM code_sessions WHERE owner = ? ORDER BY used_at DESC LIMIT -1 OFFSET ?"
        for (gone,) in db.execute(old, (owner, most)).fetchall():
            db.execute("DELETE FROM code_workspaces WHERE key = ?", (gone,))
            db.execute("DELETE FROM code_sessions WHERE key = ?", (gone,))


def _recall(db: sqlite3.Connection, key: str, owner: str, since: float) -> list[tuple[str, str, str]] | None:
    known = "SELECT 1 FROM code_sessions WHERE key = ? AND owner = ? AND used_at > ?"
    if db.execute(known, (key, owner, since)).fetchone() is None:
        return None
    _touch_session(db, key, owner)
    query = "SELECT path, session, file FROM code_workspaces WHERE key = ? ORDER BY path"
    return db.execute(query, (key,)).fetchall()


def _touch_session(db: sqlite3.Connection, key: str, owner: str) -> None:
    with db:
        db.execute("UPDATE code_sessions SET used_at = ? WHERE key = ? AND owner = ?", (time.time(), key, owner))


def _forget(db: sqlite3.Connection, key: str, owner: str) -> None:
    with db:
        if db.execute("DELETE FROM code_sessions WHERE key = ? AND owner = ?", (key, owner)).rowcount:
            db.execute("DELETE FROM code_workspaces WHERE key = ?", (key,))
