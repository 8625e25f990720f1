"""Records of sandboxes that have ended: which of them are too many.

They are bounded in number and in bytes, all together, and fairly: whoever has the most of them loses the oldest of
theirs, and a flood of one owner's takes none of the others'.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

from cloche.model import MIB
from cloche.store.fairness import equal_share

MAX_RECORDS = 200_000  # about 0.6 KB each, where their metadata are few
MAX_BYTES = 256 * MIB
ROW_BYTES = 256  # of one, beside what clients and programs have a say in

_TEXTS = ("metadata", "notes", "volumes", "revival", "end_reason", "template")
_SIZE = " + ".join([str(ROW_BYTES), *(f"LENGTH(CAST(COALESCE({name}, '') AS BLOB))" for name in _TEXTS)])
_ENDED = f"SELECT id, owner, ended_at, {_SIZE} AS size FROM sandboxes WHERE ended_at IS NOT NULL"
_OWNERS = f"SELECT owner, COUNT(*), SUM(size) FROM ({_ENDED}) GROUP BY owner"
_OF_OWNER = f"""SELECT id, ROW_NUMBER() OVER newest AS place, SUM(size) OVER newest AS bytes
    FROM ({_ENDED} AND owner = ?1) WINDOW newest AS (ORDER BY ended_at DESC, id ROWS UNBOUNDED PRECEDING)"""
_SURPLUS = f"SELECT id FROM ({_OF_OWNER}) WHERE place > ?2 OR bytes > ?3"


def surplus(db: sqlite3.Connection) -> Iterator[str]:
    """The ids of those that are to go."""
    owners = db.execute(_OWNERS).fetchall()
    count = equal_share((each for _, each, _ in owners), MAX_RECORDS)
    size = equal_share((each for _, _, each in owners), MAX_BYTES)
    for owner, own_count, own_size in owners:
        if own_count > count or own_size > size:
            yield from (id for (id,) in db.execute(_SURPLUS, (owner, count, size)).fetchall())
