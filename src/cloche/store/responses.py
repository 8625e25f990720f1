"""Stored responses: clients retrieve them, later turns continue them, and streams resume from them.

Writes are done a moment later, after the answer has been sent; reads see them all the same.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from cloche import errors
from cloche.model import GIB, KIB, MIB, Struct
from cloche.store.base import CheckAllowance, allow_anything
from cloche.store.database import Database, Work
from cloche.store.quotas import equal_share
from cloche.telemetry import log

# Finds stored items of responses and conversations by the ids that they got here.
#
# Only such ids count: a client that chooses an id cannot replace the text of another's item.

Json = dict[str, Any]

MAX_FOUND_BYTES = 64 * MIB  # of the items that are found at once
MAX_READ_BYTES = 256 * MIB  # of the responses that they are looked for in
_IDS_AT_ONCE = 500  # ids in one query


class _ItemId(msgspec.Struct):
    id: Any = None


class _ResponseOutput(msgspec.Struct):
    output: list[msgspec.Raw] = []


def find_named_items(db: sqlite3.Connection, owner: str, ids: Sequence[str], *, strict: bool) -> dict[str, Json]:
    """Returns the owner's stored items with these ids.

    Raises InvalidRequest if they are too large; if not `strict`, the excess is left out.
    """
    items: dict[str, Json] = {}
    size = 0
    try:
        for id, text in _find_texts(db, owner, ids):
            size += len(text)
            _check_size(size, MAX_FOUND_BYTES)
            items.setdefault(id, msgspec.json.decode(text))
    except errors.InvalidRequest:
        if strict:
            raise
    return items


def _find_texts(db: sqlite3.Connection, owner: str, ids: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    groups = [ids[at : at + _IDS_AT_ONCE] for at in range(0, len(ids), _IDS_AT_ONCE)]
    known: dict[str, str] = {}
    for group in groups:
        query = f"SELECT id, response FROM response_items WHERE owner = ? AND id IN ({_sql_placeholders(group)})"
        known |= dict(db.execute(query, (owner, *group)).fetchall())
    yield from _find_in_responses(db, _group_by_response(known, ids))
    for group in groups:
        yield from _find_in_conversations(db, owner, [id for id in group if id not in known])


def _group_by_response(known: Mapping[str, str], ids: Sequence[str]) -> dict[str, set[str]]:
    """Groups the ids by response, in the order of the ids."""
    places: dict[str, set[str]] = {}
    for id in ids:
        if id in known:
            places.setdefault(known[id], set()).add(id)
    return places


def _find_in_responses(db: sqlite3.Connection, places: Mapping[str, set[str]]) -> Iterator[tuple[str, bytes]]:
    read = 0
    for response, wanted in places.items():
        body, given = db.execute("SELECT body, input FROM responses WHERE id = ?", (response,)).fetchone()
        read += len(body) + len(given)
        _check_size(read, MAX_READ_BYTES)
        yield from _pick_wanted(msgspec.json.decode(body, type=_ResponseOutput).output, wanted)
        yield from _pick_wanted(msgspec.json.decode(given, type=list[msgspec.Raw]), wanted)


def _find_in_conversations(db: sqlite3.Connection, owner: str, ids: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    query = (
        "SELECT items.id, items.body FROM conversation_items AS items "
        "JOIN conversations ON conversations.id = items.conversation "
        f"WHERE items.id IN ({_sql_placeholders(ids)}) AND items.minted AND conversations.owner = ?"
    )
    for id, text in db.execute(query, (*ids, owner)):
        yield id, text.encode()


def _pick_wanted(items: Sequence[msgspec.Raw], wanted: set[str]) -> Iterator[tuple[str, bytes]]:
    for raw in items:
        id = msgspec.json.decode(raw, type=_ItemId).id
        if isinstance(id, str) and id in wanted:
            yield id, bytes(raw)


def _sql_placeholders(values: Sequence[str]) -> str:
    return ", ".join("?" * len(values))


def _check_size(size: int, most: int) -> None:
    if size > most:
        raise errors.InvalidRequest(
            f"the items that are named have more than {MAX_FOUND_BYTES} bytes, or are among too much else: "
            "name fewer at once, or send their relevant parts"
        )


# Estimates the length of JSON without encoding it.

NUMBER_LENGTH = 8  # of any, and of true, false and null


def is_json_longer(value: Any, most: int) -> bool:
    """Whether a JSON value has more than about `most` characters. Much faster than encoding it."""
    waiting, size = [value], 0
    while waiting and size <= most:
        each = waiting.pop()
        if isinstance(each, str):
            size += len(each)
        elif isinstance(each, dict):
            size += sum(map(len, each))
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
        else:
            size += NUMBER_LENGTH
    return size > most


# Stored events of a response's stream, without the data that its body has already. Pure.
#
# An event that shows the response has only the fields that change while it is made; one that shows an item with
# large outputs has none of them. Both are restored from the body when they are read.


LARGE_OUTPUTS_BYTES = 16 * KIB  # of an item's outputs
_CHANGING = ("status", "completed_at", "error", "incomplete_details", "service_tier", "usage")
_LEFT_OUT = "cloche.left_out"  # in an event that is kept: "response" or "outputs"; no client ever sees it


def slim_event(event: Json) -> Json:
    """Returns the event as it is stored."""
    if isinstance(event.get("response"), dict):
        response = event["response"]
        changing = {name: response[name] for name in _CHANGING if name in response}
        return {**event, "response": {**changing, "output": len(response["output"])}, _LEFT_OUT: "response"}
    item = event.get("item")
    if isinstance(item, dict) and is_json_longer(item.get("outputs"), LARGE_OUTPUTS_BYTES):
        return {**event, "item": {**item, "outputs": None}, _LEFT_OUT: "outputs"}
    return event


def is_slim_event(event: Json) -> bool:
    return _LEFT_OUT in event


def restore_events(events: Iterable[Json], body: Json, *, ended: bool) -> list[Json]:
    """Restores the events. For a response in progress, up to the first that the body cannot complete yet."""
    outputs = {item.get("id"): item.get("outputs") for item in body["output"]}
    told = []
    for event in events:
        if not ended and event.get(_LEFT_OUT) == "outputs" and event["item"]["id"] not in outputs:
            break
        told.append(_restore_event(event, body, outputs))
    return told


def _restore_event(event: Json, body: Json, outputs: Mapping[Any, Any]) -> Json:
    match event.pop(_LEFT_OUT, None):
        case "response":
            changing = event["response"]
            event["response"] = {**body, **changing, "output": body["output"][: changing["output"]]}
        case "outputs":
            event["item"]["outputs"] = outputs.get(event["item"]["id"])
    return event


T = TypeVar("T")

WRITE_DELAY_SECONDS = 0.01
MAX_CHAIN = 1000  # responses that one can go on from
MAX_CHAIN_BYTES = 64 * MIB
MAX_BODY_BYTES = 64 * MIB  # of one: beyond that the outputs of its code are not kept
MAX_EVENT_BYTES = 64 * MIB  # of one: beyond that its deltas are not kept
MAX_RESPONSE_BYTES = 128 * MIB  # a larger one is not kept
RESPONSES_MAX_BYTES = 8 * GIB  # of all that are kept; the oldest of the owners with the most go first
MAX_BYTES_OF_OWNER = 2 * GIB
EVENTS_AT_ONCE = 1000
REMOVED_AT_ONCE = 32 * MIB
PRUNED_AFTER = 512 * MIB  # written: a busy server does not wait for the hour
NOT_KEPT_OUTPUT = {"type": "logs", "logs": "(the outputs of this response are too large: they were not kept)"}
LOST_ERROR = {"code": "server_error", "message": "The server ended while it worked on this response."}


class StoredResponse(Struct):
    """A response. `body` is the Response object with the outputs of its code; `input` has its own input items.

    Each input item has an id. `transcript` is the turn's addition in the upstream's language. `instance` is the
    host process that works on it now: None once it has ended. `include` are the client's includes.
    """

    id: str
    owner: str
    created_at: float
    status: str
    body: Json
    input: list[Json] = []
    transcript: list[Json] = []
    previous: str | None = None
    container: str | None = None
    instance: str | None = None
    include: list[str] = []

    @property
    def output(self) -> list[Json]:
        found: list[Json] = self.body.get("output") or []
        return found


class ResponseChain(Struct):
    """The responses before a turn. `missing` is the id of the first that does not exist (any more), going back."""

    transcripts: list[list[Json]] = []  # the oldest first
    container: str | None = None  # the last that was used
    missing: str | None = None
    running: str | None = None  # the id of one that has not ended
    too_long: bool = False


_COLUMNS = StoredResponse.__struct_fields__
_NAMES = ", ".join((*_COLUMNS, "bytes"))
_MARKS = ", ".join("?" * (len(_COLUMNS) + 1))
_INSERT = f"INSERT OR IGNORE INTO responses ({_NAMES}) VALUES ({_MARKS})"
_UPDATE = f"UPDATE responses SET ({_NAMES}) = ({_MARKS}) WHERE id = ?"
_READ = tuple(name for name in _COLUMNS if name not in ("input", "transcript"))
_JSON = ("body", "input", "transcript", "include")


class StoredResponses:
    def __init__(self, database: Database):
        self._database = database
        self._until_pruned = PRUNED_AFTER
        self._unwritten: list[Work[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self.allow: CheckAllowance = allow_anything

    async def check_allowed(self, owner: str) -> None:
        """Call before a turn that is to be stored: at its end it is too late. Raises QuotaExceeded."""
        await self.allow(owner, 0)

    def put(self, response: StoredResponse, minted: Iterable[str] = ()) -> None:
        """Stores the response. Never waits; later reads see it. `minted` are the ids of its items created here."""
        ids, small = list(minted), _shrink_response(response)
        if small is not None:
            self._write_later(lambda db: self._count_written(db, _insert_response(db, small, ids)))

    def change(self, response: StoredResponse, minted: Iterable[str] = ()) -> None:
        """As `put`, for a response that was put before. A deleted one is ignored: it does not come back."""
        ids, small = list(minted), _shrink_response(response)
        if small is not None:
            self._write_later(lambda db: self._count_written(db, _update_response(db, small, ids)))
        else:  # earlier items would look as if they went on
            self._write_later(lambda db: _delete_responses(db, [(response.id,)]))

    def add_events(self, response: str, events: Sequence[Json]) -> None:
        """Stores numbered events of a stream. Never waits. A deleted response is ignored."""
        self._write_later(lambda db: self._count_written(db, _insert_events(db, response, events)))

    async def get(self, owner: str, id: str) -> StoredResponse | None:
        """Returns the response without its input and its transcript, which are read on their own."""
        return await self._run_after_writes(lambda db: _get_response(db, owner, id))

    async def input(self, owner: str, id: str) -> list[Json] | None:
        """Returns the input items of a response."""
        return await self._run_after_writes(lambda db: _get_input(db, owner, id))

    async def instance(self, owner: str, id: str) -> str | None:
        """The host process that works on it; None if it has ended, or there is none."""
        query = "SELECT instance FROM responses WHERE id = ? AND owner = ?"
        row = await self._run_after_writes(lambda db: db.execute(query, (id, owner)).fetchone())
        return None if row is None else row[0]

    async def events(self, id: str, after: int) -> list[Json]:
        """Returns the events with greater numbers, up to the limit of one read."""
        return await self._run_after_writes(lambda db: _list_events(db, id, after))

    async def load_chain(self, owner: str, id: str) -> ResponseChain:
        """Returns that response and the ones that it continues."""
        return await self._run_after_writes(lambda db: _load_chain(db, owner, id))

    async def items(self, owner: str, ids: Iterable[str], *, strict: bool = True) -> dict[str, Json]:
        """Returns the owner's stored items of responses and conversations by id, with the outputs of code.

        Raises InvalidRequest if they are too large; if not `strict`, the excess is left out.
        """
        wanted = list(dict.fromkeys(ids))
        if not wanted:
            return {}
        return await self._run_after_writes(lambda db: find_named_items(db, owner, wanted, strict=strict))

    async def delete(self, owner: str, id: str) -> bool:
        """Deletes all of the response. Whether there was one."""
        deleted = await self._run_after_writes(lambda db: _delete_response(db, owner, id))
        self._database.scrub_soon()
        return deleted

    async def mark_lost(self, is_live: Callable[[str], bool]) -> int:
        """Marks responses of dead host processes as failed. Returns their number."""
        return await self._run_after_writes(lambda db: _mark_lost(db, is_live))

    async def lose(self, id: str, instance: str | None) -> None:
        """Marks it failed if that host process still works on it: the process is dead, or does not know it."""
        await self._run_after_writes(lambda db: _mark_failed(db, id, instance))

    def prune_old(self, before: float) -> None:
        """Removes responses made before, and the excess. Never waits."""
        self._database.do_later(lambda db: self._remove_in_batches(db, _find_prunable(db, before)))

    async def written(self) -> None:
        """Waits until all pending writes are in the file."""
        await self._run_after_writes(lambda db: None)

    def flush(self) -> None:
        """Queues the pending writes."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        unwritten, self._unwritten = self._unwritten, []
        for work in unwritten:
            self._database.do_later(work)

    def _write_later(self, work: Work[None]) -> None:
        self._unwritten.append(work)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WRITE_DELAY_SECONDS, self.flush)

    async def _run_after_writes(self, work: Work[T]) -> T:
        """Runs `work` after all pending writes."""
        self.flush()
        return await self._database.do(work)

    def _count_written(self, db: sqlite3.Connection, size: int) -> None:
        self._until_pruned -= size
        if self._until_pruned < 0:
            self._until_pruned = PRUNED_AFTER
            self._remove_in_batches(db, _find_prunable(db, 0.0))

    def _remove_in_batches(self, db: sqlite3.Connection, sizes: dict[str, int]) -> None:
        """Removes some at a time, so that other work of the store runs in between."""
        size, ids = 0, list[tuple[str]]()
        while sizes and size < REMOVED_AT_ONCE and len(ids) < 1000:
            id, bytes = sizes.popitem()
            size += bytes
            ids.append((id,))
        _delete_responses(db, ids)
        if sizes and not self._database.closing:
            self._database.do_later(lambda db: self._remove_in_batches(db, sizes))


