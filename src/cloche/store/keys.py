"""API keys in SQLite: owner, role and expiry of each, of a key itself only its hash; and the server's secret."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

import msgspec

from cloche import errors
from cloche.model import Principal, Struct, new_id
from cloche.store.database import Database
from cloche.telemetry import log

KeyRole = Literal["user", "admin"]

PRESET_ID = "CLOCHE_API_KEY"  # the id of a key that the environment sets; it is in no store
USED_SECONDS = 60.0  # how exactly the last use of a key is kept
MAX_NAME = 200
MAX_YEARS = 100  # until a key expires: a larger number was meant in milliseconds
UNREADABLE = (sqlite3.Error, msgspec.ValidationError)
_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}")


class KeyRecord(Struct):
    """The record of a key, also after it was revoked; never the key."""

    id: str
    owner: str
    role: KeyRole
    name: str
    created_at: float
    revoked_at: float | None = None
    last_used_at: float | None = None
    expires_at: float | None = None  # from then on it is not valid

    @property
    def expired(self) -> bool:
        return self.expires_at is not None and time.time() >= self.expires_at


_COLUMNS = KeyRecord.__struct_fields__
_GET = f"SELECT hash, {', '.join(_COLUMNS)} FROM keys"
_PUT = f"INSERT INTO keys (hash, {', '.join(_COLUMNS)}) VALUES (?, {', '.join('?' * len(_COLUMNS))})"
_REVOKE = "UPDATE keys SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL"

_LINE = """WITH RECURSIVE line(id) AS (
    VALUES (?1) UNION SELECT keys.id FROM keys JOIN line ON keys.replaced_by = line.id) SELECT id FROM line"""
_PAUSED = """SELECT COUNT(*) FROM sandboxes INDEXED BY sandboxes_paused
    WHERE state = 'paused' AND key_id IN (SELECT value FROM json_each(?1))"""


def new_key() -> str:
    """Returns `e2b_` and 40 hex digits, the format that old clients of E2B accept."""
    return "e2b_" + secrets.token_hex(20)


def hash_key(key: str) -> str:
    """Hashes a key. Keys are long and random, so one round is enough, and a lookup takes a microsecond."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


KeyEventListener = Callable[[str, str, str], None]  # the event, the key's owner, and its id


def _ignore_event(what: str, owner: str, id: str) -> None:
    """Ignores events of keys."""


