"""Keys: made, listed, rotated and revoked, at once and for good; of a key only its hash is kept."""

from __future__ import annotations

import asyncio
import datetime
import json
import re
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest
from e2b_code_interpreter import Sandbox
from tests.conftest import serving, wait_until

from cloche import Sandbox as Box
from cloche import errors
from cloche.cli.key import parse_expiry
from cloche.store.database import Database
from cloche.store.keys import PRESET_ID, StoredKeys, hash_key
from cloche.store.migrations import MIGRATIONS

PRESET = "a key that is set in the environment".replace(" ", "-")


@pytest.fixture
async def keys(tmp_path):
    async with StoredKeys(Database(tmp_path / "store.sqlite3"), PRESET) as opened:
        yield opened


def contents(directory: Path) -> bytes:
    return b"".join(each.read_bytes() for each in directory.rglob("*") if each.is_file())


@contextmanager
def away(store: Path) -> Iterator[None]:
    """A store that cannot be used for keys meanwhile."""
    with closing(sqlite3.connect(store)) as db:
        db.execute("ALTER TABLE keys RENAME TO elsewhere")
        db.commit()
        try:
            yield
        finally:
            db.execute("ALTER TABLE elsewhere RENAME TO keys")
            db.commit()


# --- the store


async def test_keys_that_are_revoked_beside_a_refresh_do_not_come_back(keys):
    _, key = await keys.add("alice")
    refreshing = asyncio.create_task(keys.refresh())  # it reads them before they are revoked
    await asyncio.sleep(0)
    await keys.revoke_all("alice")
    await refreshing
    assert keys.find(key) is None


async def test_a_key_belongs_to_its_owner_with_its_role(keys):
    record, key = await keys.add("alice", "admin", "her laptop")
    assert re.fullmatch("e2b_[0-9a-f]{40}", key)
    principal = keys.find(key)
    assert (principal.owner, principal.role, principal.key_id) == ("alice", "admin", record.id)
    assert [(each.owner, each.name) for each in await keys.list()] == [("alice", "her laptop")]
    assert keys.find(key[:-1]) is None


async def test_a_rotated_key_stops_and_the_new_one_is_the_same_owners(keys):
    old, old_key = await keys.add("alice", "user", "laptop")
    new, new_key = await keys.rotate(old.id)
    assert keys.find(old_key) is None
    assert keys.find(new_key).owner == "alice"
    assert (new.role, new.name) == ("user", "laptop")
    with pytest.raises(errors.NotFound, match=old.id):
        await keys.rotate(old.id)


async def test_a_revoked_key_stops_and_stays_in_the_list(keys):
    record, key = await keys.add("alice")
    await keys.revoke(record.id)
    assert keys.find(key) is None
    (listed,) = await keys.list()
    assert listed.revoked_at is not None
    with pytest.raises(errors.NotFound):
        await keys.revoke(record.id)


async def test_a_revoked_key_is_reported_at_once_and_an_expired_one_at_the_next_refresh(keys, monkeypatch):
    told: list[set[str]] = []
    keys.refreshed = told.append
    now = time.time()
    (revoked, _), (expiring, _), (kept, _) = [await keys.add("a", expires_at=at) for at in (None, now + 3600, None)]
    await keys.revoke(revoked.id)
    assert told == [{PRESET_ID, expiring.id, kept.id}]
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    await keys.try_refresh()
    assert told[1:] == [{PRESET_ID, kept.id}]


async def test_the_preset_key_is_an_admins_and_in_no_store(keys, tmp_path):
    assert keys.find(PRESET).key_id == PRESET_ID
    assert keys.find(PRESET).role == "admin"
    assert await keys.list() == []
    assert PRESET.encode() not in contents(tmp_path)


async def test_only_the_hash_of_a_key_is_on_disk(keys, tmp_path):
    _, key = await keys.add("alice")
    kept = contents(tmp_path)
    assert key.encode() not in kept and key[4:].encode() not in kept and bytes.fromhex(key[4:]) not in kept
    assert hash_key(key).encode() in kept


async def test_changes_of_another_process_are_learnt_by_a_refresh(keys, tmp_path):
    async with StoredKeys(Database(tmp_path / "store.sqlite3")) as other:
        record, key = await other.add("bob")
        assert keys.find(key) is None
        await keys.refresh()
        assert keys.find(key).owner == "bob"
        await other.revoke(record.id)
    await keys.refresh()
    assert keys.find(key) is None


async def test_when_a_key_was_used_last_is_kept(keys):
    record, key = await keys.add("alice")
    assert record.last_used_at is None
    keys.find(key)
    await keys.refresh()
    (listed,) = await keys.list()
    assert listed.last_used_at >= listed.created_at


async def test_uses_are_not_forgotten_while_the_store_cannot_be_written(keys, tmp_path):
    _, key = await keys.add("alice")
    keys.find(key)
    with away(tmp_path / "store.sqlite3"), pytest.raises(sqlite3.Error):
        await keys.refresh()
    await keys.refresh()
    (listed,) = await keys.list()
    assert listed.last_used_at is not None


