"""What nobody needs goes from the data directory, and nothing that anybody needs."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from tests.conftest import wait_until

from cloche.config import Config
from cloche.config.librechat import LibreChatConfig
from cloche.config.sections import DiskConfig
from cloche.engine.operations import gc
from cloche.engine.operations.gc import CollectedItem, GarbageCollector
from cloche.model import Template, new_id
from cloche.store import sandboxes
from cloche.store.migrations import MIGRATIONS
from cloche.templates import Catalogue
from cloche.templates.catalogue import hold_template

CLOCHE = str(Path(sys.executable).with_name("cloche"))
DAY = 86400.0
ADD_RECORD = """INSERT INTO sandboxes (id, owner, template, state, instance, created_at, ended_at, metadata, limits)
    VALUES (?1, ?2, 't', IIF(?3 IS NULL, 'running', 'killed'), 'h', 0, ?3, ?4, '{}')"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty store."""
    path = tmp_path_factory.mktemp("store") / "store.sqlite3"
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA synchronous = OFF")
        for migration in MIGRATIONS:
            db.executescript(migration)
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
        db.commit()
    return path


@pytest.fixture
def place(store: Path, tmp_path: Path) -> Path:
    shutil.copy(store, tmp_path)
    return tmp_path


def collected(place: Path, *, dry: bool = False, disk: DiskConfig | None = None, live: str = "") -> list[CollectedItem]:
    config = Config(data_dir=str(place), disk=disk or DiskConfig())
    return GarbageCollector(config, lambda name: name == live, dry=dry, compact=True).run()


def build(place: Path, name: str, days_ago: list[float]) -> list[Template]:
    """Versions of a template, one for each of these ages."""
    made = []
    for number, age in enumerate(days_ago):
        version = f"{number:064x}"[::-1]
        root = place / "templates" / name / version
        root.mkdir(parents=True)
        at = time.time() - age * DAY
        template = Template(
            name=name, version=version, python="", python_version="", python_prefix="", root=str(root), created_at=at
        )
        (root / "template.json").write_bytes(msgspec.json.encode(template))
        os.utime(root / "template.json", (at, at))
        made.append(template)
    return made


def versions(place: Path, name: str) -> list[str]:
    return [each.version for each in Catalogue(str(place)).list() if each.name == name]


def run_from(place: Path, table: str, template: Template) -> None:
    with closing(sqlite3.connect(place / "store.sqlite3")) as db:
        if table == "sandboxes":
            db.execute(
                """INSERT INTO sandboxes (id, owner, template, state, instance, created_at, metadata, limits)
                VALUES ('s', 'o', ?, 'paused', 'h', 0, '{}', '{}')""",
                (template.ref,),
            )
        else:
            body = msgspec.json.encode({"template": template.ref}).decode()
            db.execute("INSERT INTO snapshots VALUES ('s', 'o', NULL, 'i', 0, ?)", (body,))
        db.commit()


# --- templates


def test_of_many_versions_the_newest_stay(place: Path):
    made = build(place, "data", [n + 1 for n in range(8)])
    found = collected(place, disk=DiskConfig(template_versions=3))
    assert [each.name for each in found] == [each.ref for each in made[3:]]
    assert versions(place, "data") == [each.version for each in made[:3]]


def test_a_version_that_was_not_used_for_long_goes_but_one_can_go_back_by_one(place: Path):
    made = build(place, "data", [40, 50, 60, 70])
    collected(place)
    assert versions(place, "data") == [each.version for each in made[:2]]


@pytest.mark.parametrize("by", ["a pin", "a paused sandbox", "a snapshot", "a process", "a fresh build"])
def test_a_version_that_is_used_stays(place: Path, by: str):
    made = build(place, "data", [n + 1 for n in range(8)])
    used, held = made[6], None
    if by == "a pin":
        Catalogue(str(place)).pin(f"data@{used.version}")
    elif by == "a process":
        held = hold_template(used)
        os.utime(Path(used.root, "template.json"), (0, 0))
    elif by == "a fresh build":
        os.utime(Path(used.root, "template.json"))
    else:
        run_from(place, "sandboxes" if by == "a paused sandbox" else "snapshots", used)
    collected(place, disk=DiskConfig(template_versions=2))
    kept = versions(place, "data")
    assert used.version in kept
    assert len(kept) == (4 if by == "a pin" else 3)
    if held is not None:
        os.close(held)
        collected(place, disk=DiskConfig(template_versions=2))
        assert used.version not in versions(place, "data")


