"""Files of LibreChat's code API, their access scopes and their expiry: rows in SQLite, contents in blobs."""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable
from typing import Literal

import msgspec

from cloche import errors
from cloche.model import GIB, Struct
from cloche.store.base import CheckAllowance, allow_anything
from cloche.store.blobs import Blobs
from cloche.store.database import Database
from cloche.store.retention_clock import retention_now

CODE_FILE_PREFIX = "lc-"
TOUCH_SECONDS = 60.0  # a use is written down once in so many seconds: most requests only read
MAX_OWNER_FILES = 200_000
MAX_OWNER_BYTES = 64 * GIB
MAX_USER_FILES = 20_000
MAX_USER_BYTES = 8 * GIB

SpaceKind = Literal["user", "agent", "skill"]
CodeFileRef = tuple[str, str]  # storage session, file


class FileSpace(Struct):
    """The space that a file belongs to. Files of an agent or a skill are for all users of a tenant."""

    owner: str
    tenant: str = ""
    kind: SpaceKind = "user"
    id: str = ""
    version: str = ""  # of a skill

    @property
    def key(self) -> str:
        """A unique text for each space, for any values of its fields."""
        return msgspec.json.encode((self.tenant, self.kind, self.id, self.version)).decode()

    def has(self, file: CodeFile) -> bool:
        return file.owner == self.owner and file.space == self.key


class TenantScope(Struct):
    """All spaces of a tenant: the scope of a client that is not identified as a user and names no space."""

    owner: str
    tenant: str = ""

    def has(self, file: CodeFile) -> bool:
        return file.owner == self.owner and file.tenant == self.tenant


AccessScope = FileSpace | TenantScope


class CodeFileContent(Struct):
    """A content in a blob that is not a file yet."""

    id: str
    bytes: int
    sha256: str


class CodeFile(Struct):
    id: str
    session: str  # that it was uploaded to, or that made it
    owner: str
    tenant: str
    user: str  # that uploaded it; empty if unknown
    space: str
    name: str  # exactly as it was given, with its slashes
    bytes: int
    content_type: str
    read_only: bool
    sha256: str
    created_at: float
    used_at: float

    @property
    def ref(self) -> CodeFileRef:
        return self.session, self.id


_FILE_COLUMNS = CodeFile.__struct_fields__
_GET_FILE = f"SELECT {', '.join(_FILE_COLUMNS)} FROM code_files"
_PUT_FILE = f"INSERT INTO code_files ({', '.join(_FILE_COLUMNS)}) VALUES ({', '.join('?' * len(_FILE_COLUMNS))})"
# A file lives as long as a session that has it in /mnt/data, even with other users.
_IN_WORKSPACE = """EXISTS (
    SELECT 1 FROM code_workspaces AS part JOIN code_sessions AS whole ON whole.key = part.key
    WHERE part.file = code_files.id AND whole.used_at > :since)"""
_ALIVE = f"(used_at > :since OR {_IN_WORKSPACE})"
# Another user's file takes as long as an unknown one. The `+` keeps the search by id: an owner may have many.
_OWN = "+owner = :owner AND +tenant = :tenant"


