"""Records of what requests to the gateway did: a request, its model calls, containers and executions.

Writes are batched, a moment later: no answer waits for a disk.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from cloche import errors
from cloche.model import MIB, Struct
from cloche.store.database import Database
from cloche.store.past import surely_past
from cloche.telemetry import log

Kind = Literal["request", "model_call", "container", "execution"]

BATCH_SECONDS = 0.05
KEPT_SECONDS = 30 * 86400.0
MAX_STEPS = 200_000
MAX_CAPTURED_BYTES = 256 * MIB  # of all records; what was captured first goes first
PRUNED_AFTER = 20_000  # writes: a busy server does not wait for the hour
MOST_OF_ONE_ID = 1000  # records that are shown of one request id


class Step(Struct):
    """One record. `parent` is the id of the record that it belongs to; the request's own has none."""

    id: str
    request: str  # the request's id; a client may have chosen it, so that several requests share one
    owner: str
    kind: Kind
    started_at: float
    seconds: float
    outcome: str  # "ok", an execution's outcome, "left", or an error's code
    parent: str | None = None
    fields: dict[str, Any] = {}  # tokens, container, model, leg, status, ..
    captured: dict[str, Any] = {}  # code, output, prompt: empty unless capture is on


class Page(Struct):
    """Which requests are listed: the newest, or those `before` a record."""

    limit: int = 50
    before: str | None = None
    owner: str | None = None
    outcome: str | None = None  # with `!` before it: any other
    model: str | None = None
    id: str | None = None  # that it has: its own, its response's, or that of a container it used
    since: float | None = None  # from then on it began; seconds since 1970
    until: float | None = None  # before then


_COLUMNS = Step.__struct_fields__
_PUT = f"INSERT OR REPLACE INTO steps ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"
_GET = f"SELECT {', '.join(_COLUMNS)} FROM steps"
_JSON = ("fields", "captured")
_OF_ONE_ID = f"""{_GET} WHERE request = ?1 AND (?2 IS NULL OR owner = ?2)
    ORDER BY started_at DESC LIMIT {MOST_OF_ONE_ID}"""
_UNDER_WAY = f"""{_GET} AS step WHERE started_at >= ?1 AND parent IS NOT NULL AND (?2 IS NULL OR owner = ?2)
    AND NOT EXISTS (SELECT 1 FROM steps WHERE id = step.parent) ORDER BY started_at DESC LIMIT {MOST_OF_ONE_ID}"""
_CONDITIONS = {  # on records of requests, by the field of Page
    "owner": "owner = ?",
    "outcome": "(outcome = ? OR outcome != SUBSTR(?, 2) AND ? LIKE '!%')",
    "since": "started_at >= ?",
    "until": "started_at < ?",
    "model": "json_extract(fields, '$.model') = ?",
    "id": """? IN (request, id, json_extract(fields, '$.response'), json_extract(fields, '$.completion'),
        (SELECT value FROM json_each(fields, '$.containers') WHERE value = ?))""",
}


class Steps:
    def __init__(self, database: Database):
        self._database = database
        self._unwritten: list[Step] = []
        self._timer: asyncio.TimerHandle | None = None
        self._until_pruned = PRUNED_AFTER

    def put(self, step: Step) -> None:
        """Never waits."""
        self._unwritten.append(step)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(BATCH_SECONDS, self.flush)

    async def requests(self, page: Page) -> list[Step]:
        """Records of requests, the newest first. Raises InvalidRequest if there is no record `page.before`."""
        self.flush()
        rows = await self._database.do(lambda db: _requests(db, page))
        return [_step(row) for row in rows]

    async def of(self, request: str, owner: str | None = None) -> list[Step]:
        """The last records with that request's id, of all or of one owner, in the order in which they began."""
        self.flush()
        rows = await self._database.do(lambda db: db.execute(_OF_ONE_ID, (request, owner)).fetchall())
        return [_step(row) for row in reversed(rows)]

    async def get(self, id: str) -> Step | None:
        """The record with that id."""
        self.flush()
        row = await self._database.do(lambda db: db.execute(f"{_GET} WHERE id = ?", (id,)).fetchone())
        return None if row is None else _step(row)

    async def under_way(self, since: float, owner: str | None = None) -> list[Step]:
        """The last records, begun since then, of requests without one of their own: they go on, or their server died.

        In the order in which they began.
        """
        self.flush()
        rows = await self._database.do(lambda db: db.execute(_UNDER_WAY, (since, owner)).fetchall())
        return [_step(row) for row in reversed(rows)]

    def flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        steps, self._unwritten = self._unwritten, []
        if not steps:
            return
        self._database.do_later(lambda db: _write_batch(db, steps))
        self._until_pruned -= len(steps)
        if self._until_pruned <= 0:
            self.prune()

    def prune(self) -> None:
        """Removes what is too old, or too much."""
        self._until_pruned = PRUNED_AFTER
        self._database.do_later(_prune)


def _requests(db: sqlite3.Connection, page: Page) -> list[Any]:
    conditions, values = ["kind = 'request'"], list[object]()
    for name, condition in _CONDITIONS.items():
        if getattr(page, name) is not None:
            conditions.append(condition)
            values += [getattr(page, name)] * condition.count("?")
    if page.before is not None:
        known = "SELECT started_at FROM steps WHERE id = ?1 AND (?2 IS NULL OR owner = ?2)"
        last = db.execute(known, (page.before, page.owner)).fetchone()
        if last is None:
            raise errors.InvalidRequest(f"there is no record {page.before[:100]!r} (any more): leave `before` out")
        conditions.append("(started_at, id) < (?, ?)")
        values += [last[0], page.before]
    query = f"{_GET} WHERE {' AND '.join(conditions)} ORDER BY started_at DESC, id DESC LIMIT ?"
    return db.execute(query, (*values, page.limit)).fetchall()


def _write_batch(db: sqlite3.Connection, steps: Sequence[Step]) -> None:
    with db:
        db.executemany(_PUT, [_row(step) for step in steps])


def _prune(db: sqlite3.Connection) -> None:
    newer = "SELECT started_at FROM steps ORDER BY started_at DESC LIMIT 1 OFFSET ?"
    sizes = "SELECT id, SUM(LENGTH(captured)) OVER (ORDER BY started_at DESC) AS sum FROM steps WHERE captured != '{}'"
    try:
        with db:
            db.execute("DELETE FROM steps WHERE started_at < ?", (surely_past() - KEPT_SECONDS,))
            db.execute(f"DELETE FROM steps WHERE started_at <= ({newer})", (MAX_STEPS,))
            over = f"SELECT id FROM ({sizes}) WHERE sum > ?"
            db.execute(f"UPDATE steps SET captured = '{{}}' WHERE id IN ({over})", (MAX_CAPTURED_BYTES,))
    except sqlite3.Error as error:
        log.error("steps.not_pruned", error=str(error))


def _row(step: Step) -> tuple[object, ...]:
    return tuple(_column(name, getattr(step, name)) for name in _COLUMNS)


def _column(name: str, value: Any) -> Any:
    if name not in _JSON:
        return value
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:  # halves of surrogates, which no JSON that we read has
        return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace").decode()


def _step(row: Iterable[object]) -> Step:
    columns = dict(zip(_COLUMNS, row, strict=True))
    for name in _JSON:
        columns[name] = msgspec.json.decode(str(columns[name]))
    return msgspec.convert(columns, Step)
