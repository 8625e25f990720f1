"""Erasing an owner: afterwards nothing in the data directory is theirs, or holds what they wrote; others keep all."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import httpx2
import pytest
from tests.conftest import RunningServer, serving, wait_until

from cloche.store import erasure
from cloche.store.migrations import MIGRATIONS

MARK = "alices-secret-7c1f"
SHARED = frozenset[str]()  # tables that are nobody's
CLOCHE = str(Path(sys.executable).with_name("cloche"))


@pytest.fixture
def place(server_in_place: tuple[Path, RunningServer]) -> Path:
    return server_in_place[0]


@pytest.fixture
def own(server_in_place: tuple[Path, RunningServer]) -> RunningServer:
    return server_in_place[1]


def client_of(server: RunningServer, owner: str) -> httpx2.Client:
    admin = {"x-api-key": server.key}
    made = httpx2.post(f"{server.url}/admin/keys", headers=admin, json={"owner": owner}, timeout=60).json()
    return httpx2.Client(base_url=server.url, headers={"x-api-key": made["key"]}, timeout=60)


def schema() -> sqlite3.Connection:
    db = sqlite3.connect(":memory:")
    for migration in MIGRATIONS:
        db.executescript(migration)
    return db


# --- no table is forgotten


def tables(db: sqlite3.Connection) -> dict[str, set[str]]:
    names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    return {name: {row[1] for row in db.execute(f"PRAGMA table_info({name})")} for name in names}


def test_every_table_is_one_that_erasing_knows():
    """A new table is added to `erasure.OWNED` or `erasure.BELOW`, or here, with a reason, if it is nobody's."""
    with closing(schema()) as db:
        found = tables(db)
    owned = {name for name, columns in found.items() if "owner" in columns}
    assert owned == set(erasure.OWNED_TABLES)
    assert set(found) - owned == set(erasure.DEPENDENT_TABLES) | SHARED
    assert all(column in found[name] for name, (column, _, _) in erasure.DEPENDENT_TABLES.items())


def test_every_table_is_cleared_of_this_owner_only(tmp_path: Path):
    with closing(schema()) as db:
        found = tables(db)
        for owner in ("alice", "bob"):
            for table, columns in found.items():
                values = dict.fromkeys(columns, f"{owner}-1") | ({"owner": owner} if "owner" in columns else {})
                values |= {name: "{}" for name in ("revival", "metadata") if name in columns}
                names = ", ".join(f'"{name}"' for name in values)
                db.execute(f"INSERT INTO {table} ({names}) VALUES ({', '.join('?' * len(values))})", [*values.values()])
        removed = erasure.erase_owner(db, tmp_path, "alice", [])
        assert removed == dict.fromkeys(found, 1)
        assert {table: db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0] for table in found} == dict.fromkeys(
            found, 1
        )


def test_sessions_of_librechats_users_are_their_owners(tmp_path: Path):
    with closing(schema()) as db:
        for whose in (["alice", "", "u1"], ["bob", "alice", "alice"]):
            db.execute("INSERT INTO code_sessions VALUES (?, ?, 0)", (whose[0], json.dumps(whose)))
        erasure.erase_owner(db, tmp_path, "alice", [])
        assert db.execute("SELECT key FROM code_sessions").fetchall() == [("bob",)]


def test_data_in_use_by_another_process_stays_and_is_reported(tmp_path: Path):
    with closing(schema()) as db:
        for id, state, instance in (("a", "running", "h1"), ("b", "paused", "h1"), ("c", "running", "h2")):
            db.execute(
                """INSERT INTO sandboxes (id, owner, template, state, instance, created_at, metadata, limits)
                VALUES (?, 'alice', 't', ?, ?, 0, '{}', '{}')""",
                (id, state, instance),
            )
        assert erasure.erase_owner(db, tmp_path, "alice", ["h1"]) == {"sandboxes": 1}
        assert erasure.count_left(db, "alice", ["h1"]) == {"sandboxes": 2}


KILLED = """
import os, signal, sqlite3, sys; from pathlib import Path; from cloche.store import erasure
db, place, left = sqlite3.connect(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
def count(statement):
    global left
    left -= 1
    if not left: os.kill(os.getpid(), signal.SIGKILL)
db.set_trace_callback(count)
erasure.erase_owner(db, place, "alice", [])"""