class StoredKeys:
    """The keys of a data directory; the valid ones are cached in memory.

    `preset` is an additional valid key: that of `CLOCHE_API_KEY`, an admin's.
    """

    def __init__(self, database: Database, preset: str | None = None):
        self._database = database
        self._valid: dict[str, KeyRecord] = {}
        self._used: dict[str, float] = {}  # id -> when, as far as the store does not know it yet
        self._preset = hash_key(preset) if preset else None
        self.on_event: KeyEventListener = _ignore_event  # called with each event of a key, for the audit log
        self.refreshed: Callable[[set[str]], None] = lambda ids: None  # with the ids of those that are valid now

    async def open(self) -> None:
        """Raises Unavailable if the store cannot be read."""
        await self._database.open()
        await self.refresh()

    async def aclose(self) -> None:
        await self.try_refresh()
        await self._database.aclose()

    async def __aenter__(self) -> StoredKeys:
        await self.open()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.aclose()

    def find(self, key: str) -> Principal | None:
        """Returns the principal of the key; None if it is not valid. The timing reveals at most a hash."""
        return self.find_hashed(hash_key(key))

    def find_hashed(self, hashed: str) -> Principal | None:
        """As `find`, by the key's hash: for a session, which outlives the request that brought the key."""
        if hashed == self._preset:
            return Principal(owner="local", role="admin", key_id=PRESET_ID)
        record = self._valid.get(hashed)
        if record is None or record.expired:
            if record is not None:
                self.on_event("key.expired_use", record.owner, record.id)
            return None
        self._note_use(record)
        return Principal(owner=record.owner, role=record.role, key_id=record.id)

    @property
    def ids(self) -> set[str]:
        """The ids of the keys that are valid now."""
        return {PRESET_ID, *(each.id for each in self._valid.values() if not each.expired)}

    @property
    def has_valid_key(self) -> bool:
        return self._preset is not None or any(not each.expired for each in self._valid.values())

    async def list(self) -> list[KeyRecord]:
        """Lists all keys, also expired and revoked ones, the oldest first."""
        rows = await self._database.do(lambda db: db.execute(f"{_GET} ORDER BY created_at").fetchall())
        return [_decode_record(row) for row in rows]

    async def get(self, id: str, *, revoked: bool = False) -> KeyRecord:
        """Returns a key, or the environment's; a revoked one only with `revoked`. Raises NotFound."""
        if id == PRESET_ID and self._preset is not None:
            return KeyRecord(id=id, owner="local", role="admin", name="", created_at=0.0)
        query = f"{_GET} WHERE id = ?1 AND (?2 OR revoked_at IS NULL)"
        row = await self._database.do(lambda db: db.execute(query, (id, revoked)).fetchone())
        if row is None:
            raise _key_not_found(id)
        return _decode_record(row)

    async def add(
        self, owner: str, role: str = "user", name: str = "", expires_at: float | None = None
    ) -> tuple[KeyRecord, str]:
        """Returns a new key, which is shown only this once. Raises InvalidRequest."""
        _check_new_key(owner, role, name)
        _check_expiry(expires_at)
        now, key = time.time(), new_key()
        # Which role it is, `_check` has seen: a string of a request until then.
        record = KeyRecord(id=new_id("k"), owner=owner, role=role, name=name, created_at=now, expires_at=expires_at)  # type: ignore[arg-type]
        await self._database.do(lambda db: _insert_key(db, record, key))
        self._valid[hash_key(key)] = record
        self.on_event("key.made", record.owner, record.id)
        return record, key

    async def rotate(self, id: str, expires_at: float | None = None) -> tuple[KeyRecord, str]:
        """Replaces the key by a new one; the old one stops. Data and quota of its owner do not change.

        It expires when the old one would have, unless another time is given. Raises NotFound; InvalidRequest, also
        for one that has expired, where none is given.
        """
        _check_expiry(expires_at)
        key = new_key()
        record = await self._database.do(lambda db: _rotate_key(db, id, key, expires_at))
        self._drop_key(id)
        if record is None:
            raise _key_not_found(id)
        self._valid[hash_key(key)] = record
        self.on_event("key.rotated", record.owner, id)
        self.on_event("key.made", record.owner, record.id)
        return record, key

    async def revoke(self, id: str, *, again: bool = False) -> None:
        """Revokes the key at once. Raises NotFound; with `again`, not for a key that was revoked already."""
        revoked = await self._database.do(lambda db: _revoke_key(db, id, time.time()))
        owner = next((each.owner for each in self._valid.values() if each.id == id), "")
        self._drop_key(id)
        if revoked:
            self.on_event("key.revoked", owner, id)
        elif not again or (await self.get(id, revoked=True)).revoked_at is None:
            raise _key_not_found(id)

    async def line(self, id: str) -> set[str]:
        """Returns the ids of that key and of the keys that it replaced: their sandboxes and data are its own.

        Raises NotFound; one of `UNREADABLE`.
        """
        await self.get(id, revoked=True)
        return {each for (each,) in await self._database.do(lambda db: db.execute(_LINE, (id,)).fetchall())}

    async def paused(self, id: str) -> int:
        """Counts the paused sandboxes of that key. Raises NotFound; one of `UNREADABLE`."""
        keys = json.dumps(sorted(await self.line(id)))
        return int(await self._database.do(lambda db: db.execute(_PAUSED, (keys,)).fetchone()[0]))

    async def revoke_all(self, owner: str) -> None:
        """Revokes every key of that owner at once. Raises one of `UNREADABLE`."""
        self._drop_owner_keys(owner)
        await self._database.do(lambda db: _revoke_owner_keys(db, owner, time.time()))
        self._drop_owner_keys(owner)  # a refresh that had read them before may have brought them back

    async def refresh(self) -> None:
        """Loads changes of other processes, and stores the last uses of keys. Raises one of `UNREADABLE`."""
        used, self._used = self._used, {}
        try:
            rows = await self._database.do(lambda db: _sync_uses(db, used))
            self._valid = {str(row[0]): _decode_record(row) for row in rows}
        except UNREADABLE:
            self._used = {**used, **self._used}
            raise

    async def try_refresh(self) -> None:
        """As `refresh`. If the store cannot be read now, the cached keys stay valid, and the log reports it."""
        try:
            await self.refresh()
        except UNREADABLE as error:
            log.error("keys.not_refreshed", error=str(error))
        self.refreshed(self.ids)

    def _drop_key(self, id: str) -> None:
        self._valid = {hashed: record for hashed, record in self._valid.items() if record.id != id}
        self.refreshed(self.ids)

    def _drop_owner_keys(self, owner: str) -> None:
        self._valid = {hashed: record for hashed, record in self._valid.items() if record.owner != owner}

    def _note_use(self, record: KeyRecord) -> None:
        known = self._used.get(record.id) or record.last_used_at or 0.0
        now = time.time()
        if now - known > USED_SECONDS:
            self._used[record.id] = now


