"""Conversations: named lists of items that turns go on from and add to."""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import msgspec

from cloche import errors
from cloche.model import GIB, MIB, Struct
from cloche.store.base import Allow, anything
from cloche.store.database import Database

Json = dict[str, Any]
Mint = Callable[[str], str]  # a new id, for an item of that type

MAX_ITEMS = 10_000  # of one conversation
MAX_BYTES = 64 * MIB
MAX_CONVERSATIONS = 10_000  # of one owner
MAX_BYTES_OF_OWNER = 1 * GIB
MAX_GRAVES = 1000  # of one conversation
REMOVED_AT_ONCE = 32 * MIB
ITEM_BYTES = 256  # that removing one is worth, however small it is


class Conversation(Struct):
    """`container` is where its code ran last; `items` and `bytes` are how much it holds."""

    id: str
    owner: str
    created_at: float
    used_at: float
    container: str | None = None
    items: int = 0
    bytes: int = 0
    metadata: dict[str, str] = {}


_COLUMNS = Conversation.__struct_fields__
_PUT = f"INSERT INTO conversations ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"
_GET = f"SELECT {', '.join(_COLUMNS)} FROM conversations"


class Conversations:
    """Items are as their client sees them, with the outputs of code; each has an id that is unique in its own.

    `minted` are the ids of such items that got theirs here: only those can be referred to from elsewhere. The place of
    an item that was deleted is remembered, for whoever walks through the list and deletes what he has seen.
    """

    def __init__(self, database: Database):
        self._database = database
        self.allow: Allow = anything

    async def create(
        self, owner: str, metadata: dict[str, str], items: Sequence[Json], minted: Collection[str] = ()
    ) -> Conversation:
        """Raises InvalidRequest if it cannot hold as much, or its owner has too many, and QuotaExceeded."""
        await self.allow(owner, sum(map(_size, items)))
        now = time.time()
        id = "conv_" + secrets.token_hex(24)
        made = Conversation(id=id, owner=owner, created_at=now, used_at=now, metadata=metadata)
        await self._database.do(lambda db: _create(db, made, items, minted))
        return made

    async def get(self, owner: str, id: str) -> Conversation | None:
        return await self._database.do(lambda db: _get(db, id, owner))

    async def describe(self, id: str, metadata: dict[str, str]) -> None:
        """Its metadata are these now."""
        text = msgspec.json.encode(metadata).decode()
        await self._database.do(lambda db: _describe(db, id, text))

    async def delete(self, id: str) -> None:
        await self._database.do(lambda db: _delete(db, id))
        self._database.scrub_soon()

    async def items(self, id: str) -> list[Json]:
        """All, the oldest first."""
        return await self._database.do(lambda db: _items(db, id))

    async def page(
        self, id: str, limit: int, order: Literal["asc", "desc"], after: str | None = None
    ) -> tuple[list[Json], bool]:
        """So many that come after one, and whether there are more. Raises NotFound if that one never was there."""
        return await self._database.do(lambda db: _page(db, id, limit, order, after))

    async def item(self, id: str, item: str) -> Json | None:
        return await self._database.do(lambda db: _item(db, id, item))

    async def remove_item(self, id: str, item: str) -> None:
        """Harmless if it is not there."""
        await self._database.do(lambda db: _remove_item(db, id, item))
        self._database.scrub_soon()

    async def add(self, id: str, items: Sequence[Json], minted: Collection[str], mint: Mint) -> list[Json]:
        """At its end. The items as they are there: one whose id is taken has another.

        Raises InvalidRequest, QuotaExceeded.
        """
        await self._check_allowed(id, items)
        return await self._database.do(lambda db: _add(db, id, items, minted, mint))

    async def check_room(self, id: str, items: Sequence[Json]) -> None:
        """Before a turn begins that adds these. Raises InvalidRequest if it cannot hold them, or is full already.

        Raises QuotaExceeded.
        """
        await self._check_allowed(id, items)
        await self._database.do(lambda db: _check_room(db, id, len(items) + 1, sum(map(_size, items))))

    def add_turn(
        self, id: str, items: Sequence[Json], minted: Collection[str], mint: Mint, container: str | None
    ) -> None:
        """What a turn added, and where its code ran. Never waits. Harmless if the conversation was deleted.

        There was room when the turn began. What is more than that is kept as well: the next turn is refused.
        """
        self._database.do_later(lambda db: _add_turn(db, id, items, minted, mint, container))

    def prune(self, before: float) -> None:
        """Removes those that were used before only. Never waits."""
        self._database.do_later(lambda db: self._remove(db, before))

    async def _check_allowed(self, id: str, items: Sequence[Json]) -> None:
        owner = await self._database.do(lambda db: _owner(db, id))
        if owner is not None:
            await self.allow(owner, sum(map(_size, items)))

    def _remove(self, db: sqlite3.Connection, before: float) -> None:
        """Some at a time: others who need the store have their turn between."""
        if _prune_some(db, before) and not self._database.closing:
            self._database.do_later(lambda db: self._remove(db, before))