def new_code_file(
    content: CodeFileContent,
    space: FileSpace,
    *,
    session: str,
    user: str,
    name: str,
    content_type: str,
    read_only: bool = False,
) -> CodeFile:
    """Returns a file with that content; `add` registers it."""
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
    """Stored files. A file without use for `kept_seconds` is removed."""

    def __init__(self, database: Database, blobs: Blobs, kept_seconds: float):
        self._database = database
        self.allow: CheckAllowance = allow_anything
        self._blobs = blobs
        self._kept_seconds = kept_seconds + TOUCH_SECONDS

    async def check_room(self, owner: str, tenant: str = "", user: str = "", *, files: int = 1, bytes: int = 0) -> None:
        """Raises TooLarge if so much more exceeds the limit of the owner or of one of their users; QuotaExceeded."""
        await self.allow(owner, bytes)
        if await self._explain_no_room(owner, tenant, user, files, bytes) is None:
            return
        await self.prune_old()
        problem = await self._explain_no_room(owner, tenant, user, files, bytes)
        if problem is not None:
            raise errors.TooLarge(problem)

    async def put_content(self, id: str, chunks: AsyncIterable[bytes], max_bytes: int) -> CodeFileContent:
        """Stores a content, which `add` makes a file. Raises TooLarge, Unavailable, and the errors of the chunks."""
        digest = hashlib.sha256()
        size = await self._blobs.put(CODE_FILE_PREFIX + id, _update_digest(chunks, digest.update), max_bytes)
        return CodeFileContent(id=id, bytes=size, sha256=digest.hexdigest())

    async def drop(self, ids: Iterable[str]) -> None:
        """Discards contents that will not become files, in any state."""
        gone = list(ids)
        await self._database.do(lambda db: _remove_files(db, gone))
        await self._drop_contents(gone)

    async def add(self, files: Iterable[CodeFile]) -> None:
        """Registers the files, all or none."""
        new = list(files)
        await self._database.do(lambda db: _insert_files(db, new))

    async def get(self, reach: AccessScope, session: str, id: str) -> CodeFile:
        """Returns the file; it counts as a use. Raises FileNotFound, also for a file out of scope."""
        found = await self.find([(reach, (session, id))])
        if not found:
            raise errors.FileNotFound("File not found")
        return found[session, id]

    async def find(self, asked: Iterable[tuple[AccessScope, CodeFileRef]]) -> dict[CodeFileRef, CodeFile]:
        """Returns the requested files that exist and are within a scope given for them. It counts as a use."""
        reaches: dict[CodeFileRef, list[AccessScope]] = {}
        for reach, ref in asked:
            reaches.setdefault(ref, []).append(reach)
        asking = {(reach.owner, reach.tenant) for each in reaches.values() for reach in each}
        ids, since = [id for _, id in reaches], self._kept_since()
        rows = await self._database.do(
            lambda db: [row for who in asking for row in _select_by_ids(db, ids, since, *who)]
        )
        files = map(_decode_file, rows)
        found = self._mark_used(file for file in files if any(each.has(file) for each in reaches.get(file.ref, ())))
        return {file.ref: file for file in found}

    async def of_session(self, reach: AccessScope, session: str, limit: int) -> list[CodeFile]:
        """Lists the files of one storage session, the oldest first."""
        query = f"{_GET_FILE} WHERE session = :session AND {_OWN} AND {_ALIVE} ORDER BY created_at, id LIMIT :limit"
        scope = {"owner": reach.owner, "tenant": reach.tenant}
        values = {"session": session, "since": self._kept_since(), "limit": limit, **scope}
        rows = await self._database.do(lambda db: db.execute(query, values).fetchall())
        return self._mark_used(file for file in map(_decode_file, rows) if reach.has(file))

    def touch(self, files: Iterable[CodeFile]) -> None:
        """Marks the files as used now. Never waits."""
        self._mark_used(files)

    async def chunks(self, file: CodeFile) -> AsyncGenerator[bytes, None]:
        """Returns the content. Raises FileNotFound before the first chunk."""
        return await self._blobs.chunks(CODE_FILE_PREFIX + file.id)

    async def contents(self, files: Iterable[CodeFile]) -> list[bytes | None]:
        """Returns the contents of small files, all at once. None for a missing one."""
        return await self._blobs.contents([CODE_FILE_PREFIX + file.id for file in files])

    async def remove(self, files: Iterable[CodeFile]) -> None:
        """Removes rows and contents. Missing files are ignored."""
        await self.drop(file.id for file in files)
        self._database.scrub_soon()

    async def prune_old(self) -> None:
        """Removes expired files and sessions."""
        since = retention_now() - self._kept_seconds
        await self._drop_contents(await self._database.do(lambda db: _expire_files(db, since)))

    def _kept_since(self) -> float:
        return time.time() - self._kept_seconds

    def _mark_used(self, files: Iterable[CodeFile]) -> list[CodeFile]:
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
            await self._blobs.remove(CODE_FILE_PREFIX + id)

    async def _explain_no_room(self, owner: str, tenant: str, user: str, files: int, bytes: int) -> str | None:
        """Returns the reason why there is no room, or None."""
        problem = _explain_excess(await self._count_used(owner=owner), files, bytes, MAX_OWNER_FILES, MAX_OWNER_BYTES)
        if problem is None and user:
            used = await self._count_used(owner=owner, tenant=tenant, user=user)
            problem = _explain_excess(used, files, bytes, MAX_USER_FILES, MAX_USER_BYTES)
        return problem

    async def _count_used(self, **where: str) -> tuple[int, int]:
        condition = " AND ".join(f"{column} = ?" for column in where)
        query = f"SELECT COALESCE(SUM(files), 0), COALESCE(SUM(bytes), 0) FROM code_room WHERE {condition}"
        count, size = await self._database.do(lambda db: db.execute(query, tuple(where.values())).fetchone())
        return int(count), int(size)


