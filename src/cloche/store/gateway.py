"""What the gateway keeps: files, responses, conversations, and records of what requests did."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import sqlite3
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import msgspec

from cloche import errors
from cloche.model import GIB, MIB, Struct
from cloche.store import files, librechat
from cloche.store.base import Allow
from cloche.store.blobs import Blobs
from cloche.store.conversations import Conversations
from cloche.store.database import Database
from cloche.store.librechat import StoredCodeSessions
from cloche.store.responses import Responses, is_longer
from cloche.store.retention_clock import surely_past
from cloche.telemetry import log

# Records of what requests to the gateway did: a request, its model calls, containers and executions.
#
# Writes are batched, a moment later: no answer waits for a disk.

Kind = Literal["request", "model_call", "container", "execution"]

BATCH_SECONDS = 0.05
STEPS_KEPT_SECONDS = 30 * 86400.0
MAX_STEPS = 200_000
MAX_CAPTURED_BYTES = 256 * MIB  # of all records; what was captured first goes first
STEPS_PRUNED_AFTER = 20_000  # writes: a busy server does not wait for the hour
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
_PUT_STEP = f"INSERT OR REPLACE INTO steps ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"
_GET_STEP = f"SELECT {', '.join(_COLUMNS)} FROM steps"
_JSON = ("fields", "captured")
_OF_ONE_ID = f"""{_GET_STEP} WHERE request = ?1 AND (?2 IS NULL OR owner = ?2)
    ORDER BY started_at DESC LIMIT {MOST_OF_ONE_ID}"""
_UNDER_WAY = f"""{_GET_STEP} AS step WHERE started_at >= ?1 AND parent IS NOT NULL AND (?2 IS NULL OR owner = ?2)
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
        self._until_pruned = STEPS_PRUNED_AFTER

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
        row = await self._database.do(lambda db: db.execute(f"{_GET_STEP} WHERE id = ?", (id,)).fetchone())
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
        self._until_pruned = STEPS_PRUNED_AFTER
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
    query = f"{_GET_STEP} WHERE {' AND '.join(conditions)} ORDER BY started_at DESC, id DESC LIMIT ?"
    return db.execute(query, (*values, page.limit)).fetchall()


def _write_batch(db: sqlite3.Connection, steps: Sequence[Step]) -> None:
    with db:
        db.executemany(_PUT_STEP, [_row(step) for step in steps])


def _prune(db: sqlite3.Connection) -> None:
    newer = "SELECT started_at FROM steps ORDER BY started_at DESC LIMIT 1 OFFSET ?"
    sizes = "SELECT id, SUM(LENGTH(captured)) OVER (ORDER BY started_at DESC) AS sum FROM steps WHERE captured != '{}'"
    try:
        with db:
            db.execute("DELETE FROM steps WHERE started_at < ?", (surely_past() - STEPS_KEPT_SECONDS,))
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


# What chats need to have remembered, though they are stateless: turns that wait for the client.
#
# A turn that ends with calls for the client may have thought and run code before. The client gives only its own calls
# back; their ids lead here, to all of the turn.

CHAT_CALLS_KEPT_SECONDS = 86400.0
MAX_BYTES = 8 * MIB  # of one turn; a larger one is not remembered
MAX_TURNS = 1000  # of one owner
MAX_OWNER_BYTES = 256 * MIB
MAX_BYTES_IN_ALL = 4 * GIB  # the oldest go first
CHAT_CALLS_PRUNED_AFTER_BYTES = 256 * MIB  # written: a busy server does not wait for the hour
REMOVED_AT_ONCE = 32 * MIB
MAX_FOUND = 64  # turns that one request goes back to: the last
MAX_FOUND_BYTES = 64 * MIB

