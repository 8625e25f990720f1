"""Uploaded files of clients: rows in SQLite, contents in blobs."""

from __future__ import annotations

import posixpath
import secrets
import sqlite3
import time
from collections.abc import AsyncGenerator, AsyncIterable, Iterable
from typing import Literal

import msgspec

from cloche import errors
from cloche.model import GIB, Struct
from cloche.store.base import SHUT_DOWN_REASON, CheckAllowance, allow_anything
from cloche.store.blobs import Blobs
from cloche.store.database import Database
from cloche.store.retention_clock import retention_now

FILE_PREFIX = "file-"
MAX_OWNER_FILES = 10_000
MAX_OWNER_BYTES = 32 * GIB

_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"  # in the order of ASCII
_TIME_DIGITS, _RANDOM_DIGITS = 8, 14
_FIRST_MILLISECONDS = 1_735_689_600_000  # 2025: no file is older


class StoredFile(Struct):
    id: str
    owner: str
    filename: str
    purpose: str
    bytes: int
    created_at: float
    expires_at: float | None = None


_FILE_COLUMNS = StoredFile.__struct_fields__
_GET_FILE = f"SELECT {', '.join(_FILE_COLUMNS)} FROM files"
_PUT_FILE = f"INSERT INTO files ({', '.join(_FILE_COLUMNS)}) VALUES ({', '.join('?' * len(_FILE_COLUMNS))})"


def new_file_id() -> str:
    """Returns a new id. It begins with the time, so that ids sort by age.

    A list can continue after an id even if that file is gone.
    """
    milliseconds, time_digits = int(time.time() * 1000), ""
    for _ in range(_TIME_DIGITS):
        milliseconds, digit = divmod(milliseconds, 62)
        time_digits = _DIGITS[digit] + time_digits
    return FILE_PREFIX + time_digits + "".join(secrets.choice(_DIGITS) for _ in range(_RANDOM_DIGITS))


def is_own_file_id(id: str) -> bool:
    """Whether it looks like an id of ours: the time in it is one at which there was a Cloche."""
    digits = id.removeprefix(FILE_PREFIX)[:_TIME_DIGITS]
    if len(id) != len(FILE_PREFIX) + _TIME_DIGITS + _RANDOM_DIGITS or any(each not in _DIGITS for each in digits):
        return False
    milliseconds = 0
    for digit in digits:
        milliseconds = milliseconds * 62 + _DIGITS.index(digit)
    return _FIRST_MILLISECONDS <= milliseconds <= (time.time() + 86400) * 1000


class StoredFiles:
    """Stored files. A file without an expiry of its own is removed after `kept_seconds`."""

    def __init__(self, database: Database, blobs: Blobs, kept_seconds: float):
        self._database = database
        self.allow: CheckAllowance = allow_anything
        self._blobs = blobs
        self._kept_seconds = kept_seconds

    async def check_room(self, owner: str) -> None:
        """Raises TooLarge if the owner is at the limit of all owners, QuotaExceeded if at their own."""
        await self.allow(owner, 0)
        query = "SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM files WHERE owner = ?"
        count, size = await self._database.do(lambda db: db.execute(query, (owner,)).fetchone())
        if count >= MAX_OWNER_FILES or size >= MAX_OWNER_BYTES:
            raise errors.TooLarge(
                f"You have {count} files of {size} bytes, and {MAX_OWNER_FILES} of {MAX_OWNER_BYTES} bytes are "
                "possible: delete some first"
            )

    async def put_content(self, id: str, chunks: AsyncIterable[bytes], max_bytes: int) -> int:
        """Stores a content, which `add` makes a file. Returns its size.

        Raises TooLarge, and the errors of the chunks.
        """
        return await self._blobs.put(id, chunks, max_bytes)

    async def drop(self, id: str) -> None:
        """Discards a content that will not become a file, in any state."""
        await self._database.do(lambda db: _delete_files(db, [id]))
        await self._blobs.remove(id)

    async def add(
        self, id: str, owner: str, *, filename: str, purpose: str, bytes: int, seconds: float | None = None
    ) -> StoredFile:
        """Raises QuotaExceeded."""
        await self.allow(owner, bytes)
        now = time.time()
        file = StoredFile(
            id=id,
            owner=owner,
            filename=filename,
            purpose=purpose,
            bytes=bytes,
            created_at=now,
            expires_at=now + min(seconds or self._kept_seconds, self._kept_seconds),
        )
        await self._database.do(lambda db: _insert_file(db, file))
        return file

    async def get(self, owner: str, id: str) -> StoredFile:
        """Raises FileNotFound."""
        query = f"{_GET_FILE} WHERE id = ? AND owner = ? AND (expires_at IS NULL OR expires_at > ?)"
        row = await self._database.do(lambda db: db.execute(query, (id, owner, time.time())).fetchone())
        if row is None:
            raise errors.FileNotFound(f"No such File object: {id[:100]}")
        return _decode_file(row)

    async def list(
        self, owner: str, *, purpose: str | None = None, after: str | None = None, newest_first: bool, limit: int
    ) -> list[StoredFile]:
        """Lists at most `limit` files, from the one that follows `after`."""
        order, beyond = ("DESC", "<") if newest_first else ("ASC", ">")
        query = f"{_GET_FILE} WHERE owner = ? AND (expires_at IS NULL OR expires_at > ?)"
        values: list[object] = [owner, time.time()]
        if purpose is not None:
            query, values = f"{query} AND purpose = ?", [*values, purpose]
        if after is not None:
            query, values = f"{query} AND id {beyond} ?", [*values, after]
        query = f"{query} ORDER BY id {order} LIMIT ?"
        rows = await self._database.do(lambda db: db.execute(query, (*values, limit)).fetchall())
        return [_decode_file(row) for row in rows]

    async def chunks(self, file: StoredFile) -> AsyncGenerator[bytes, None]:
        """Returns the content. Raises FileNotFound before the first chunk."""
        return await self._blobs.chunks(file.id)

    async def remove(self, owner: str, id: str) -> None:
        """Raises FileNotFound."""
        file = await self.get(owner, id)
        await self._database.do(lambda db: _delete_files(db, [file.id]))
        await self._blobs.remove(file.id)

    async def prune_old(self) -> None:
        """Removes expired files."""
        query = "SELECT id FROM files WHERE expires_at <= ?"
        rows = await self._database.do(lambda db: db.execute(query, (retention_now(),)).fetchall())
        ids = [str(id) for (id,) in rows]
        await self._database.do(lambda db: _delete_files(db, ids))
        for id in ids:
            await self._blobs.remove(id)