def _explain_excess(used: tuple[int, int], files: int, bytes: int, most_files: int, most_bytes: int) -> str | None:
    count, size = used
    if count + files <= most_files and size + bytes <= most_bytes:
        return None
    return (
        f"You have {count} files of {size} bytes, and {most_files} of {most_bytes} bytes are possible: "
        "delete some first, or wait until unused files expire"
    )


async def _update_digest(
    chunks: AsyncIterable[bytes], update: Callable[[bytes], object]
) -> AsyncGenerator[bytes, None]:
    async for chunk in chunks:
        update(chunk)
        yield chunk


def _insert_files(db: sqlite3.Connection, files: list[CodeFile]) -> None:
    with db:
        db.executemany(_PUT_FILE, [msgspec.structs.astuple(file) for file in files])
        _count_files(db, [file.id for file in files], 1)


def _count_files(db: sqlite3.Connection, ids: list[str], sign: int) -> None:
    """Updates the stored totals of each user: counting at each upload would take longer than the upload."""
    query = """SELECT owner, tenant, user, COUNT(*), SUM(bytes) FROM code_files
        WHERE id IN (SELECT value FROM json_each(?)) GROUP BY owner, tenant, user"""
    for *who, files, size in db.execute(query, (_encode_ids(ids),)).fetchall():
        put = "INSERT INTO code_room (owner, tenant, user, files, bytes) VALUES (?, ?, ?, ?, ?)"
        more = "ON CONFLICT DO UPDATE SET files = files + excluded.files, bytes = bytes + excluded.bytes"
        db.execute(f"{put} {more}", (*who, sign * files, sign * size))
        db.execute("DELETE FROM code_room WHERE owner = ? AND tenant = ? AND user = ? AND files <= 0", who)


def _encode_ids(ids: list[str]) -> str:
    return msgspec.json.encode(ids).decode()


def _select_by_ids(
    db: sqlite3.Connection, ids: list[str], since: float, owner: str, tenant: str
) -> list[tuple[object, ...]]:
    query = f"{_GET_FILE} WHERE id IN (SELECT value FROM json_each(:ids)) AND {_OWN} AND {_ALIVE}"
    return db.execute(query, {"ids": _encode_ids(ids), "since": since, "owner": owner, "tenant": tenant}).fetchall()


def _touch_files(db: sqlite3.Connection, stale: list[tuple[float, str]]) -> None:
    with db:
        db.executemany("UPDATE code_files SET used_at = ? WHERE id = ?", stale)


def _expire_files(db: sqlite3.Connection, since: float) -> list[str]:
    """Deletes expired rows. Returns the ids of the files."""
    with db:
        gone = "SELECT key FROM code_sessions WHERE used_at <= ?"
        db.execute(f"DELETE FROM code_workspaces WHERE key IN ({gone})", (since,))
        db.execute("DELETE FROM code_sessions WHERE used_at <= ?", (since,))
        query = f"SELECT id FROM code_files WHERE used_at <= :since AND NOT {_IN_WORKSPACE}"
        ids = [str(id) for (id,) in db.execute(query, {"since": since}).fetchall()]
        _delete_files(db, ids)
        return ids


def _remove_files(db: sqlite3.Connection, ids: list[str]) -> None:
    with db:
        _delete_files(db, ids)
        db.executemany("DELETE FROM code_workspaces WHERE file = ?", [(id,) for id in ids])


def _delete_files(db: sqlite3.Connection, ids: list[str]) -> None:
    _count_files(db, ids, -1)
    db.executemany("DELETE FROM code_files WHERE id = ?", [(id,) for id in ids])