def _insert_response(db: sqlite3.Connection, response: StoredResponse, minted: Sequence[str]) -> int:
    """Inserts the response. Returns its size in bytes."""
    row, size = _encode_row(response)
    with db:
        db.execute(_INSERT, (*row, size))
        _insert_item_names(db, response, minted)
    return size


def _update_response(db: sqlite3.Connection, response: StoredResponse, minted: Sequence[str]) -> int:
    row, size = _encode_row(response)
    with db:
        if db.execute(_UPDATE, (*row, size, response.id)).rowcount == 0:
            return 0
        db.execute("UPDATE responses SET bytes = bytes + event_bytes WHERE id = ?", (response.id,))
        _insert_item_names(db, response, minted)
    return size


def _insert_item_names(db: sqlite3.Connection, response: StoredResponse, minted: Sequence[str]) -> None:
    rows = [(response.owner, id, response.id) for id in minted]
    db.executemany("INSERT OR REPLACE INTO response_items (owner, id, response) VALUES (?, ?, ?)", rows)


def _insert_events(db: sqlite3.Connection, response: str, events: Sequence[Json]) -> int:
    """Inserts the events. Returns their size in bytes."""
    with db:
        known = db.execute("SELECT event_bytes FROM responses WHERE id = ?", (response,)).fetchone()
        if known is None:
            return 0
        if known[0] > MAX_EVENT_BYTES:
            events = [event for event in events if not str(event["type"]).endswith(".delta")]
        texts = [msgspec.json.encode(slim_event(event)) for event in events]
        size = sum(map(len, texts))
        rows = [(response, event["sequence_number"], text.decode()) for event, text in zip(events, texts, strict=True)]
        db.executemany("INSERT OR REPLACE INTO response_events (response, number, body) VALUES (?, ?, ?)", rows)
        update = "UPDATE responses SET bytes = bytes + ?, event_bytes = event_bytes + ? WHERE id = ?"
        db.execute(update, (size, size, response))
    return size


