"""Items that are kept, of responses and of conversations, by the ids that they got here.

Only such ids count: a client that chooses an id cannot put its text in the place of somebody else's.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from cloche import errors
from cloche.model import MIB

Json = dict[str, Any]

MAX_BYTES = 64 * MIB  # of the items that are found at once
MAX_READ_BYTES = 256 * MIB  # of the responses that they are looked for in
_AT_ONCE = 500  # ids in one query


class _Named(msgspec.Struct):
    id: Any = None


class _Body(msgspec.Struct):
    output: list[msgspec.Raw] = []


def found(db: sqlite3.Connection, owner: str, ids: Sequence[str], *, strict: bool) -> dict[str, Json]:
    """Those of the owner's items that are kept, by their ids.

    Raises InvalidRequest if they are too large; if not `strict`, those are left out that would be too much.
    """
    items: dict[str, Json] = {}
    size = 0
    try:
        for id, text in _texts(db, owner, ids):
            size += len(text)
            _check(size, MAX_BYTES)
            items.setdefault(id, msgspec.json.decode(text))
    except errors.InvalidRequest:
        if strict:
            raise
    return items


def _texts(db: sqlite3.Connection, owner: str, ids: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    groups = [ids[at : at + _AT_ONCE] for at in range(0, len(ids), _AT_ONCE)]
    known: dict[str, str] = {}
    for group in groups:
        query = f"SELECT id, response FROM response_items WHERE owner = ? AND id IN ({_marks(group)})"
        known |= dict(db.execute(query, (owner, *group)).fetchall())
    yield from _of_responses(db, _places(known, ids))
    for group in groups:
        yield from _of_conversations(db, owner, [id for id in group if id not in known])


def _places(known: Mapping[str, str], ids: Sequence[str]) -> dict[str, set[str]]:
    """The ids by their responses, those first whose ids come first."""
    places: dict[str, set[str]] = {}
    for id in ids:
        if id in known:
            places.setdefault(known[id], set()).add(id)
    return places


def _of_responses(db: sqlite3.Connection, places: Mapping[str, set[str]]) -> Iterator[tuple[str, bytes]]:
    read = 0
    for response, wanted in places.items():
        body, given = db.execute("SELECT body, input FROM responses WHERE id = ?", (response,)).fetchone()
        read += len(body) + len(given)
        _check(read, MAX_READ_BYTES)
        yield from _among(msgspec.json.decode(body, type=_Body).output, wanted)
        yield from _among(msgspec.json.decode(given, type=list[msgspec.Raw]), wanted)


def _of_conversations(db: sqlite3.Connection, owner: str, ids: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    query = (
        "SELECT items.id, items.body FROM conversation_items AS items "
        "JOIN conversations ON conversations.id = items.conversation "
        f"WHERE items.id IN ({_marks(ids)}) AND items.minted AND conversations.owner = ?"
    )
    for id, text in db.execute(query, (*ids, owner)):
        yield id, text.encode()


def _among(items: Sequence[msgspec.Raw], wanted: set[str]) -> Iterator[tuple[str, bytes]]:
    for raw in items:
        id = msgspec.json.decode(raw, type=_Named).id
        if isinstance(id, str) and id in wanted:
            yield id, bytes(raw)


def _marks(values: Sequence[str]) -> str:
    return ", ".join("?" * len(values))


def _check(size: int, most: int) -> None:
    if size > most:
        raise errors.InvalidRequest(
            f"the items that are named have more than {MAX_BYTES} bytes, or are among too much else: name fewer at "
            "once, or send what matters of them"
        )