def test_a_version_that_the_configuration_names_stays(place: Path):
    made = build(place, "data", [n + 1 for n in range(8)])
    config = Config(
        data_dir=str(place),
        disk=DiskConfig(template_versions=2),
        librechat=LibreChatConfig(template=made[6].ref),
        aliases={"old:*": f"data@{made[7].version}"},
    )
    GarbageCollector(config, lambda name: False).run()
    assert set(versions(place, "data")) == {each.version for each in (*made[:2], *made[6:])}


def test_templates_that_lie_elsewhere_are_left_to_others(place: Path, tmp_path_factory: pytest.TempPathFactory):
    elsewhere = tmp_path_factory.mktemp("shared")
    build(elsewhere, "data", [n + 100 for n in range(8)])
    (place / "templates").symlink_to(elsewhere / "templates")
    assert collected(place) == []
    assert len(versions(place, "data")) == 8


def test_a_store_of_another_version_gives_no_usage(place: Path):
    build(place, "data", [n + 100 for n in range(8)])
    with closing(sqlite3.connect(place / "store.sqlite3")) as db:
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    assert collected(place) == []


# --- files


def test_unknown_images_of_ended_processes_are_removed(place: Path):
    (place / "images").mkdir()
    names = {who: f"{new_id('m')}-{who}" for who in ("dead", "live", "known")}
    names["draft"] = f".draft-{new_id('m')}-dead"
    for name in names.values():
        (place / "images" / name).write_bytes(b"x" * 10)
    with closing(sqlite3.connect(place / "store.sqlite3")) as db:
        db.execute("INSERT INTO snapshots VALUES ('s', 'o', NULL, ?, 0, '{}')", (names["known"],))
        db.commit()
    assert {each.name for each in collected(place, live="live")} == {names["dead"], names["draft"]}
    assert {path.name for path in (place / "images").iterdir()} == {names["live"], names["known"]}


def test_an_image_stays_that_was_made_known_by_the_last_thing_that_its_maker_did(place: Path):
    (place / "images").mkdir()
    image = f"{new_id('m')}-dead"
    (place / "images" / image).write_bytes(b"x")

    def is_live(name: str) -> bool:
        """It was, until now."""
        with closing(sqlite3.connect(place / "store.sqlite3")) as db:
            db.execute("INSERT INTO snapshots VALUES ('s', 'o', NULL, ?, 0, '{}')", (image,))
            db.commit()
        return False

    assert GarbageCollector(Config(data_dir=str(place)), is_live).run() == []


@pytest.mark.parametrize("directory", ["blobs", "build-files"])
def test_contents_go_that_no_file_has_unless_they_are_new(place: Path, directory: str, monkeypatch):
    (place / directory).mkdir()
    table, id = ("files", "file-1") if directory == "blobs" else ("template_files", "bf1")
    orphan = {"blobs": "file-2", "build-files": "bf2"}[directory]
    for name in (id, orphan, ".draft-x", "something-else"):
        (place / directory / name).write_bytes(b"x")
    with closing(sqlite3.connect(place / "store.sqlite3")) as db:
        row = ("o", "f", "p", 1, 0, None) if directory == "blobs" else ("o", 1, time.time())
        db.execute(f"INSERT INTO {table} VALUES (?, {', '.join('?' * len(row))})", (id, *row))
        db.commit()
    assert collected(place) == []
    monkeypatch.setattr(gc, "ORPHAN_SECONDS", -60.0)  # no test can make a file that changed long ago
    assert {each.name for each in collected(place)} == {orphan, ".draft-x"}
    assert {path.name for path in (place / directory).iterdir()} == {id, "something-else"}


def test_records_are_bounded_and_the_oldest_go(place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sandboxes, "MAX_RECORDS", 10)
    now = time.time()
    with closing(sqlite3.connect(place / "store.sqlite3")) as db:
        db.executemany(ADD_RECORD, [(str(n), "o", now - n, "{}") for n in range(25)] + [("runs", "o", None, "{}")])
        db.commit()
        assert [each.things for each in collected(place)] == [15]
        kept = {id for (id,) in db.execute("SELECT id FROM sandboxes")}
    assert kept == {"runs", *map(str, range(10))}