_CALL_ID = re.compile(r"(call_[0-9a-f]{21})[0-9]{3}")
_PUT_CHAT_CALL = "INSERT OR REPLACE INTO chat_calls (owner, call, created_at, transcript) VALUES (?, ?, ?, ?)"
_GET_CHAT_CALL = "SELECT transcript FROM chat_calls WHERE owner = ? AND call = ? AND created_at > ?"
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
        self._until_pruned = CHAT_CALLS_PRUNED_AFTER_BYTES

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
        self._until_pruned = CHAT_CALLS_PRUNED_AFTER_BYTES
        before = surely_past() - CHAT_CALLS_KEPT_SECONDS
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
        db.execute(_PUT_CHAT_CALL, (owner, key, time.time(), content))
        for (old,) in db.execute(_TOO_MUCH, (owner, MAX_TURNS, MAX_OWNER_BYTES)).fetchall():
            db.execute(_FORGET, (owner, old))


def _get(db: sqlite3.Connection, owner: str, keys: Iterable[str]) -> dict[str, bytes]:
    """The transcripts with these keys, until they are too much."""
    found: dict[str, bytes] = {}
    left = MAX_FOUND_BYTES
    for key in keys:
        row = db.execute(_GET_CHAT_CALL, (owner, key, time.time() - CHAT_CALLS_KEPT_SECONDS)).fetchone()
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


PRUNE_SECONDS = 3600.0
CODE_HOURS = 24.0


class Shelf:
    """Use as `async with Shelf(data_dir, days) as shelf`. What is older than so many days is removed, every hour.

    Files of LibreChat's code API go after so many hours without use.
    """

    def __init__(self, data_dir: Path, days: float, code_hours: float = CODE_HOURS):
        self._kept_seconds = days * 86400.0
        self.database = self._database = Database(data_dir / "store.sqlite3")
        self._pruning: asyncio.Task[None] | None = None
        self.blobs = Blobs(data_dir / "blobs")
        self.files = files.StoredFiles(self._database, self.blobs, self._kept_seconds)
        self.container_files = files.StoredContainerFiles(self._database, self.blobs)
        self.code_files = librechat.StoredCodeFiles(self._database, self.blobs, code_hours * 3600.0)
        self.code_sessions = StoredCodeSessions(self._database, code_hours * 3600.0)
        self.steps = Steps(self._database)
        self.responses = Responses(self._database)
        self.conversations = Conversations(self._database)
        self.chat_calls = ChatCalls(self._database)

    def guard(self, allow: Allow) -> None:
        """From now on it is asked before anything of an owner's is kept."""
        for each in (self.files, self.container_files, self.code_files, self.responses, self.conversations):
            each.allow = allow

    async def __aenter__(self) -> Shelf:
        await self._database.open()
        self._pruning = asyncio.create_task(self._prune())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pruning is not None:
            self._pruning.cancel()
        self.steps.flush()
        self.responses.flush()
        await self._database.aclose()

    async def _prune(self) -> None:
        while True:
            self.steps.prune()
            self.responses.prune(surely_past() - self._kept_seconds)
            self.conversations.prune(surely_past() - self._kept_seconds)
            self.chat_calls.prune()
            await self.prune_files()
            self._database.scrub()
            await asyncio.sleep(PRUNE_SECONDS)

    async def prune_files(self) -> None:
        """Removes files whose time is over, and contents that no file has."""
        try:
            await self.files.prune()
            await self.container_files.prune(surely_past() - self._kept_seconds)
            await self.code_files.prune()
            prefixes = (files.FILE_PREFIX, files.CONTAINER_FILE_PREFIX, librechat.PREFIX)
            await self.blobs.remove_orphans(prefixes, self._known_contents)
        except (OSError, sqlite3.Error) as error:
            log.error("files.not_pruned", error=type(error).__name__)

    async def _known_contents(self, ids: list[str]) -> set[str]:
        return await self._database.do(lambda db: _known(db, ids))


def _known(db: sqlite3.Connection, ids: list[str]) -> set[str]:
    query = """SELECT 1 FROM files WHERE id = ? UNION ALL SELECT 1 FROM container_files WHERE id = ? AND kept
        UNION ALL SELECT 1 FROM code_files WHERE id = ? LIMIT 1"""
    asked = ((id, (id, id, id.removeprefix(librechat.PREFIX))) for id in ids)
    return {id for id, values in asked if db.execute(query, values).fetchone() is not None}