def check_owner_name(name: str) -> None:
    """Raises InvalidRequest unless it is a valid name of an owner."""
    if not _OWNER.fullmatch(name):
        raise errors.InvalidRequest(f"{name!r} cannot be an owner: use letters, digits and . _ @ + -, 128 at most")


def _check_new_key(owner: str, role: str, name: str) -> None:
    check_owner_name(owner)
    if role not in get_args(KeyRole):
        raise errors.InvalidRequest(f"there is no role {role!r}: use {' or '.join(get_args(KeyRole))}")
    if len(name) > MAX_NAME or not name.isprintable():
        raise errors.InvalidRequest(f"a key's name has {MAX_NAME} printable characters at most")


def _check_expiry(at: float | None) -> None:
    now = time.time()
    if at is not None and not now < at <= now + MAX_YEARS * 366 * 86400:
        raise errors.InvalidRequest(
            f"expires_at must be a time to come, in seconds since 1970, {MAX_YEARS} years from now at most"
        )


def _insert_key(db: sqlite3.Connection, record: KeyRecord, key: str) -> None:
    with db:
        db.execute(_PUT, (hash_key(key), *msgspec.structs.astuple(record)))


def _rotate_key(db: sqlite3.Connection, id: str, key: str, expires_at: float | None) -> KeyRecord | None:
    with db:  # both or neither
        row = db.execute(f"{_GET} WHERE id = ? AND revoked_at IS NULL", (id,)).fetchone()
        old = None if row is None else _decode_record(row)
        if old is None:
            return None
        if old.expired and expires_at is None:
            raise errors.InvalidRequest(
                f"the key {id!r} has expired: say until when the new one holds, with --expires or `expires_at`"
            )
        now = time.time()
        record = msgspec.structs.replace(
            old, id=new_id("k"), created_at=now, last_used_at=None, expires_at=expires_at or old.expires_at
        )
        db.execute(_REVOKE, (now, id))
        db.execute(_PUT, (hash_key(key), *msgspec.structs.astuple(record)))
        db.execute("UPDATE keys SET replaced_by = ? WHERE id = ?", (record.id, id))
        for table in ("quotas", "usage"):  # the new key takes over the quota and the usage
            db.execute(f"UPDATE {table} SET key_id = ? WHERE key_id = ?", (record.id, id))
        return record


def _revoke_key(db: sqlite3.Connection, id: str, now: float) -> bool:
    with db:
        return db.execute(_REVOKE, (now, id)).rowcount > 0


def _revoke_owner_keys(db: sqlite3.Connection, owner: str, now: float) -> None:
    with db:
        db.execute("UPDATE keys SET revoked_at = ? WHERE owner = ? AND revoked_at IS NULL", (now, owner))


def _sync_uses(db: sqlite3.Connection, used: dict[str, float]) -> list[tuple[object, ...]]:
    if used:
        with db:
            db.executemany("UPDATE keys SET last_used_at = ? WHERE id = ?", [(at, id) for id, at in used.items()])
    return db.execute(f"{_GET} WHERE revoked_at IS NULL").fetchall()


def _decode_record(row: tuple[object, ...]) -> KeyRecord:
    return msgspec.convert(dict(zip(_COLUMNS, row[1:], strict=True)), KeyRecord)


def _key_not_found(id: str) -> errors.NotFound:
    return errors.NotFound(f"there is no valid key {id!r}: `cloche key list` shows those that there are")


# --- The server's secret, from which sandbox tokens are derived: it survives restarts.

SECRET_BYTES = 32


def server_secret(path: Path) -> bytes:
    """The secret in that file, which only its owner can read; made where there is none. Raises Unavailable."""
    try:
        if not path.exists():
            _write_secret(path)
        secret = path.read_bytes()
    except OSError as error:
        raise errors.Unavailable(f"cannot read or make the server's secret {path}: {error}") from None
    if len(secret) != SECRET_BYTES:
        raise errors.Unavailable(f"{path} does not hold {SECRET_BYTES} bytes: remove it, and a new one is made")
    return secret


def _write_secret(path: Path) -> None:
    """Writes the secret atomically, also when two servers start at once: the first one's stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink()