def _insert_file(db: sqlite3.Connection, file: StoredFile) -> None:
    with db:
        db.execute(_PUT_FILE, msgspec.structs.astuple(file))


def _delete_files(db: sqlite3.Connection, ids: list[str]) -> None:
    with db:
        db.executemany("DELETE FROM files WHERE id = ?", [(id,) for id in ids])


def _decode_file(row: tuple[object, ...]) -> StoredFile:
    return msgspec.convert(dict(zip(_FILE_COLUMNS, row, strict=True)), StoredFile)


# Files of containers that have an id: their rows, and which contents are kept beyond the container's end.

CONTAINER_FILE_PREFIX = "cfile_"
COPY_PREFIX = "copy:"  # before a file's id in `origin`: it has changed, and its blob is one of its own
KILLED_SECONDS = 3600.0  # a turn that loses its container puts its files into the next one
FileSource = Literal["user", "assistant"]


class StoredContainerFile(Struct):
    id: str
    sandbox: str
    owner: str
    path: str  # absolute, inside
    source: FileSource
    bytes: int
    created_at: float
    modified_at: float = 0.0  # of the content that is kept, as the sandbox said
    kept: bool = False  # whether the blob of this id has its content
    origin: str | None = None  # its source: a file's id (the blob is a link of that file's), or else

    @property
    def made_from(self) -> str | None:
        """A file's id, or a digest: the same origin is not put into a container twice."""
        return None if self.origin is None else self.origin.removeprefix(COPY_PREFIX)

    @property
    def name(self) -> str:
        return posixpath.basename(self.path)

    @property
    def shown(self) -> bool:
        """Whether it is a picture that code displayed: it is kept, and in no directory of the sandbox."""
        return self.name.startswith(self.id)


_CONTAINER_COLUMNS = StoredContainerFile.__struct_fields__
_GET_CONTAINER_FILE = f"SELECT {', '.join(_CONTAINER_COLUMNS)} FROM container_files"
_CONTAINER_VALUES = f"({', '.join(_CONTAINER_COLUMNS)}) VALUES ({', '.join('?' * len(_CONTAINER_COLUMNS))})"
_ADD_CONTAINER_FILE = f"INSERT OR IGNORE INTO container_files {_CONTAINER_VALUES}"
_PUT_CONTAINER_FILE = f"INSERT OR REPLACE INTO container_files {_CONTAINER_VALUES}"


def new_container_file_id() -> str:
    """Returns a new id. It begins with the time, so that ids sort by age."""
    return f"{CONTAINER_FILE_PREFIX}{int(time.time() * 1000):012x}{secrets.token_hex(10)}"


