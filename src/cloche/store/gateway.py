"""The gateway's store: files, responses, conversations, and records of requests."""

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
from cloche.store.base import CheckAllowance
from cloche.store.blobs import Blobs
from cloche.store.conversations import StoredConversations
from cloche.store.database import Database
from cloche.store.librechat import StoredCodeSessions
from cloche.store.responses import StoredResponses, is_json_longer
from cloche.store.retention_clock import retention_now
from cloche.telemetry import log

# Step records of requests to the gateway: the request, its model calls, containers and executions.
#
# Writes are batched, a moment later: no answer waits for a disk.

StepKind = Literal["request", "model_call", "container", "execution"]

STEP_BATCH_SECONDS = 0.05
STEP_KEPT_SECONDS = 30 * 86400.0
MAX_STEPS = 200_000
MAX_CAPTURED_BYTES = 256 * MIB  # of all records; the oldest go first
STEPS_UNTIL_PRUNED = 20_000  # writes: a busy server does not wait for the hour
MAX_STEPS_OF_REQUEST = 1000  # records that are shown of one request id


class StepRecord(Struct):
    """One record. `parent` is the id of the record that it belongs to; the request's own has none."""

    id: str
    request: str  # the request's id; a client may have chosen it, so that several requests share one
    owner: str
    kind: StepKind
    started_at: float
    seconds: float
    outcome: str  # "ok", an execution's outcome, "left", or an error's code
    parent: str | None = None
    fields: dict[str, Any] = {}  # tokens, container, model, leg, status, ..
    captured: dict[str, Any] = {}  # code, output, prompt: empty unless capture is on


class StepQuery(Struct):
    """A query for requests: the newest, or those `before` a record."""

    limit: int = 50
    before: str | None = None
    owner: str | None = None
    outcome: str | None = None  # with `!` before it: any other
    model: str | None = None
    id: str | None = None  # that it has: its own, its response's, or that of a container it used
    since: float | None = None  # from then on it began; seconds since 1970
    until: float | None = None  # before then


_STEP_COLUMNS = StepRecord.__struct_fields__
_PUT_STEP = f"INSERT OR REPLACE INTO steps ({', '.join(_STEP_COLUMNS)}) VALUES ({', '.join('?' * len(_STEP_COLUMNS))})"
_GET_STEP = f"SELECT {', '.join(_STEP_COLUMNS)} FROM steps"
_JSON = ("fields", "captured")
_OF_ONE_ID = f"""{_GET_STEP} WHERE request = ?1 AND (?2 IS NULL OR owner = ?2)
    ORDER BY started_at DESC LIMIT {MAX_STEPS_OF_REQUEST}"""
_UNDER_WAY = f"""{_GET_STEP} AS step WHERE started_at >= ?1 AND parent IS NOT NULL AND (?2 IS NULL OR owner = ?2)
    AND NOT EXISTS (SELECT 1 FROM steps WHERE id = step.parent) ORDER BY started_at DESC LIMIT {MAX_STEPS_OF_REQUEST}"""
_CONDITIONS = {  # on records of requests, by the field of Page
    "owner": "owner = ?",
    "outcome": "(outcome = ? OR outcome != SUBSTR(?, 2) AND ? LIKE '!%')",
    "since": "started_at >= ?",
    "until": "started_at < ?",
    "model": "json_extract(fields, '$.model') = ?",
    "id": """? IN (request, id, json_extract(fields, '$.response'), json_extract(fields, '$.completion'),
        (SELECT value FROM json_each(fields, '$.containers') WHERE value = ?))""",
}


