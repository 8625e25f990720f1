"""The store's file locked, read-only, damaged: what needs it says so, what does not goes on, and nothing is lost."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from tests.conftest import RunningServer, wait_until
from tests.faults.conftest import Neighbour, in_background

import cloche
from cloche.model import SandboxSpec
from cloche.store import database, sandboxes
from cloche.store.base import SandboxRecord
from cloche.store.database import Database, Unusable

LOCKER = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def locked(store: Path) -> Iterator[None]:
    """Another process holds the lock meanwhile."""
    command = [sys.executable, "-c", LOCKER, str(store)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as locker:
        assert locker.stdout and locker.stdout.readline() == "locked\n"
        yield
        locker.communicate()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store.sqlite3"


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_MILLISECONDS", 300)
    monkeypatch.setattr(database, "TROUBLED_MILLISECONDS", 20)
    monkeypatch.setattr(database, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(sandboxes, "TROUBLED_SECONDS", 0.2)


def new_key(server: RunningServer) -> httpx2.Response:
    """Something that has to be written before it can be told."""
    asked = {"owner": "somebody", "role": "user", "name": "test"}
    return httpx2.post(f"{server.url}/admin/keys", headers={"x-api-key": server.key}, json=asked, timeout=60)


def keep(text: str) -> database.Work[None]:
    def write(db: sqlite3.Connection) -> None:
        with db:
            db.execute("INSERT INTO words (word) VALUES (?)", (text,))

    return write


async def words(db: Database) -> list[str]:
    return [word for (word,) in await db.do(lambda db: db.execute("SELECT word FROM words ORDER BY rowid").fetchall())]


@contextlib.asynccontextmanager
async def opened(store: Path) -> Iterator[Database]:
    db = Database(store)
    await db.open()
    await db.do(lambda db: db.execute("CREATE TABLE IF NOT EXISTS words (word)"))
    try:
        yield db
    finally:
        await db.aclose()


def test_a_store_locked_for_a_moment_costs_patience_and_no_more(running, mine, neighbour: Neighbour, place: Path):
    with locked(place / "store.sqlite3"):
        with cloche.Sandbox(**mine) as box:
            assert box.run("6 * 7").text == "42"
        made = in_background(lambda: new_key(running))
        neighbour.assert_unharmed()
        assert not made.done()
    assert made.result(60).status_code == 201
    with pytest.raises(cloche.errors.SandboxKilled):
        cloche.Sandbox.connect(box.id, **mine)


@pytest.mark.long
def test_a_long_store_lock_is_reported_and_writes_follow_after_it(running, mine, neighbour: Neighbour, place: Path):
    with locked(place / "store.sqlite3"):
        boxes = [cloche.Sandbox(**mine) for _ in range(3)]
        refused = new_key(running)
        assert refused.status_code == 503 and "another process holds its lock" in refused.text
        assert int(refused.headers["retry-after"]) >= 1
        began = time.monotonic()
        assert new_key(running).status_code == 503
        assert httpx2.get(f"{running.url}/health").json().get("store") == "failing"
        assert "cloche_store_failing 1.0" in httpx2.get(f"{running.url}/metrics").text
        assert time.monotonic() - began < 8  # who comes later does not wait as long as the first
        for box in boxes:
            box.run("1")
            box.close()
        with cloche.Sandbox(**mine) as box:
            assert box.run("6 * 7").text == "42"
        neighbour.assert_unharmed()
    wait_until(lambda: new_key(running).status_code == 201)
    wait_until(lambda: "store" not in httpx2.get(f"{running.url}/health").json())
    known = "SELECT COUNT(*) FROM sandboxes WHERE state = 'killed' AND id IN (?, ?, ?)"
    with contextlib.closing(sqlite3.connect(place / "store.sqlite3")) as db:
        wait_until(lambda: db.execute(known, [box.id for box in boxes]).fetchone() == (3,))


async def test_failed_writes_are_repeated_later_in_order(store: Path, hurry: None):
    async with opened(store) as db:
        with locked(store):
            for number in range(5):
                db.do_later(keep(str(number)))
            with pytest.raises(Unusable, match="holds its lock"):
                await db.do(keep("told"))
            assert await words(db) == []  # whoever only reads is served
            assert db.failing
            db.do_later(keep("5"))
        await db.do(keep("6"))
        while len(await words(db)) < 7:
            pass
        assert sorted(await words(db)) == [*"0123456"]
        assert [word for word in await words(db) if word != "6"] == [*"012345"]
        assert not db.failing


async def test_pending_writes_are_bounded_and_the_newest_stay(store: Path, hurry: None, monkeypatch):
    monkeypatch.setattr(database, "MAX_HELD", 10)
    async with opened(store) as db:
        with locked(store):
            for number in range(30):
                db.do_later(keep(str(number)))
            with pytest.raises(Unusable):
                await db.do(keep("told"))
        while "29" not in await words(db):
            pass
        assert await words(db) == [str(number) for number in range(20, 30)]


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_store_that_was_removed_or_replaced_takes_nothing_that_would_be_lost(store: Path, replaced: bool):
    async with opened(store) as db:
        await db.do(keep("before"))
        away = store.rename(store.with_name("away"))
        if replaced:
            store.write_bytes(away.read_bytes())
        with pytest.raises(Unusable, match="was removed or replaced"):
            await db.do(keep("lost"))
        db.do_later(keep("held"))
        assert db.failing
        away.replace(store)
    async with opened(store) as db:
        assert await words(db) == ["before", "held"]


async def test_held_writes_that_take_long_are_done_once(store: Path, hurry: None):
    async with opened(store) as db:
        with locked(store):
            for number in range(5):
                db.do_later(keep_slowly(str(number)))
            with pytest.raises(Unusable):
                await db.do(keep("told"))
        while "4" not in await words(db):
            pass
        assert await words(db) == [*"01234"]


def keep_slowly(text: str) -> database.Work[None]:
    """Takes longer than held work waits for another attempt."""

    def write(db: sqlite3.Connection) -> None:
        keep(text)(db)
        started = time.monotonic()
        while time.monotonic() - started < 2 * database.RETRY_SECONDS:
            pass

    return write


async def test_a_read_only_store_is_said_and_used_again_when_it_can_be(store: Path, hurry: None):
    async with opened(store) as db:
        await db.do(keep("before"))
        await db.do(lambda db: db.execute("PRAGMA query_only = ON"))
        with pytest.raises(Unusable, match="read-only"):
            await db.do(keep("told"))
        assert db.failing
        db.do_later(keep("later"))
        assert await words(db) == ["before"]
        await db.do(lambda db: db.execute("PRAGMA query_only = OFF"))
        while len(await words(db)) < 2:
            pass
        assert await words(db) == ["before", "later"]
        assert not db.failing


async def test_the_last_word_on_a_sandbox_is_known_while_the_store_is_locked(store: Path, hurry: None):
    kept = sandboxes.SqliteSandboxRecords(store)
    await kept.open()
    spec = SandboxSpec(owner="alice", template="python@1")
    about = {"spec": spec, "instance": "h1", "created_at": time.time()}
    with locked(store):
        for number in range(2000):  # of three sandboxes
            kept.put(SandboxRecord(id=f"i{number % 3}", state="running", **about))
            if number % 500 == 0:
                with pytest.raises(cloche.errors.Unavailable):
                    await kept.keep(SandboxRecord(id="i9", state="running", **about))
        kept.put(SandboxRecord(id="i0", state="killed", **about))
        assert (await kept.get("i0")).state == "killed"
    await kept.aclose()
    kept = sandboxes.SqliteSandboxRecords(store)
    await kept.open()
    assert [(await kept.get(f"i{number}")).state for number in range(3)] == ["killed", "running", "running"]
    await kept.aclose()


def serve(data_dir: Path) -> tuple[int, str]:
    command = [str(Path(sys.executable).with_name("cloche")), "--data-dir", str(data_dir), "serve", "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return ended.returncode, ended.stderr


@pytest.mark.parametrize("damage", ["nonsense", pytest.param("half", marks=pytest.mark.long)])
def test_a_damaged_store_is_said_at_the_start_by_its_name(own_data_dir: Path, damage: str):
    store = own_data_dir / "store.sqlite3"
    if damage == "nonsense":
        store.write_bytes(os.urandom(100_000))
    else:
        with contextlib.closing(sqlite3.connect(store)) as db:
            db.executescript("CREATE TABLE words (word); CREATE INDEX by_word ON words (word);")
            db.executemany("INSERT INTO words VALUES (?)", [("word" * 50,)] * 2000)
            db.commit()
        os.truncate(store, 5000)
    status, said = serve(own_data_dir)
    assert status not in (0, None) and "Traceback" not in said
    assert str(store) in said and "damaged" in said


@pytest.mark.long
def test_a_store_that_cannot_be_written_is_said_at_the_start_by_its_name(own_data_dir: Path):
    store = own_data_dir / "store.sqlite3"
    with contextlib.closing(sqlite3.connect(store)) as db:
        db.execute("PRAGMA user_version = 0")
    with read_only(own_data_dir):
        status, said = serve(own_data_dir)
    assert status not in (0, None) and "Traceback" not in said
    assert str(own_data_dir) in said and ("read-only" in said.lower() or "permission" in said.lower())


@contextlib.contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """Root may write whatever its mode says, so for root it is a mount."""
    if os.geteuid() == 0:
        mount = ["mount", "--bind", "-o", "ro", str(directory), str(directory)]
        if subprocess.run(mount, capture_output=True).returncode != 0:
            pytest.skip("nothing can be mounted here")
        try:
            yield
        finally:
            subprocess.run(["umount", str(directory)], check=True)
        return
    directory.chmod(0o500)
    (directory / "store.sqlite3").chmod(0o400)
    try:
        yield
    finally:
        directory.chmod(0o700)