def _get_response(db: sqlite3.Connection, owner: str, id: str) -> StoredResponse | None:
    query = f"SELECT {', '.join(_READ)} FROM responses WHERE id = ? AND owner = ?"
    row = db.execute(query, (id, owner)).fetchone()
    return None if row is None else _decode_response(row)


def _get_input(db: sqlite3.Connection, owner: str, id: str) -> list[Json] | None:
    row = db.execute("SELECT input FROM responses WHERE id = ? AND owner = ?", (id, owner)).fetchone()
    return None if row is None else msgspec.json.decode(row[0])


def _list_events(db: sqlite3.Connection, id: str, after: int) -> list[Json]:
    query = "SELECT body FROM response_events WHERE response = ? AND number > ? ORDER BY number LIMIT ?"
    events = [msgspec.json.decode(text) for (text,) in db.execute(query, (id, after, EVENTS_AT_ONCE))]
    if not any(map(is_slim_event, events)):
        return events
    row = db.execute("SELECT body, instance FROM responses WHERE id = ?", (id,)).fetchone()
    return [] if row is None else restore_events(events, msgspec.json.decode(row[0]), ended=row[1] is None)


def _load_chain(db: sqlite3.Connection, owner: str, id: str) -> ResponseChain:
    query = "SELECT previous, container, instance, transcript FROM responses WHERE id = ? AND owner = ?"
    transcripts: list[list[Json]] = []
    container: str | None = None
    size, at = 0, id
    while True:
        row = db.execute(query, (at, owner)).fetchone()
        if row is None:
            return ResponseChain(missing=at)
        previous, used, instance, transcript = row
        if instance is not None:
            return ResponseChain(running=at)
        size += len(transcript)
        if size > MAX_CHAIN_BYTES or len(transcripts) >= MAX_CHAIN:
            return ResponseChain(too_long=True)
        transcripts.append(msgspec.json.decode(transcript))
        container = container or used
        if previous is None:
            return ResponseChain(transcripts=transcripts[::-1], container=container)
        at = previous