class StoredContainerFiles:
    def __init__(self, database: Database, blobs: Blobs):
        self._database = database
        self.allow: CheckAllowance = allow_anything
        self.blobs = blobs

    async def get(self, owner: str, sandbox: str, id: str) -> StoredContainerFile:
        """Raises FileNotFound."""
        query = f"{_GET_CONTAINER_FILE} WHERE id = ? AND sandbox = ? AND owner = ?"
        row = await self._database.do(lambda db: db.execute(query, (id, sandbox, owner)).fetchone())
        if row is None:
            raise errors.FileNotFound(f"Container file with id '{id[:100]}' not found.")
        return _decode_container_file(row)

    async def list_by_sandbox(self, owner: str, sandbox: str) -> list[StoredContainerFile]:
        """Lists all files of that sandbox, the oldest first."""
        query = f"{_GET_CONTAINER_FILE} WHERE sandbox = ? AND owner = ? ORDER BY id"
        rows = await self._database.do(lambda db: db.execute(query, (sandbox, owner)).fetchall())
        return [_decode_container_file(row) for row in rows]

    async def register(self, files: Iterable[StoredContainerFile]) -> list[StoredContainerFile]:
        """Returns these rows; for a path that is registered already, the existing row."""
        wanted = list(files)
        return await self._database.do(lambda db: _register_files(db, wanted))

    async def put(self, file: StoredContainerFile) -> None:
        """Replaces the row of that id, and one of that path."""
        await self._database.do(lambda db: _replace_file(db, file))

    async def mark_kept(self, file: StoredContainerFile) -> bool:
        """Records that the content is in its blob now. False if the row was removed meanwhile."""
        return await self._database.do(lambda db: _mark_kept(db, file))

    async def kept_bytes(self, owner: str, sandbox: str, *, without: str | None = None) -> tuple[int, int]:
        """Returns the kept bytes of that owner and of that sandbox, of contents that are copies of their own.

        `without` is the id of a file that does not count.
        """
        return await self._database.do(lambda db: _sum_kept_bytes(db, owner, sandbox, without))

    async def remove(self, files: Iterable[StoredContainerFile]) -> None:
        """Removes rows and kept contents."""
        gone = list(files)
        await self._database.do(lambda db: _delete_container_files(db, [file.id for file in gone]))
        for file in gone:
            if file.kept:
                await self.blobs.remove(file.id)

    async def drop_content(self, file: StoredContainerFile) -> None:
        """Removes the kept content; the row stays, since the file still exists."""
        await self._database.do(lambda db: _mark_not_kept(db, [file.id]))
        await self.blobs.remove(file.id)

    async def lose(self, files: Iterable[StoredContainerFile]) -> None:
        """Removes the contents of vanished files.

        Rows with an origin stay: a file that code removed must not come again.
        """
        gone = list(files)
        await self._database.do(lambda db: _mark_not_kept(db, [file.id for file in gone if file.origin is not None]))
        await self._database.do(
            lambda db: _delete_container_files(db, [file.id for file in gone if file.origin is None])
        )
        for file in gone:
            if file.kept:
                await self.blobs.remove(file.id)

    async def prune_old(self, before: float) -> None:
        """Removes files older than that, and the files of sandboxes that their owners killed."""
        query = f"""{_GET_CONTAINER_FILE} WHERE created_at < ? OR sandbox IN
            (SELECT id FROM sandboxes WHERE state = 'killed' AND end_reason IS NOT ? AND ended_at < ?)"""
        values = (before, SHUT_DOWN_REASON, retention_now() - KILLED_SECONDS)
        rows = await self._database.do(lambda db: db.execute(query, values).fetchall())
        await self.remove(_decode_container_file(row) for row in rows)


def _register_files(db: sqlite3.Connection, files: list[StoredContainerFile]) -> list[StoredContainerFile]:
    with db:
        db.executemany(_ADD_CONTAINER_FILE, [msgspec.structs.astuple(file) for file in files])
    query = f"{_GET_CONTAINER_FILE} WHERE sandbox = ? AND path = ?"
    return [_decode_container_file(db.execute(query, (file.sandbox, file.path)).fetchone()) for file in files]


def _replace_file(db: sqlite3.Connection, file: StoredContainerFile) -> None:
    with db:
        db.execute(_PUT_CONTAINER_FILE, msgspec.structs.astuple(file))


def _sum_kept_bytes(db: sqlite3.Connection, owner: str, sandbox: str, without: str | None) -> tuple[int, int]:
    # A link takes no room while the file is there that it is of, which counts itself.
    query = """SELECT COALESCE(SUM(bytes), 0), COALESCE(SUM(bytes) FILTER (WHERE sandbox = ?), 0) FROM container_files
        WHERE owner = ? AND kept AND id IS NOT ? AND
        (origin IS NULL OR NOT EXISTS (SELECT 1 FROM files WHERE files.id = origin))"""
    all, own = db.execute(query, (sandbox, owner, without)).fetchone()
    return int(all), int(own)


def _mark_kept(db: sqlite3.Connection, file: StoredContainerFile) -> bool:
    with db:
        query = "UPDATE container_files SET kept = 1, bytes = ?, modified_at = ?, origin = ? WHERE id = ?"
        return db.execute(query, (file.bytes, file.modified_at, file.origin, file.id)).rowcount > 0


def _mark_not_kept(db: sqlite3.Connection, ids: list[str]) -> None:
    with db:
        db.executemany("UPDATE container_files SET kept = 0 WHERE id = ?", [(id,) for id in ids])


def _delete_container_files(db: sqlite3.Connection, ids: list[str]) -> None:
    with db:
        db.executemany("DELETE FROM container_files WHERE id = ?", [(id,) for id in ids])


def _decode_container_file(row: tuple[object, ...]) -> StoredContainerFile:
    return msgspec.convert(dict(zip(_CONTAINER_COLUMNS, row, strict=True)), StoredContainerFile, strict=False)