@pytest.mark.parametrize("statement", [5, 15, 33])
def test_a_process_killed_while_it_erases_is_no_harm_when_it_is_done_again(tmp_path: Path, statement: int):
    path = tmp_path / "store.sqlite3"
    (tmp_path / "blobs").mkdir()
    with closing(schema()) as empty, closing(sqlite3.connect(path)) as db:
        empty.backup(db)
        for owner in ("alice", "bob"):
            db.execute("INSERT INTO files VALUES (?, ?, 'f', 'p', 1, 0, NULL)", (f"file-{owner}", owner))
            db.execute("INSERT INTO conversations VALUES (?, ?, 0, 0, NULL, 1, 1, '{}')", (owner, owner))
            db.execute("INSERT INTO conversation_items VALUES (?, 1, 'i', 0, 1, '{}')", (owner,))
            (tmp_path / "blobs" / f"file-{owner}").write_text("x")
        db.commit()
    killed = subprocess.run([sys.executable, "-c", KILLED, path, tmp_path, str(statement)])
    assert killed.returncode == -9
    with closing(sqlite3.connect(path)) as db:
        erasure.erase_owner(db, tmp_path, "alice", [])
        counts = [db.execute(f"SELECT COUNT(*) FROM {name}").fetchone()[0] for name in ("files", "conversation_items")]
        assert (counts, erasure.erase_owner(db, tmp_path, "alice", [])) == ([1, 1], {})
    assert [file.name for file in (tmp_path / "blobs").iterdir()] == ["file-bob"]


# --- a server


def fill(client: httpx2.Client) -> str:
    """Makes one of everything; the id of a sandbox that runs."""

    def made(path: str, **asked: object) -> dict[str, object]:
        answer = client.post(path, **asked)  # type: ignore[arg-type]
        assert answer.is_success, answer.text
        return dict(answer.json())

    box = made("/api/v1/sandboxes", json={"metadata": {"m": MARK}})["id"]
    code = f"open('/mnt/data/f', 'w').write('{MARK}')"
    made(f"/api/v1/sandboxes/{box}/run", json={"code": code})
    made(f"/api/v1/sandboxes/{box}/snapshots", json={"name": MARK})
    made(f"/api/v1/sandboxes/{box}/runs", json={"code": f"print('{MARK}')"})
    paused_on_disk = made("/api/v1/sandboxes", json={})["id"]
    made(f"/api/v1/sandboxes/{paused_on_disk}/run", json={"code": code})
    made(f"/api/v1/sandboxes/{paused_on_disk}/pause", json={"memory": False})
    made("/api/v1/volumes", json={"name": MARK})
    made("/v1/files", data={"purpose": "user_data"}, files={"file": (f"{MARK}.txt", MARK.encode())})
    made("/v1/conversations", json={"metadata": {"m": MARK}})
    made("/v1/responses", json={"model": "cloche/echo", "input": MARK})
    made("/librechat/v1/upload", files={"file": (f"{MARK}.txt", MARK.encode())})
    return str(box)


def rows_of(place: Path, owner: str) -> dict[str, int]:
    with closing(sqlite3.connect(place / "store.sqlite3")) as db:
        counts = {
            table: db.execute(f"SELECT COUNT(*) FROM {table} WHERE owner LIKE ?", (f"%{owner}%",)).fetchone()[0]
            for table in erasure.OWNED_TABLES
        }
    return {table: count for table, count in counts.items() if count}


def kept(place: Path) -> bytes:
    """All that the data directory holds, but for templates and the log of who did what."""
    parts = [part for part in place.iterdir() if part.name not in ("templates", "audit")]
    files = [file for part in parts for file in ([part] if part.is_file() else part.rglob("*")) if file.is_file()]
    return b"".join(file.read_bytes() for file in files)


def images_of(place: Path) -> set[str]:
    return {file.name for file in (place / "images").iterdir()} if (place / "images").is_dir() else set()