def _delete_response(db: sqlite3.Connection, owner: str, id: str) -> bool:
    with db:
        if db.execute("DELETE FROM responses WHERE id = ? AND owner = ?", (id, owner)).rowcount == 0:
            return False
        db.execute("DELETE FROM response_events WHERE response = ?", (id,))
        db.execute("DELETE FROM response_items WHERE response = ?", (id,))
        return True


def _mark_lost(db: sqlite3.Connection, is_live: Callable[[str], bool]) -> int:
    rows = db.execute("SELECT id, instance FROM responses WHERE instance IS NOT NULL").fetchall()
    dead = [(id, instance) for id, instance in rows if not is_live(instance)]
    for id, instance in dead:
        _mark_failed(db, id, instance)
    return len(dead)


def _mark_failed(db: sqlite3.Connection, id: str, instance: str | None) -> None:
    """Marks it failed, in one transaction: it may have ended, or been deleted, since the caller looked."""
    with db:
        db.execute("BEGIN IMMEDIATE")
        row = db.execute("SELECT body FROM responses WHERE id = ? AND instance = ?", (id, instance)).fetchone()
        if row is None:
            return
        failed = {"status": "failed", "error": LOST_ERROR, "completed_at": int(time.time())}
        body = {**msgspec.json.decode(row[0]), **failed}
        update = "UPDATE responses SET status = 'failed', body = ?, instance = NULL WHERE id = ?"
        db.execute(update, (_encode_json(body), id))
        last = "SELECT COALESCE(MAX(number), -1) FROM response_events WHERE response = ?"
        number = db.execute(last, (id,)).fetchone()[0] + 1
        event = {"type": "response.failed", "response": body, "sequence_number": number}
        insert = "INSERT INTO response_events (response, number, body) VALUES (?, ?, ?)"
        db.execute(insert, (id, number, _encode_json(slim_event(event))))


