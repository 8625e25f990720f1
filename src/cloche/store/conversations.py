"""Conversations: named lists of items that turns continue and extend."""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import msgspec

from cloche import errors
from cloche.model import GIB, MIB, Struct
from cloche.store.base import CheckAllowance, allow_anything
from cloche.store.database import Database

Json = dict[str, Any]
NewItemId = Callable[[str], str]  # a new id, for an item of that type

MAX_ITEMS = 10_000  # of one conversation
MAX_CONVERSATION_BYTES = 64 * MIB
MAX_CONVERSATIONS = 10_000  # of one owner
MAX_BYTES_OF_OWNER = 1 * GIB
MAX_TOMBSTONES = 1000  # of one conversation
REMOVED_AT_ONCE = 32 * MIB
ITEM_BYTES = 256  # that removing one is worth, however small it is


class StoredConversation(Struct):
    """A conversation. `container` is where its code ran last; `items` and `bytes` are its size."""

    id: str
    owner: str
    created_at: float
    used_at: float
    container: str | None = None
    items: int = 0
    bytes: int = 0
    metadata: dict[str, str] = {}


_COLUMNS = StoredConversation.__struct_fields__
_PUT = f"INSERT INTO conversations ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"
_GET = f"SELECT {', '.join(_COLUMNS)} FROM conversations"


class StoredConversations:
    """Stored conversations.

    Items are in the client's form, with the outputs of code; ids are unique within one.

    `minted` are the ids of items that were created here: only those can be referred to from elsewhere. The
    position of a deleted item is kept, for clients that page through the list and delete items on the way.
    """

    def __init__(self, database: Database):
        self._database = database
        self.allow: CheckAllowance = allow_anything

    async def create(
        self, owner: str, metadata: dict[str, str], items: Sequence[Json], minted: Collection[str] = ()
    ) -> StoredConversation:
        """Raises InvalidRequest if the items are too much, or the owner has too many; QuotaExceeded."""
        await self.allow(owner, sum(map(_item_size, items)))
        now = time.time()
        id = "conv_" + secrets.token_hex(24)
        made = StoredConversation(id=id, owner=owner, created_at=now, used_at=now, metadata=metadata)
        await self._database.do(lambda db: _insert_conversation(db, made, items, minted))
        return made

    async def get(self, owner: str, id: str) -> StoredConversation | None:
        return await self._database.do(lambda db: _get_conversation(db, id, owner))

    async def describe(self, id: str, metadata: dict[str, str]) -> None:
        """Replaces its metadata."""
        text = msgspec.json.encode(metadata).decode()
        await self._database.do(lambda db: _update_metadata(db, id, text))

    async def delete(self, id: str) -> None:
        await self._database.do(lambda db: _delete_conversation(db, id))
        self._database.scrub_soon()

    async def items(self, id: str) -> list[Json]:
        """Lists all items, the oldest first."""
        return await self._database.do(lambda db: _list_items(db, id))

    async def page(
        self, id: str, limit: int, order: Literal["asc", "desc"], after: str | None = None
    ) -> tuple[list[Json], bool]:
        """Returns `limit` items after one, and whether there are more. Raises NotFound if that one never existed."""
        return await self._database.do(lambda db: _list_page(db, id, limit, order, after))

    async def item(self, id: str, item: str) -> Json | None:
        return await self._database.do(lambda db: _get_item(db, id, item))

    async def remove_item(self, id: str, item: str) -> None:
        """Removes the item; a missing one is ignored."""
        await self._database.do(lambda db: _remove_item(db, id, item))
        self._database.scrub_soon()

    async def add(self, id: str, items: Sequence[Json], minted: Collection[str], mint: NewItemId) -> list[Json]:
        """Appends the items. Returns them as stored: an item gets another id if its own is taken.

        Raises InvalidRequest, QuotaExceeded.
        """
        await self._check_allowed(id, items)
        return await self._database.do(lambda db: _append_items(db, id, items, minted, mint))

    async def check_room(self, id: str, items: Sequence[Json]) -> None:
        """Call before a turn that adds these. Raises InvalidRequest if they do not fit, or it is full already.

        Raises QuotaExceeded.
        """
        await self._check_allowed(id, items)
        await self._database.do(lambda db: _check_room(db, id, len(items) + 1, sum(map(_item_size, items))))

    def add_turn(
        self, id: str, items: Sequence[Json], minted: Collection[str], mint: NewItemId, container: str | None
    ) -> None:
        """Appends a turn's items, and its container. Never waits. A deleted conversation is ignored.

        There was room when the turn began. Excess is stored as well: the next turn is refused.
        """
        self._database.do_later(lambda db: _add_turn(db, id, items, minted, mint, container))

    def prune_old(self, before: float) -> None:
        """Removes conversations without use since `before`. Never waits."""
        self._database.do_later(lambda db: self._prune_in_batches(db, before))

    async def _check_allowed(self, id: str, items: Sequence[Json]) -> None:
        owner = await self._database.do(lambda db: _find_owner(db, id))
        if owner is not None:
            await self.allow(owner, sum(map(_item_size, items)))

    def _prune_in_batches(self, db: sqlite3.Connection, before: float) -> None:
        """Removes some at a time, so that other work of the store runs in between."""
        if _prune_batch(db, before) and not self._database.closing:
            self._database.do_later(lambda db: self._prune_in_batches(db, before))


def _get_conversation(db: sqlite3.Connection, id: str, owner: str) -> StoredConversation | None:
    row = db.execute(f"{_GET} WHERE id = ? AND owner = ?", (id, owner)).fetchone()
    return None if row is None else _decode_conversation(row)