def test_a_flood_of_records_takes_none_of_another_owners(place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sandboxes, "MAX_RECORDS", 10)
    now = time.time()
    with closing(sqlite3.connect(place / "store.sqlite3")) as db:
        flood = [(f"flood{n}", "many", now - n, "{}") for n in range(50)]
        db.executemany(ADD_RECORD, [*flood, *((f"few{n}", "few", now - 1000 - n, "{}") for n in range(3))])
        db.commit()
        assert [each.things for each in collected(place)] == [43]
        kept = {id for (id,) in db.execute("SELECT id FROM sandboxes")}
    assert kept == {"few0", "few1", "few2", *(f"flood{n}" for n in range(7))}


def test_records_are_bounded_in_bytes_and_the_largest_owner_loses(place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sandboxes, "MAX_BYTES", 100_000)
    now, large = time.time(), '{"x": "' + "x" * 30_000 + '"}'
    with closing(sqlite3.connect(place / "store.sqlite3")) as db:
        db.executemany(ADD_RECORD, [(f"large{n}", "much", now - n, large) for n in range(10)])
        db.execute(ADD_RECORD, ("small", "little", now - 1000, "{}"))
        db.commit()
        assert [each.things for each in collected(place)] == [7]
        kept = {id for (id,) in db.execute("SELECT id FROM sandboxes")}
    assert kept == {"small", "large0", "large1", "large2"}


def test_a_store_that_is_mostly_free_is_written_anew(place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gc, "VACUUM_BYTES", 1 << 20)
    with closing(sqlite3.connect(place / "store.sqlite3")) as db:
        db.executemany("INSERT INTO snapshot_bodies VALUES (?, ?)", [(str(n), "x" * 4000) for n in range(1000)])
        db.commit()
        db.execute("DELETE FROM snapshot_bodies")
        db.commit()
    before = (place / "store.sqlite3").stat().st_size
    config = Config(data_dir=str(place))
    served = GarbageCollector(config, lambda name: False, compact=True, vacuum_bytes=1000)
    assert served.run() == []  # nobody could write for too long
    assert (place / "store.sqlite3").stat().st_size == before
    assert [each.kind for each in collected(place)] == ["store"]
    assert (place / "store.sqlite3").stat().st_size < before / 10


def test_packages_are_kept_within_their_limit(place: Path):
    directory = place / "cache/packages/00"
    directory.mkdir(parents=True)
    for n in range(10):
        (directory / str(n)).write_bytes(b"x" * 1000)
        os.utime(directory / str(n), (n, n))
    config = msgspec.structs.replace(Config(data_dir=str(place)))
    packages = msgspec.structs.replace(config.packages, cache_bytes=5000)
    config = msgspec.structs.replace(config, packages=packages)
    assert [each.kind for each in GarbageCollector(config, lambda _: False).run()] == ["packages"]
    assert {path.name for path in directory.iterdir()} == {"6", "7", "8", "9"}


# --- the command


def test_a_dry_run_says_it_and_removes_nothing(place: Path):
    build(place, "data", [n + 100 for n in range(8)])
    command = [CLOCHE, "--data-dir", str(place), "gc"]
    said = subprocess.run([*command, "--dry-run"], capture_output=True, text=True).stdout
    assert said.splitlines()[-1].startswith("6 things would go")
    assert len(versions(place, "data")) == 8
    done = subprocess.run(command, capture_output=True, text=True).stdout
    assert done.splitlines()[-1].startswith("6 things gone")
    assert len(versions(place, "data")) == 2


@pytest.mark.long
def test_leftovers_of_a_killed_collection_are_removed_by_the_next(place: Path):
    """It is killed the moment a version has left its place, with its files still there."""
    (old, *_) = reversed(build(place, "data", [n + 100 for n in range(8)]))
    for n in range(2000):
        (Path(old.root) / str(n)).mkdir()
    process = subprocess.Popen([CLOCHE, "--data-dir", str(place), "gc"], stdout=subprocess.DEVNULL)
    wait_until(lambda: not Path(old.root).exists() or process.poll() is not None)
    process.send_signal(signal.SIGKILL)
    process.wait()
    collected(place)
    assert len(versions(place, "data")) == 2
    assert not list((place / "templates/data").glob(".scratch-*"))