def _find_prunable(db: sqlite3.Connection, before: float) -> dict[str, int]:
    """Returns the size of each response to remove, by id."""
    old = "SELECT id, bytes FROM responses WHERE created_at <= ? AND instance IS NULL"
    found = dict(db.execute(old, (before,)).fetchall())
    sizes = dict(db.execute("SELECT owner, SUM(bytes) FROM responses GROUP BY owner").fetchall())
    most = owner_share(list(sizes.values()))
    for owner, size in sizes.items():
        if size > most:
            found |= _find_excess(db, owner, most)
    return found


def owner_share(sizes: Sequence[int]) -> int:
    """Returns the limit of bytes of each owner, so that all fit the common limit: small owners lose nothing."""
    return min(equal_share(sizes, RESPONSES_MAX_BYTES), MAX_BYTES_OF_OWNER)


def _find_excess(db: sqlite3.Connection, owner: str, most: int) -> dict[str, int]:
    newest = "SUM(bytes) OVER (ORDER BY created_at DESC, rowid DESC)"
    sizes = f"SELECT id, bytes, instance, {newest} AS size FROM responses WHERE owner = ?"
    query = f"SELECT id, bytes FROM ({sizes}) WHERE size > ? AND instance IS NULL"
    return dict(db.execute(query, (owner, most)).fetchall())