def test_a_server_erases_one_owner_only(own: RunningServer, place: Path):
    admin = httpx2.Client(base_url=own.url, headers={"x-api-key": own.key}, timeout=60)
    with client_of(own, "alice") as alice, client_of(own, "bob") as bob, admin:
        bobs = fill(bob)
        before, images = rows_of(place, "bob"), images_of(place)
        fill(alice)
        assert MARK.encode() in kept(place)

        told = admin.delete("/admin/owners/alice").json()
        assert (told["sandboxes_ended"], told["left"]) == (2, {})
        assert told["removed"].keys() >= {"sandboxes", "keys", "snapshots", "volumes", "files", "responses", "steps"}
        assert told["removed"]["file_bytes"] > 0
        assert rows_of(place, "alice") == {}
        assert images_of(place) == images
        assert alice.get("/api/v1/sandboxes").status_code == 401

        assert bob.post(f"/api/v1/sandboxes/{bobs}/run", json={"code": "1 + 1"}).is_success
        assert rows_of(place, "bob").keys() >= before.keys()
        assert "alice" not in admin.get("/api/v1/logs").text

        again = admin.delete("/admin/owners/alice").json()
        assert (again["removed"], again["sandboxes_ended"]) == ({}, 0)

        admin.delete("/admin/owners/bob")
        wait_until(lambda: MARK.encode() not in kept(place))


def test_only_an_admin_may(own: RunningServer):
    with client_of(own, "carol") as carol:
        assert carol.delete("/admin/owners/bob").status_code == 403
        assert carol.get("/admin/audit").status_code == 403


def test_the_audit_log_keeps_that_it_happened_under_a_name_or_none(own: RunningServer, place: Path):
    headers = {"x-api-key": own.key}
    with client_of(own, "dave") as dave:
        dave.post("/api/v1/volumes", json={"name": "v"})
    for part in ("usage", "quotas"):  # they name the owner, too
        assert httpx2.get(f"{own.url}/admin/{part}/dave", headers=headers, timeout=60).is_success
    told = httpx2.delete(f"{own.url}/admin/owners/dave?audit=true", headers=headers, timeout=60).json()
    assert told["audit_lines"] > 0

    def lines() -> list[dict[str, str]]:
        return list(httpx2.get(f"{own.url}/admin/audit?what=owner.erased", headers=headers).json()["lines"])

    wait_until(lambda: any(each["owner"].startswith("#") for each in lines()))
    wait_until(lambda: any(each["owner"] == "alice" for each in lines()))

    def text() -> bytes:
        return b"".join(file.read_bytes() for file in (place / "audit").glob("*.jsonl"))

    wait_until(lambda: b"admin.owners.removed" in text())
    assert b"dave" not in text()
    verified = subprocess.run([CLOCHE, "--data-dir", place, "audit", "verify"], capture_output=True, text=True)
    assert (verified.returncode, verified.stdout.count("\n")) == (0, 1), verified.stdout


def test_the_command_erases_with_a_server_and_without_one(own: RunningServer, place: Path, tmp_path: Path):
    with client_of(own, "erin") as erin:
        fill(erin)
    command = [CLOCHE, "--data-dir", str(place), "owner", "erase", "erin", "--yes"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, rows_of(place, "erin")) == (0, {}), done.stderr
    assert "2 sandboxes ended" in done.stdout
    alone = subprocess.run([CLOCHE, "--data-dir", str(tmp_path), *command[3:]], capture_output=True, text=True)
    assert (alone.returncode, alone.stdout) == (0, "erin: 0 sandboxes ended; removed nothing; 0 bytes of files\n")


@pytest.mark.long
def test_sandboxes_of_another_server_are_reported_and_erased_through_it(own: RunningServer, place: Path):
    with serving(place) as second, client_of(own, "frank") as frank:
        headers = dict(frank.headers)
        wait_until(lambda: httpx2.get(f"{second.url}/api/v1/whoami", headers=headers).is_success)
        for server in (own, second):
            assert httpx2.post(f"{server.url}/api/v1/sandboxes", headers=headers, json={}, timeout=60).is_success
        admin = {"x-api-key": own.key}
        told = httpx2.delete(f"{own.url}/admin/owners/frank", headers=admin, timeout=60).json()
        assert (told["sandboxes_ended"], told["left"]) == (1, {"sandboxes": 1})
        command = [CLOCHE, "--data-dir", str(place), "owner", "erase", "frank", "--yes"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, rows_of(place, "frank")) == (0, {}), done.stderr