def _get(db: sqlite3.Connection, id: str, owner: str) -> Conversation | None:
    row = db.execute(f"{_GET} WHERE id = ? AND owner = ?", (id, owner)).fetchone()
    return None if row is None else _conversation(row)


def _owner(db: sqlite3.Connection, id: str) -> str | None:
    row = db.execute("SELECT owner FROM conversations WHERE id = ?", (id,)).fetchone()
    return None if row is None else row[0]


def _create(db: sqlite3.Connection, made: Conversation, items: Sequence[Json], minted: Collection[str]) -> None:
    values = [getattr(made, name) for name in _COLUMNS[:-1]]
    with db:
        count = db.execute("SELECT COUNT(*) FROM conversations WHERE owner = ?", (made.owner,)).fetchone()[0]
        if count >= MAX_CONVERSATIONS:
            raise errors.InvalidRequest(
                f"there can be {MAX_CONVERSATIONS} conversations of one owner: delete some that you do not need"
            )
        db.execute(_PUT, (*values, msgspec.json.encode(made.metadata).decode()))
        _check_room(db, made.id, len(items), sum(map(_size, items)))
        _insert(db, made.id, items, minted)


def _describe(db: sqlite3.Connection, id: str, metadata: str) -> None:
    with db:
        db.execute("UPDATE conversations SET metadata = ?, used_at = ? WHERE id = ?", (metadata, time.time(), id))


def _items(db: sqlite3.Connection, id: str) -> list[Json]:
    query = "SELECT body FROM conversation_items WHERE conversation = ? AND bytes > 0 ORDER BY position"
    return [msgspec.json.decode(body) for (body,) in db.execute(query, (id,))]


def _page(
    db: sqlite3.Connection, id: str, limit: int, order: Literal["asc", "desc"], after: str | None
) -> tuple[list[Json], bool]:
    query = "SELECT body FROM conversation_items WHERE conversation = ? AND bytes > 0"
    values: tuple[object, ...] = (id,)
    if after is not None:
        query += f" AND position {'>' if order == 'asc' else '<'} ?"
        values = (id, _position(db, id, after))
    rows = db.execute(f"{query} ORDER BY position {order} LIMIT ?", (*values, limit + 1)).fetchall()
    return [msgspec.json.decode(body) for (body,) in rows[:limit]], len(rows) > limit


def _position(db: sqlite3.Connection, id: str, item: str) -> int:
    query = "SELECT position FROM conversation_items WHERE conversation = ? AND id = ?"
    row = db.execute(query, (id, item)).fetchone()
    if row is None:
        raise errors.NotFound(f"there is no '{item[:100]}' in this list")
    return int(row[0])


def _item(db: sqlite3.Connection, id: str, item: str) -> Json | None:
    query = "SELECT body FROM conversation_items WHERE conversation = ? AND id = ? AND bytes > 0"
    row = db.execute(query, (id, item)).fetchone()
    return None if row is None else msgspec.json.decode(row[0])


def _remove_item(db: sqlite3.Connection, id: str, item: str) -> None:
    """Its place stays, with nothing in it."""
    where = "conversation = ? AND id = ? AND bytes > 0"
    with db:
        row = db.execute(f"SELECT bytes FROM conversation_items WHERE {where}", (id, item)).fetchone()
        if row is None:
            return
        db.execute(f"UPDATE conversation_items SET bytes = 0, minted = 0, body = '' WHERE {where}", (id, item))
        db.execute("UPDATE conversations SET items = items - 1, bytes = bytes - ? WHERE id = ?", (row[0], id))
        graves = "SELECT position FROM conversation_items WHERE conversation = ? AND bytes = 0"
        old = f"{graves} ORDER BY position DESC LIMIT -1 OFFSET ?"
        db.execute(
            f"DELETE FROM conversation_items WHERE conversation = ? AND position IN ({old})", (id, id, MAX_GRAVES)
        )


def _add(db: sqlite3.Connection, id: str, items: Sequence[Json], minted: Collection[str], mint: Mint) -> list[Json]:
    with db:
        _check_room(db, id, len(items), sum(map(_size, items)))
        return _insert_unique(db, id, items, minted, mint)