async def test_an_expired_key_is_not_valid_and_stays_in_the_list(keys, monkeypatch):
    now = time.time()
    record, key = await keys.add("alice", expires_at=now + 3600)
    assert keys.find(key).key_id == record.id
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    assert keys.find(key) is None
    await keys.refresh()
    assert keys.find(key) is None
    (listed,) = await keys.list()
    assert listed.expired and listed.revoked_at is None


async def test_a_rotated_key_expires_when_the_old_one_would_have_unless_another_time_is_given(keys, monkeypatch):
    now = time.time()
    old, _ = await keys.add("alice", expires_at=now + 3600)
    new, _ = await keys.rotate(old.id)
    assert new.expires_at == old.expires_at
    later, _ = await keys.rotate(new.id, now + 7200)
    assert later.expires_at == now + 7200
    monkeypatch.setattr(time, "time", lambda: now + 9000)
    with pytest.raises(errors.InvalidRequest, match="has expired: say until when"):
        await keys.rotate(later.id)
    _, key = await keys.rotate(later.id, now + 10_000)
    assert keys.find(key).owner == "alice"


@pytest.mark.parametrize("at", [0.0, -1.0, float("inf"), float("nan"), 1e300, 1_900_000_000_000.0])
async def test_a_key_expires_at_a_time_to_come(keys, at):
    with pytest.raises(errors.InvalidRequest, match="to come"):
        await keys.add("alice", expires_at=at)


@pytest.mark.parametrize(("text", "seconds"), [("30m", 1800), ("12h", 43200), ("30d", 2592000), ("1y", 31536000)])
def test_a_moment_is_a_while_from_now_on(text, seconds):
    assert parse_expiry(text, 1000.0) == 1000.0 + seconds


def test_a_moment_is_a_day_or_a_time_to_come():
    now = datetime.datetime(2026, 11, 16).timestamp()
    assert parse_expiry("2027-01-01", now) == datetime.datetime(2027, 1, 1).timestamp()
    assert parse_expiry("2027-01-01T12:30:00+00:00", now) == 1798806600
    for text in ("2025-01-01", "soon", "", "-3d", "0d", "9999999d", "30"):
        assert parse_expiry(text, now) is None


@pytest.mark.parametrize(
    ("owner", "role", "name"), [("", "user", ""), ("a b", "user", ""), ("a", "boss", ""), ("a", "user", "\n")]
)
async def test_a_key_that_makes_no_sense_is_refused(keys, owner, role, name):
    with pytest.raises(errors.InvalidRequest):
        await keys.add(owner, role, name)
    assert await keys.list() == []


async def test_a_store_of_the_first_version_is_migrated(tmp_path):
    with sqlite3.connect(tmp_path / "old") as db:
        db.executescript(MIGRATIONS[0])
        db.execute("PRAGMA user_version = 1")
    async with StoredKeys(Database(tmp_path / "old")) as keys:
        _, key = await keys.add("alice")
        assert keys.find(key)


# --- the server and the command