class StoredSteps:
    def __init__(self, database: Database):
        self._database = database
        self._unwritten: list[StepRecord] = []
        self._timer: asyncio.TimerHandle | None = None
        self._until_pruned = STEPS_UNTIL_PRUNED

    def put(self, step: StepRecord) -> None:
        """Never waits."""
        self._unwritten.append(step)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(STEP_BATCH_SECONDS, self.flush)

    async def requests(self, page: StepQuery) -> list[StepRecord]:
        """Lists records of requests, the newest first. Raises InvalidRequest if there is no record `page.before`."""
        self.flush()
        rows = await self._database.do(lambda db: _select_requests(db, page))
        return [_decode_step(row) for row in rows]

    async def of(self, request: str, owner: str | None = None) -> list[StepRecord]:
        """Returns the last records with that request's id, of all or of one owner, ordered by start."""
        self.flush()
        rows = await self._database.do(lambda db: db.execute(_OF_ONE_ID, (request, owner)).fetchall())
        return [_decode_step(row) for row in reversed(rows)]

    async def get(self, id: str) -> StepRecord | None:
        """Returns the record with that id."""
        self.flush()
        row = await self._database.do(lambda db: db.execute(f"{_GET_STEP} WHERE id = ?", (id,)).fetchone())
        return None if row is None else _decode_step(row)

    async def list_unfinished(self, since: float, owner: str | None = None) -> list[StepRecord]:
        """Returns the last records since then of requests without a record: in progress, or their server died.

        Ordered by start.
        """
        self.flush()
        rows = await self._database.do(lambda db: db.execute(_UNDER_WAY, (since, owner)).fetchall())
        return [_decode_step(row) for row in reversed(rows)]

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
            self.prune_old()

    def prune_old(self) -> None:
        """Removes old records, and the excess."""
        self._until_pruned = STEPS_UNTIL_PRUNED
        self._database.do_later(_prune_steps)


def _select_requests(db: sqlite3.Connection, page: StepQuery) -> list[Any]:
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


def _write_batch(db: sqlite3.Connection, steps: Sequence[StepRecord]) -> None:
    with db:
        db.executemany(_PUT_STEP, [_encode_row(step) for step in steps])


def _prune_steps(db: sqlite3.Connection) -> None:
    newer = "SELECT started_at FROM steps ORDER BY started_at DESC LIMIT 1 OFFSET ?"
    sizes = "SELECT id, SUM(LENGTH(captured)) OVER (ORDER BY started_at DESC) AS sum FROM steps WHERE captured != '{}'"
    try:
        with db:
            db.execute("DELETE FROM steps WHERE started_at < ?", (retention_now() - STEP_KEPT_SECONDS,))
            db.execute(f"DELETE FROM steps WHERE started_at <= ({newer})", (MAX_STEPS,))
            over = f"SELECT id FROM ({sizes}) WHERE sum > ?"
            db.execute(f"UPDATE steps SET captured = '{{}}' WHERE id IN ({over})", (MAX_CAPTURED_BYTES,))
    except sqlite3.Error as error:
        log.error("steps.not_pruned", error=str(error))


def _encode_row(step: StepRecord) -> tuple[object, ...]:
    return tuple(_encode_column(name, getattr(step, name)) for name in _STEP_COLUMNS)


def _encode_column(name: str, value: Any) -> Any:
    if name not in _JSON:
        return value
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:  # halves of surrogates, which no JSON that we read has
        return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace").decode()


def _decode_step(row: Iterable[object]) -> StepRecord:
    columns = dict(zip(_STEP_COLUMNS, row, strict=True))
    for name in _JSON:
        columns[name] = msgspec.json.decode(str(columns[name]))
    return msgspec.convert(columns, StepRecord)


# Turns of chats that wait for the client's tool outputs, although chats are stateless.
#
# A turn that ends with calls for the client may have reasoned and run code before. The client sends only its
# own calls back; their ids lead here, to the whole turn.

TURN_KEPT_SECONDS = 86400.0
MAX_TURN_BYTES = 8 * MIB  # of one turn; a larger one is not remembered
MAX_TURNS = 1000  # of one owner
MAX_OWNER_TURN_BYTES = 256 * MIB
MAX_TURN_BYTES_IN_ALL = 4 * GIB  # the oldest go first
TURN_BYTES_UNTIL_PRUNED = 256 * MIB  # written: a busy server does not wait for the hour
TURN_BYTES_REMOVED_AT_ONCE = 32 * MIB
MAX_FOUND_TURNS = 64  # turns that one request goes back to: the last
MAX_FOUND_TURN_BYTES = 64 * MIB