def _insert_unique(
    db: sqlite3.Connection, id: str, items: Sequence[Json], minted: Collection[str], mint: Mint
) -> list[Json]:
    unique = [_unique(db, id, item, mint) for item in items]
    new = {item["id"] for item in unique} - {item["id"] for item in items}
    _insert(db, id, unique, new.union(minted))
    return unique


def _unique(db: sqlite3.Connection, id: str, item: Json, mint: Mint) -> Json:
    query = "SELECT 1 FROM conversation_items WHERE conversation = ? AND id = ? AND bytes > 0"
    taken = db.execute(query, (id, item["id"])).fetchone() is not None
    return {**item, "id": mint(str(item.get("type")))} if taken else item


def _add_turn(
    db: sqlite3.Connection,
    id: str,
    items: Sequence[Json],
    minted: Collection[str],
    mint: Mint,
    container: str | None,
) -> None:
    with db:
        update = "UPDATE conversations SET container = COALESCE(?, container) WHERE id = ?"
        if db.execute(update, (container, id)).rowcount:
            _insert_unique(db, id, items, minted, mint)


def _check_room(db: sqlite3.Connection, id: str, items: int, size: int) -> None:
    query = "SELECT owner, items, bytes FROM conversations WHERE id = ?"
    row = db.execute(query, (id,)).fetchone()
    if row is None:
        return  # deleted a moment ago
    owner, items_there, bytes_there = row
    if items_there + items > MAX_ITEMS or bytes_there + size > MAX_BYTES:
        raise errors.InvalidRequest(
            f"a conversation holds {MAX_ITEMS} items and {MAX_BYTES} bytes at most, and this one is full: delete "
            "items of it, or begin another one"
        )
    total = db.execute("SELECT COALESCE(SUM(bytes), 0) FROM conversations WHERE owner = ?", (owner,)).fetchone()[0]
    if total + size > MAX_BYTES_OF_OWNER:
        raise errors.InvalidRequest(
            f"all conversations of one owner hold {MAX_BYTES_OF_OWNER} bytes at most: delete some that you do not need"
        )


def _insert(db: sqlite3.Connection, id: str, items: Sequence[Json], minted: Collection[str]) -> None:
    last = "SELECT COALESCE(MAX(position), -1) FROM conversation_items WHERE conversation = ?"
    position = db.execute(last, (id,)).fetchone()[0] + 1
    texts = [(item["id"], item["id"] in minted, msgspec.json.encode(item)) for item in items]
    graves = "DELETE FROM conversation_items WHERE conversation = ? AND id = ? AND bytes = 0"
    db.executemany(graves, [(id, item) for item, _, _ in texts])
    insert = (
        "INSERT INTO conversation_items (conversation, position, id, minted, bytes, body) VALUES (?, ?, ?, ?, ?, ?)"
    )
    rows = [
        (id, position + at, item, is_ours, len(text), text.decode()) for at, (item, is_ours, text) in enumerate(texts)
    ]
    db.executemany(insert, rows)
    update = "UPDATE conversations SET items = items + ?, bytes = bytes + ?, used_at = ? WHERE id = ?"
    db.execute(update, (len(rows), sum(row[4] for row in rows), time.time(), id))


def _size(item: Json) -> int:
    return len(msgspec.json.encode(item))


def _delete(db: sqlite3.Connection, id: str) -> None:
    with db:
        db.execute("DELETE FROM conversation_items WHERE conversation = ?", (id,))
        db.execute("DELETE FROM conversations WHERE id = ?", (id,))


def _prune_some(db: sqlite3.Connection, before: float) -> bool:
    """Whether there were any."""
    query = "SELECT id, bytes + items * ? FROM conversations WHERE used_at < ? ORDER BY used_at LIMIT 1000"
    ids, size = list[tuple[str]](), 0
    for id, bytes in db.execute(query, (ITEM_BYTES, before)).fetchall():
        if size >= REMOVED_AT_ONCE:
            break
        size += bytes
        ids.append((id,))
    with db:
        db.executemany("DELETE FROM conversation_items WHERE conversation = ?", ids)
        db.executemany("DELETE FROM conversations WHERE id = ?", ids)
    return bool(ids)


def _conversation(row: Sequence[object]) -> Conversation:
    fields = dict(zip(_COLUMNS, row, strict=True))
    return msgspec.convert({**fields, "metadata": msgspec.json.decode(str(fields["metadata"]))}, Conversation)