def cloche(data_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("cloche"), "--data-dir", str(data_dir), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def listed(data_dir: Path) -> list[dict[str, object]]:
    return json.loads(cloche(data_dir, "key", "list", "--json").stdout)


def status(url: str, key: str, path: str = "/e2b/v2/sandboxes") -> int:
    return httpx2.get(url + path, headers={"x-api-key": key}).status_code


def test_the_first_start_shows_a_key_once_with_lines_to_paste(own_data_dir):
    with serving(own_data_dir, env={"CLOCHE_API_KEY": ""}) as server:
        (key,) = set(re.findall("e2b_[0-9a-f]{40}", server.said))
        assert f"E2B_API_KEY={key} E2B_API_URL={server.url}/e2b E2B_SANDBOX_URL={server.url}/e2b" in server.said
        assert f"CLOCHE_API_KEY={key} CLOCHE_URL={server.url}" in server.said
        assert status(server.url, key, "/admin/keys") == 200
    with serving(own_data_dir, env={"CLOCHE_API_KEY": ""}) as server:
        assert "e2b_" not in server.said
        assert status(server.url, key) == 200
    assert key.encode() not in contents(own_data_dir)


def test_the_command_changes_keys_of_a_running_server_at_once(own_data_dir):
    with serving(own_data_dir) as server:
        key = cloche(own_data_dir, "key", "add", "--owner", "alice", "--name", "laptop").stdout.strip()
        assert status(server.url, key) == 200
        assert status(server.url, key, "/admin/keys") == 403
        box = Sandbox.create(**{**server.e2b, "api_key": key})
        (record,) = listed(own_data_dir)

        rotated = cloche(own_data_dir, "key", "rotate", str(record["id"])).stdout.strip()
        assert (status(server.url, key), status(server.url, rotated)) == (401, 200)
        again = Sandbox.connect(box.sandbox_id, **{**server.e2b, "api_key": rotated})
        assert again.run_code("6*7").text == "42"  # nothing of the owner's is lost

        (_, record) = listed(own_data_dir)
        assert cloche(own_data_dir, "key", "revoke", str(record["id"])).returncode == 0
        assert status(server.url, rotated) == 401


@pytest.mark.long
def test_a_server_whose_store_fails_for_a_while_learns_of_keys_again_and_ends_in_order(own_data_dir, tmp_path):
    store, log = own_data_dir / "store.sqlite3", tmp_path / "log"
    with serving(own_data_dir, log=log) as server:
        key = cloche(own_data_dir, "key", "add", "--owner", "alice").stdout.strip()
        with away(store):
            wait_until(lambda: "keys.not_refreshed" in log.read_text())
            assert status(server.url, key) == 200  # what was known last holds
        with closing(sqlite3.connect(store)) as db:  # as another process revokes it
            db.execute("UPDATE keys SET revoked_at = 1")
            db.commit()
        wait_until(lambda: status(server.url, key) == 401)
        with away(store):
            server.process.terminate()
            assert server.process.wait(60) == 0


@pytest.mark.long
def test_without_a_server_the_command_changes_the_store(tmp_path):
    made = cloche(tmp_path, "key", "add", "--role", "admin", "--expires", "30d")
    assert re.fullmatch("e2b_[0-9a-f]{40}\n", made.stdout)
    (record,) = listed(tmp_path)
    assert (record["owner"], record["role"]) == ("local", "admin")
    assert 29 * 86400 < record["expires_at"] - record["created_at"] <= 30 * 86400
    with closing(sqlite3.connect(tmp_path / "store.sqlite3")) as db:  # as if that time had come
        db.execute("UPDATE keys SET expires_at = 1")
        db.commit()
    assert "expired 1970" in cloche(tmp_path, "key", "list").stdout
    assert cloche(tmp_path, "key", "revoke", str(record["id"])).returncode == 0
    assert "revoked" in cloche(tmp_path, "key", "list").stdout
    again = cloche(tmp_path, "key", "revoke", str(record["id"]))
    assert again.returncode == 125 and str(record["id"]) in again.stderr


def test_admins_change_keys_over_http_and_bad_requests_are_explained(own_data_dir):
    with (
        serving(own_data_dir) as server,
        httpx2.Client(base_url=server.url, headers={"x-api-key": server.key}) as client,
    ):
        made = client.post("/admin/keys", json={"owner": "alice"})
        assert made.status_code == 201
        assert status(server.url, made.json()["key"]) == 200
        assert [each["id"] for each in client.get("/admin/keys").json()] == [made.json()["id"]]
        assert "key" not in client.get("/admin/keys").json()[0]
        short = client.post("/admin/keys", json={"owner": "bob", "expires_at": time.time() + 1}).json()
        wait_until(lambda: status(server.url, short["key"]) == 401)
        assert client.get("/admin/keys").json()[1]["expires_at"] == short["expires_at"]
        for body in (
            b"{",
            b'{"owner": ""}',
            b'{"expires_at": 5}',
            b'{"expires_at": "soon"}',
            b'{"role": "boss"}',
            b'{"admin": true}',
            b"[]",
            b'{"owner": "\xff"}',
        ):
            refused = client.post("/admin/keys", content=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_request")
        assert client.delete("/admin/keys/knothing").status_code == 404
        assert client.delete(f"/admin/keys/{made.json()['id']}").status_code == 204
        assert status(server.url, made.json()["key"]) == 401


UPGRADE = (
    "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


@contextmanager
def under_way(url: str, path: str, key: str, more: str = "") -> Iterator[socket.socket]:
    """A connection on which something is being answered."""
    place = urlsplit(url)
    with socket.create_connection((place.hostname, place.port), timeout=60) as client:
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nX-API-Key: {key}\r\n{more}\r\n".encode())
        head = b""
        while b"\r\n\r\n" not in head:
            head += client.recv(4096)
        assert head.startswith((b"HTTP/1.1 200", b"HTTP/1.1 101")), head
        yield client


def is_cut_off(client: socket.socket) -> bool:
    while client.recv(4096):
        pass
    return True


def test_requests_of_a_key_end_when_it_is_revoked(server):
    admin = {"x-api-key": server.key}
    made = [httpx2.post(f"{server.url}/admin/keys", headers=admin, json={"owner": "cut"}).json() for _ in range(2)]
    revoked, kept = (each["key"] for each in made)
    with Box(url=server.url, api_key=kept) as box, ExitStack() as stack:
        asked = {"code": "import time; time.sleep(3600)"}
        runs, own = f"{server.url}/api/v1/sandboxes/{box.id}/runs", {"x-api-key": kept}
        events = f"/api/v1/runs/{httpx2.post(runs, headers=own, json=asked).json()['id']}/events"
        execute = f"/api/v1/sandboxes/{box.id}/execute"
        stream = stack.enter_context(under_way(server.url, events, revoked))
        typed = stack.enter_context(under_way(server.url, execute, revoked, UPGRADE))
        other = stack.enter_context(under_way(server.url, events, kept))
        assert httpx2.delete(f"{server.url}/admin/keys/{made[0]['id']}", headers=admin).status_code < 300
        assert is_cut_off(stream) and is_cut_off(typed)
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            is_cut_off(other)
        assert box.files.exists("/mnt")  # the sandbox is the owner's