_CALL_ID = re.compile(r"(call_[0-9a-f]{21})[0-9]{3}")
_PUT_TURN = "INSERT OR REPLACE INTO chat_calls (owner, call, created_at, transcript) VALUES (?, ?, ?, ?)"
_GET_TURN = "SELECT transcript FROM chat_calls WHERE owner = ? AND call = ? AND created_at > ?"
# The length of a blob is known without reading it.
_NEWEST_TURNS = "(ORDER BY created_at DESC, call ROWS UNBOUNDED PRECEDING)"
_TOO_MANY_TURNS = (
    "SELECT call FROM (SELECT call, ROW_NUMBER() OVER newest AS number, SUM(LENGTH(transcript)) OVER newest AS size "
    f"FROM chat_calls WHERE owner = ? WINDOW newest AS {_NEWEST_TURNS}) WHERE number > ? OR size > ?"
)
_TOO_MANY_TURNS_IN_ALL = (
    "SELECT owner, call, bytes FROM (SELECT owner, call, LENGTH(transcript) AS bytes, "
    f"SUM(LENGTH(transcript)) OVER newest AS size FROM chat_calls WINDOW newest AS {_NEWEST_TURNS}) WHERE size > ?"
)
_OLD_TURNS = "SELECT owner, call, LENGTH(transcript) FROM chat_calls WHERE created_at < ?"
_DELETE_TURN = "DELETE FROM chat_calls WHERE owner = ? AND call = ?"


class StoredChatTurn(Struct):
    """A turn's items, as the upstream got them. `calls` maps the ids that the client got to the upstream's."""

    items: list[dict[str, Any]]
    calls: dict[str, str]
    container: str | None = None


def new_turn_key() -> str:
    return "call_" + secrets.token_hex(11)[1:]


def chat_call_id(turn_key: str, number: int) -> str:
    """Returns the id of a turn's n-th call for the client. Upstreams' own are not always unique."""
    return f"{turn_key}{number % 1000:03d}"


class StoredChatTurns:
    def __init__(self, database: Database):
        self._database = database
        self._until_pruned = TURN_BYTES_UNTIL_PRUNED

    def put(self, owner: str, turn_key: str, turn: StoredChatTurn) -> None:
        """Keeps the turn for a day, unless it is very large. Never waits; later calls of `find` see it."""
        if is_json_longer(turn.items, MAX_TURN_BYTES):
            return
        content = msgspec.json.encode(turn)
        if len(content) > MAX_TURN_BYTES:
            return
        self._database.do_later(lambda db: _insert_turn(db, owner, turn_key, content))
        self._until_pruned -= len(content)
        if self._until_pruned < 0:
            self.prune_old()

    async def find(self, owner: str, calls: Iterable[str]) -> dict[str, StoredChatTurn]:
        """Returns the turns that made these calls, by call id, if known: only the last ones, up to a size."""
        keys = {call: found[1] for call in calls if (found := _CALL_ID.fullmatch(call))}
        if not keys:
            return {}
        last = list(dict.fromkeys(reversed(keys.values())))[:MAX_FOUND_TURNS]
        rows = await self._database.do(lambda db: _read_turns(db, owner, last))
        turns = {key: msgspec.json.decode(row, type=StoredChatTurn) for key, row in rows.items()}
        return {call: turns[key] for call, key in keys.items() if key in turns}

    def prune_old(self) -> None:
        """Removes turns older than a day, and the oldest beyond the limit."""
        self._until_pruned = TURN_BYTES_UNTIL_PRUNED
        before = retention_now() - TURN_KEPT_SECONDS
        self._database.do_later(lambda db: self._remove_in_batches(db, _prunable_turns(db, before)))

    def _remove_in_batches(self, db: sqlite3.Connection, sizes: dict[tuple[str, str], int]) -> None:
        """Removes some at a time, so that other work of the store runs in between."""
        size, keys = 0, list[tuple[str, str]]()
        while sizes and size < TURN_BYTES_REMOVED_AT_ONCE and len(keys) < 1000:
            key, bytes = sizes.popitem()
            size += bytes
            keys.append(key)
        with db:
            db.executemany(_DELETE_TURN, keys)
        if sizes and not self._database.closing:
            self._database.do_later(lambda db: self._remove_in_batches(db, sizes))


def _insert_turn(db: sqlite3.Connection, owner: str, key: str, content: bytes) -> None:
    with db:
        db.execute(_PUT_TURN, (owner, key, time.time(), content))
        for (old,) in db.execute(_TOO_MANY_TURNS, (owner, MAX_TURNS, MAX_OWNER_TURN_BYTES)).fetchall():
            db.execute(_DELETE_TURN, (owner, old))