def _delete_responses(db: sqlite3.Connection, ids: Sequence[tuple[str]]) -> None:
    with db:
        db.executemany("DELETE FROM response_events WHERE response = ?", ids)
        db.executemany("DELETE FROM response_items WHERE response = ?", ids)
        db.executemany("DELETE FROM responses WHERE id = ?", ids)


def _encode_row(response: StoredResponse) -> tuple[tuple[object, ...], int]:
    """Returns the values of its columns, and their size in bytes."""
    texts = {name: msgspec.json.encode(getattr(response, name)) for name in _JSON}
    row = tuple(texts[name].decode() if name in texts else getattr(response, name) for name in _COLUMNS)
    return row, sum(map(len, texts.values()))


def _shrink_response(response: StoredResponse) -> StoredResponse | None:
    """Returns the response as it can be stored: without outputs of code if large; None if very large."""
    if is_json_longer(response.body, MAX_BODY_BYTES):
        response = msgspec.structs.replace(response, body=_without_outputs(response.body))
    if is_json_longer([response.body, response.input, response.transcript], MAX_RESPONSE_BYTES):
        log.warning("response.not_kept", response=response.id, reason="too large")
        return None
    return response


def _without_outputs(body: Json) -> Json:
    """Replaces the outputs of code by a note."""
    items = [{**item, "outputs": [NOT_KEPT_OUTPUT]} if item.get("outputs") else item for item in body["output"]]
    return {**body, "output": items}


def _decode_response(row: Sequence[object]) -> StoredResponse:
    fields = dict(zip(_READ, row, strict=True))
    return StoredResponse(**{name: _decode_value(name, each) for name, each in fields.items()})  # type: ignore[arg-type]


def _decode_value(name: str, value: object) -> object:
    return msgspec.json.decode(str(value)) if name in _JSON else value


def _encode_json(value: object) -> str:
    return msgspec.json.encode(value).decode()