def _find_owner(db: sqlite3.Connection, id: str) -> str | None:
    row = db.execute("SELECT owner FROM conversations WHERE id = ?", (id,)).fetchone()
    return None if row is None else row[0]


def _insert_conversation(
    db: sqlite3.Connection, made: StoredConversation, items: Sequence[Json], minted: Collection[str]
) -> None:
    values = [getattr(made, name) for name in _COLUMNS[:-1]]
    with db:
        count = db.execute("SELECT COUNT(*) FROM conversations WHERE owner = ?", (made.owner,)).fetchone()[0]
        if count >= MAX_CONVERSATIONS:
            raise errors.InvalidRequest(
                f"there can be {MAX_CONVERSATIONS} conversations of one owner: delete some that you do not need"
            )
        db.execute(_PUT, (*values, msgspec.json.encode(made.metadata).decode()))
        _check_room(db, made.id, len(items), sum(map(_item_size, items)))
        _insert_items(db, made.id, items, minted)


def _update_metadata(db: sqlite3.Connection, id: str, metadata: str) -> None:
    with db:
        db.execute("UPDATE conversations SET metadata = ?, used_at = ? WHERE id = ?", (metadata, time.time(), id))


def _list_items(db: sqlite3.Connection, id: str) -> list[Json]:
    query = "SELECT body FROM conversation_items WHERE conversation = ? AND bytes > 0 ORDER BY position"
    return [msgspec.json.decode(body) for (body,) in db.execute(query, (id,))]


def _list_page(
    db: sqlite3.Connection, id: str, limit: int, order: Literal["asc", "desc"], after: str | None
) -> tuple[list[Json], bool]:
    query = "SELECT body FROM conversation_items WHERE conversation = ? AND bytes > 0"
    values: tuple[object, ...] = (id,)
    if after is not None:
        query += f" AND position {'>' if order == 'asc' else '<'} ?"
        values = (id, _find_position(db, id, after))
    rows = db.execute(f"{query} ORDER BY position {order} LIMIT ?", (*values, limit + 1)).fetchall()
    return [msgspec.json.decode(body) for (body,) in rows[:limit]], len(rows) > limit


def _find_position(db: sqlite3.Connection, id: str, item: str) -> int:
    query = "SELECT position FROM conversation_items WHERE conversation = ? AND id = ?"
    row = db.execute(query, (id, item)).fetchone()
    if row is None:
        raise errors.NotFound(f"there is no '{item[:100]}' in this list")
    return int(row[0])


def _get_item(db: sqlite3.Connection, id: str, item: str) -> Json | None:
    query = "SELECT body FROM conversation_items WHERE conversation = ? AND id = ? AND bytes > 0"
    row = db.execute(query, (id, item)).fetchone()
    return None if row is None else msgspec.json.decode(row[0])


def _remove_item(db: sqlite3.Connection, id: str, item: str) -> None:
    """Removes the item; its position stays, empty."""
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
            f"DELETE FROM conversation_items WHERE conversation = ? AND position IN ({old})", (id, id, MAX_TOMBSTONES)
        )


def _append_items(
    db: sqlite3.Connection, id: str, items: Sequence[Json], minted: Collection[str], mint: NewItemId
) -> list[Json]:
    with db:
        _check_room(db, id, len(items), sum(map(_item_size, items)))
        return _insert_unique(db, id, items, minted, mint)


def _insert_unique(
    db: sqlite3.Connection, id: str, items: Sequence[Json], minted: Collection[str], mint: NewItemId
) -> list[Json]:
    unique = [_ensure_unique_id(db, id, item, mint) for item in items]
    new = {item["id"] for item in unique} - {item["id"] for item in items}
    _insert_items(db, id, unique, new.union(minted))
    return unique


def _ensure_unique_id(db: sqlite3.Connection, id: str, item: Json, mint: NewItemId) -> Json:
    query = "SELECT 1 FROM conversation_items WHERE conversation = ? AND id = ? AND bytes > 0"
    taken = db.execute(query, (id, item["id"])).fetchone() is not None
    return {**item, "id": mint(str(item.get("type")))} if taken else item


def _add_turn(
    db: sqlite3.Connection,
    id: str,
    items: Sequence[Json],
    minted: Collection[str],
    mint: NewItemId,
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
    if items_there + items > MAX_ITEMS or bytes_there + size > MAX_CONVERSATION_BYTES:
        raise errors.InvalidRequest(
            f"a conversation holds {MAX_ITEMS} items and {MAX_CONVERSATION_BYTES} bytes at most, and this one is "
            "full: delete "
            "items of it, or begin another one"
        )
    total = db.execute("SELECT COALESCE(SUM(bytes), 0) FROM conversations WHERE owner = ?", (owner,)).fetchone()[0]
    if total + size > MAX_BYTES_OF_OWNER:
        raise errors.InvalidRequest(
            f"all conversations of one owner hold {MAX_BYTES_OF_OWNER} bytes at most: delete some that you do not need"
        )


def _insert_items(db: sqlite3.Connection, id: str, items: Sequence[Json], minted: Collection[str]) -> None:
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


def _item_size(item: Json) -> int:
    return len(msgspec.json.encode(item))


def _delete_conversation(db: sqlite3.Connection, id: str) -> None:
    with db:
        db.execute("DELETE FROM conversation_items WHERE conversation = ?", (id,))
        db.execute("DELETE FROM conversations WHERE id = ?", (id,))


def _prune_batch(db: sqlite3.Connection, before: float) -> bool:
    """Removes a batch. Whether there were any."""
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


def _decode_conversation(row: Sequence[object]) -> StoredConversation:
    fields = dict(zip(_COLUMNS, row, strict=True))
    return msgspec.convert({**fields, "metadata": msgspec.json.decode(str(fields["metadata"]))}, StoredConversation)