def _read_turns(db: sqlite3.Connection, owner: str, keys: Iterable[str]) -> dict[str, bytes]:
    """Returns the transcripts with these keys, up to the size limit."""
    found: dict[str, bytes] = {}
    left = MAX_FOUND_TURN_BYTES
    for key in keys:
        row = db.execute(_GET_TURN, (owner, key, time.time() - TURN_KEPT_SECONDS)).fetchone()
        left -= 0 if row is None else len(row[0])
        if left < 0:
            break
        if row is not None:
            found[key] = row[0]
    return found


def _prunable_turns(db: sqlite3.Connection, before: float) -> dict[tuple[str, str], int]:
    """Returns the size of each turn to remove, by owner and key."""
    rows = [*db.execute(_OLD_TURNS, (before,)), *db.execute(_TOO_MANY_TURNS_IN_ALL, (MAX_TURN_BYTES_IN_ALL,))]
    return {(owner, call): bytes for owner, call, bytes in rows}


PRUNE_SECONDS = 3600.0
CODE_FILE_HOURS = 24.0


class GatewayStore:
    """Use as `async with GatewayStore(data_dir, days) as store`. Older data is removed, every hour.

    Files of LibreChat's code API are removed after so many hours without use.
    """

    def __init__(self, data_dir: Path, days: float, code_hours: float = CODE_FILE_HOURS):
        self._kept_seconds = days * 86400.0
        self.database = self._database = Database(data_dir / "store.sqlite3")
        self._pruning: asyncio.Task[None] | None = None
        self.blobs = Blobs(data_dir / "blobs")
        self.files = files.StoredFiles(self._database, self.blobs, self._kept_seconds)
        self.container_files = files.StoredContainerFiles(self._database, self.blobs)
        self.code_files = librechat.StoredCodeFiles(self._database, self.blobs, code_hours * 3600.0)
        self.code_sessions = StoredCodeSessions(self._database, code_hours * 3600.0)
        self.steps = StoredSteps(self._database)
        self.responses = StoredResponses(self._database)
        self.conversations = StoredConversations(self._database)
        self.chat_calls = StoredChatTurns(self._database)

    def guard(self, allow: CheckAllowance) -> None:
        """Sets the allowance check that is made before anything of an owner is stored."""
        for each in (self.files, self.container_files, self.code_files, self.responses, self.conversations):
            each.allow = allow

    async def __aenter__(self) -> GatewayStore:
        await self._database.open()
        self._pruning = asyncio.create_task(self._prune_hourly())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pruning is not None:
            self._pruning.cancel()
        self.steps.flush()
        self.responses.flush()
        await self._database.aclose()

    async def _prune_hourly(self) -> None:
        while True:
            self.steps.prune_old()
            self.responses.prune_old(retention_now() - self._kept_seconds)
            self.conversations.prune_old(retention_now() - self._kept_seconds)
            self.chat_calls.prune_old()
            await self.prune_files()
            self._database.scrub_log()
            await asyncio.sleep(PRUNE_SECONDS)

    async def prune_files(self) -> None:
        """Removes expired files, and contents without a file."""
        try:
            await self.files.prune_old()
            await self.container_files.prune_old(retention_now() - self._kept_seconds)
            await self.code_files.prune_old()
            prefixes = (files.FILE_PREFIX, files.CONTAINER_FILE_PREFIX, librechat.CODE_FILE_PREFIX)
            await self.blobs.remove_orphans(prefixes, self._known_contents)
        except (OSError, sqlite3.Error) as error:
            log.error("files.not_pruned", error=type(error).__name__)

    async def _known_contents(self, ids: list[str]) -> set[str]:
        return await self._database.do(lambda db: _known_blob_ids(db, ids))


def _known_blob_ids(db: sqlite3.Connection, ids: list[str]) -> set[str]:
    query = """SELECT 1 FROM files WHERE id = ? UNION ALL SELECT 1 FROM container_files WHERE id = ? AND kept
        UNION ALL SELECT 1 FROM code_files WHERE id = ? LIMIT 1"""
    asked = ((id, (id, id, id.removeprefix(librechat.CODE_FILE_PREFIX))) for id in ids)
    return {id for id, values in asked if db.execute(query, values).fetchone() is not None}