def _decode_file(row: tuple[object, ...]) -> CodeFile:
    return msgspec.convert(dict(zip(_FILE_COLUMNS, row, strict=True)), CodeFile, strict=False)


# Workspaces (/mnt/data) of LibreChat's runtime sessions, so that an ended session can continue.

MAX_SESSIONS = 10_000


class WorkspaceEntry(Struct):
    """A file of a workspace, or an empty directory, which has no file."""

    path: str  # relative
    session: str = ""
    file: str = ""


class StoredCodeSessions:
    """Stored sessions.

    One without use for `kept_seconds` is removed; until then its workspace's files are kept.

    A `key` is the caller's own: use a hash of the client and of its name for the session. An `owner` is the
    account that may not have more than `most` of them.
    """

    def __init__(self, database: Database, kept_seconds: float):
        self._database = database
        self._kept_seconds = kept_seconds + TOUCH_SECONDS

    async def save_workspace(
        self, key: str, owner: str, entries: Iterable[WorkspaceEntry], *, most: int = MAX_SESSIONS
    ) -> None:
        """Replaces the workspace and marks it as used. Beyond `most`, the least recently used are removed."""
        rows = [(key, entry.path, entry.session, entry.file) for entry in entries]
        await self._database.do(lambda db: _save_session(db, key, owner, rows, most))

    async def workspace(self, key: str, owner: str) -> list[WorkspaceEntry] | None:
        """Returns the workspace, ordered by path; None for an unknown session. It counts as a use."""
        since = time.time() - self._kept_seconds
        rows = await self._database.do(lambda db: _load_session(db, key, owner, since))
        if rows is None:
            return None
        return [WorkspaceEntry(path=path, session=session, file=file) for path, session, file in rows]

    def touch(self, key: str, owner: str) -> None:
        """Marks the session as used now. Never waits."""
        self._database.do_later(lambda db: _touch_session(db, key, owner))

    async def forget(self, key: str, owner: str) -> None:
        """Removes the session; an unknown one is ignored. Its files have their own expiry."""
        await self._database.do(lambda db: _delete_session(db, key, owner))


def _save_session(
    db: sqlite3.Connection, key: str, owner: str, rows: list[tuple[str, str, str, str]], most: int
) -> None:
    with db:
        put = "INSERT INTO code_sessions (key, owner, used_at) VALUES (?, ?, ?)"
        db.execute(f"{put} ON CONFLICT (key) DO UPDATE SET used_at = excluded.used_at", (key, owner, time.time()))
        db.execute("DELETE FROM code_workspaces WHERE key = ?", (key,))
        db.executemany("INSERT OR REPLACE INTO code_workspaces (key, path, session, file) VALUES (?, ?, ?, ?)", rows)
        old = "SELECT key FROM code_sessions WHERE owner = ? ORDER BY used_at DESC LIMIT -1 OFFSET ?"
        for (gone,) in db.execute(old, (owner, most)).fetchall():
            db.execute("DELETE FROM code_workspaces WHERE key = ?", (gone,))
            db.execute("DELETE FROM code_sessions WHERE key = ?", (gone,))


def _load_session(db: sqlite3.Connection, key: str, owner: str, since: float) -> list[tuple[str, str, str]] | None:
    known = "SELECT 1 FROM code_sessions WHERE key = ? AND owner = ? AND used_at > ?"
    if db.execute(known, (key, owner, since)).fetchone() is None:
        return None
    _touch_session(db, key, owner)
    query = "SELECT path, session, file FROM code_workspaces WHERE key = ? ORDER BY path"
    return db.execute(query, (key,)).fetchall()


def _touch_session(db: sqlite3.Connection, key: str, owner: str) -> None:
    with db:
        db.execute("UPDATE code_sessions SET used_at = ? WHERE key = ? AND owner = ?", (time.time(), key, owner))


def _delete_session(db: sqlite3.Connection, key: str, owner: str) -> None:
    with db:
        if db.execute("DELETE FROM code_sessions WHERE key = ? AND owner = ?", (key, owner)).rowcount:
            db.execute("DELETE FROM code_workspaces WHERE key = ?", (key,))
