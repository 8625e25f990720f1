"""Files that clients have uploaded: rows in SQLite, contents in blobs."""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections.abc import AsyncGenerator, AsyncIterable

import msgspec

from cloche import errors
from cloche.model import GIB, Struct
from cloche.store.allowance import Allow, anything
from cloche.store.blobs import Blobs
from cloche.store.database import Database
from cloche.store.past import surely_past

PREFIX = "file-"
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


_COLUMNS = StoredFile.__struct_fields__
_GET = f"SELECT {', '.join(_COLUMNS)} FROM files"
_PUT = f"INSERT INTO files ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"


def new_file_id() -> str:
    """It begins with the time, so that ids sort by age: a list goes on after an id also once that file is gone."""
    milliseconds, time_digits = int(time.time() * 1000), ""
    for _ in range(_TIME_DIGITS):
        milliseconds, digit = divmod(milliseconds, 62)
        time_digits = _DIGITS[digit] + time_digits
    return PREFIX + time_digits + "".join(secrets.choice(_DIGITS) for _ in range(_RANDOM_DIGITS))


def made_here(id: str) -> bool:
    """Whether it looks like an id of ours: the time in it is one at which there was a Cloche. Others' do not."""
    digits = id.removeprefix(PREFIX)[:_TIME_DIGITS]
    if len(id) != len(PREFIX) + _TIME_DIGITS + _RANDOM_DIGITS or any(each not in _DIGITS for each in digits):
        return False
    milliseconds = 0
    for digit in digits:
        milliseconds = milliseconds * 62 + _DIGITS.index(digit)
    return _FIRST_MILLISECONDS <= milliseconds <= (time.time() + 86400) * 1000


class StoredFiles:
    """A file that nobody gave a time to live is removed after `kept_seconds`."""

    def __init__(self, database: Database, blobs: Blobs, kept_seconds: float):
        self._database = database
        self.allow: Allow = anything
        self._blobs = blobs
        self._kept_seconds = kept_seconds

    async def check_room(self, owner: str) -> None:
        """Raises TooLarge if that owner has as much as anybody may have, QuotaExceeded if as much as they may."""
        await self.allow(owner, 0)
        query = "SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM files WHERE owner = ?"
        count, size = await self._database.do(lambda db: db.execute(query, (owner,)).fetchone())
        if count >= MAX_OWNER_FILES or size >= MAX_OWNER_BYTES:
            raise errors.TooLarge(
                f"You have {count} files of {size} bytes, and {MAX_OWNER_FILES} of {MAX_OWNER_BYTES} bytes are "
                "possible: delete some first"
            )

    async def put_content(self, id: str, chunks: AsyncIterable[bytes], max_bytes: int) -> int:
        """How many bytes it has. It is no file yet: `add` makes it one. Raises TooLarge, and what the chunks raise."""
        return await self._blobs.put(id, chunks, max_bytes)

    async def drop(self, id: str) -> None:
        """What was not to become a file after all, however far it got."""
        await self._database.do(lambda db: _remove(db, [id]))
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
        await self._database.do(lambda db: _put(db, file))
        return file

    async def get(self, owner: str, id: str) -> StoredFile:
        """Raises FileNotFound."""
        query = f"{_GET} WHERE id = ? AND owner = ? AND (expires_at IS NULL OR expires_at > ?)"
        row = await self._database.do(lambda db: db.execute(query, (id, owner, time.time())).fetchone())
        if row is None:
            raise errors.FileNotFound(f"No such File object: {id[:100]}")
        return _file(row)

    async def list(
        self, owner: str, *, purpose: str | None = None, after: str | None = None, newest_first: bool, limit: int
    ) -> list[StoredFile]:
        """So many at most, from the one that follows `after`."""
        order, beyond = ("DESC", "<") if newest_first else ("ASC", ">")
        query = f"{_GET} WHERE owner = ? AND (expires_at IS NULL OR expires_at > ?)"
        values: list[object] = [owner, time.time()]
        if purpose is not None:
            query, values = f"{query} AND purpose = ?", [*values, purpose]
        if after is not None:
            query, values = f"{query} AND id {beyond} ?", [*values, after]
        query = f"{query} ORDER BY id {order} LIMIT ?"
        rows = await self._database.do(lambda db: db.execute(query, (*values, limit)).fetchall())
        return [_file(row) for row in rows]

    async def chunks(self, file: StoredFile) -> AsyncGenerator[bytes, None]:
        """Its content. Raises FileNotFound before the first."""
        return await self._blobs.chunks(file.id)

    async def remove(self, owner: str, id: str) -> None:
        """Raises FileNotFound."""
        file = await self.get(owner, id)
        await self._database.do(lambda db: _remove(db, [file.id]))
        await self._blobs.remove(file.id)

    async def prune(self) -> None:
        """Removes what has expired."""
        query = "SELECT id FROM files WHERE expires_at <= ?"
        rows = await self._database.do(lambda db: db.execute(query, (surely_past(),)).fetchall())
        ids = [str(id) for (id,) in rows]
        await self._database.do(lambda db: _remove(db, ids))
        for id in ids:
            await self._blobs.remove(id)


def _put(db: sqlite3.Connection, file: StoredFile) -> None:
    with db:
        db.execute(_PUT, msgspec.structs.astuple(file))


def _remove(db: sqlite3.Connection, ids: list[str]) -> None:
    with db:
        db.executemany("DELETE FROM files WHERE id = ?", [(id,) for id in ids])


def _file(row: tuple[object, ...]) -> StoredFile:
    return msgspec.convert(dict(zip(_COLUMNS, row, strict=True)), StoredFile)
