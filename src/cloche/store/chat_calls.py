"""What chats need to have remembered, though they are stateless: turns that wait for the client.

A turn that ends with calls for the client may have thought and run code before. The client gives only its own calls
back; their ids lead here, to all of the turn.
"""

from __future__ import annotations

import re
import secrets
import sqlite3
import time
from collections.abc import Iterable
from typing import Any

import msgspec

from cloche.model import GIB, MIB, Struct
from cloche.store.database import Database
from cloche.store.lengths import is_longer
from cloche.store.past import surely_past

KEPT_SECONDS = 86400.0
MAX_BYTES = 8 * MIB  # of one turn; a larger one is not remembered
MAX_TURNS = 1000  # of one owner
MAX_OWNER_BYTES = 256 * MIB
MAX_BYTES_IN_ALL = 4 * GIB  # the oldest go first
PRUNED_AFTER = 256 * MIB  # written: a busy server does not wait for the hour
REMOVED_AT_ONCE = 32 * MIB
MAX_FOUND = 64  # turns that one request goes back to: the last
MAX_FOUND_BYTES = 64 * MIB

_CALL_ID = re.compile(r"(call_[0-9a-f]{21})[0-9]{3}")
_PUT = "INSERT OR REPLACE INTO chat_calls (owner, call, created_at, transcript) VALUES (?, ?, ?, ?)"
_GET = "SELECT transcript FROM chat_calls WHERE owner = ? AND call = ? AND created_at > ?"
# The length of a blob is known without reading it.
_NEWEST = "(ORDER BY created_at DESC, call ROWS UNBOUNDED PRECEDING)"
_TOO_MUCH = (
    "SELECT call FROM (SELECT call, ROW_NUMBER() OVER newest AS number, SUM(LENGTH(transcript)) OVER newest AS size "
    f"FROM chat_calls WHERE owner = ? WINDOW newest AS {_NEWEST}) WHERE number > ? OR size > ?"
)
_TOO_MUCH_IN_ALL = (
    "SELECT owner, call, bytes FROM (SELECT owner, call, LENGTH(transcript) AS bytes, "
    f"SUM(LENGTH(transcript)) OVER newest AS size FROM chat_calls WINDOW newest AS {_NEWEST}) WHERE size > ?"
)
_OLD = "SELECT owner, call, LENGTH(transcript) FROM chat_calls WHERE created_at < ?"
_FORGET = "DELETE FROM chat_calls WHERE owner = ? AND call = ?"


class ChatTurn(Struct):
    """Its items, as the upstream was shown them. `calls` are the ids that the client was given -> the upstream's."""

    items: list[dict[str, Any]]
    calls: dict[str, str]
    container: str | None = None


def new_turn_key() -> str:
    return "call_" + secrets.token_hex(11)[1:]


def call_id(turn_key: str, number: int) -> str:
    """The id of a turn's n-th call, as the client sees it. Upstreams' own are not always unique."""
    return f"{turn_key}{number % 1000:03d}"


class ChatCalls:
    def __init__(self, database: Database):
        self._database = database
        self._until_pruned = PRUNED_AFTER

    def put(self, owner: str, turn_key: str, turn: ChatTurn) -> None:
        """Keeps it for a day, unless it is very large. Never waits: whoever asks next finds it."""
        if is_longer(turn.items, MAX_BYTES):
            return
        content = msgspec.json.encode(turn)
        if len(content) > MAX_BYTES:
            return
        self._database.do_later(lambda db: _put(db, owner, turn_key, content))
        self._until_pruned -= len(content)
        if self._until_pruned < 0:
            self.prune()

    async def find(self, owner: str, calls: Iterable[str]) -> dict[str, ChatTurn]:
        """The turns that made these calls, by the calls' ids, as far as they are known: the last, of so many bytes."""
        keys = {call: found[1] for call in calls if (found := _CALL_ID.fullmatch(call))}
        if not keys:
            return {}
        last = list(dict.fromkeys(reversed(keys.values())))[:MAX_FOUND]
        rows = await self._database.do(lambda db: _get(db, owner, last))
        turns = {key: msgspec.json.decode(row, type=ChatTurn) for key, row in rows.items()}
        return {call: turns[key] for call, key in keys.items() if key in turns}

    def prune(self) -> None:
        """Removes what is older than a day, and what is too much."""
        self._until_pruned = PRUNED_AFTER
        before = surely_past() - KEPT_SECONDS
        self._database.do_later(lambda db: self._remove(db, _prunable(db, before)))

    def _remove(self, db: sqlite3.Connection, sizes: dict[tuple[str, str], int]) -> None:
        """Some at a time: others who need the store have their turn between."""
        size, keys = 0, list[tuple[str, str]]()
        while sizes and size < REMOVED_AT_ONCE and len(keys) < 1000:
            key, bytes = sizes.popitem()
            size += bytes
            keys.append(key)
        with db:
            db.executemany(_FORGET, keys)
        if sizes and not self._database.closing:
            self._database.do_later(lambda db: self._remove(db, sizes))


def _put(db: sqlite3.Connection, owner: str, key: str, content: bytes) -> None:
    with db:
        db.execute(_PUT, (owner, key, time.time(), content))
        for (old,) in db.execute(_TOO_MUCH, (owner, MAX_TURNS, MAX_OWNER_BYTES)).fetchall():
            db.execute(_FORGET, (owner, old))


def _get(db: sqlite3.Connection, owner: str, keys: Iterable[str]) -> dict[str, bytes]:
    """The transcripts with these keys, until they are too much."""
    found: dict[str, bytes] = {}
    left = MAX_FOUND_BYTES
    for key in keys:
        row = db.execute(_GET, (owner, key, time.time() - KEPT_SECONDS)).fetchone()
        left -= 0 if row is None else len(row[0])
        if left < 0:
            break
        if row is not None:
            found[key] = row[0]
    return found


def _prunable(db: sqlite3.Connection, before: float) -> dict[tuple[str, str], int]:
    """What is to go, by owner and key, with its bytes."""
    rows = [*db.execute(_OLD, (before,)), *db.execute(_TOO_MUCH_IN_ALL, (MAX_BYTES_IN_ALL,))]
    return {(owner, call): bytes for owner, call, bytes in rows}
