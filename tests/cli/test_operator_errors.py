"""What commands tell an operator who mistypes, may not look, or has something broken: a sentence, and a status."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx2
import pytest
from click.testing import CliRunner, Result
from e2b_code_interpreter import Sandbox
from tests.conftest import RunningServer

from cloche import cli, errors
from cloche.cli.key import parse_expiry
from cloche.config.sections import Quota
from cloche.engine.instance import Instance, find_instance_pid
from cloche.engine.quotas.quotas import QuotaAccount
from cloche.store.database import explain_unusable
from cloche.store.migrations import MIGRATIONS

OURS, WRONG = 125, 2
NOBODY = 65534


def cloche(place: Path, *args: str, env: dict[str, str] | None = None) -> Result:
    result = CliRunner().invoke(cli.main, ["--data-dir", str(place), *args], env=env)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@contextmanager
def as_another_user() -> Iterator[None]:
    """Whom modes of files keep out. An ordinary user is one already."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A data directory with a store, and a key of alice's."""
    assert cloche(tmp_path, "key", "add", "--owner", "alice").exit_code == 0
    return tmp_path


def id_in(place: Path) -> str:
    return str(json.loads(cloche(place, "key", "list", "--json").stdout)[0]["id"])


# --- who may not look


COMMANDS = (
    ("ps",),
    ("ui",),
    ("usage",),
    ("quota", "show"),
    ("key", "list"),
    ("owner", "erase", "alice", "--yes"),
    ("gc",),
    ("audit", "verify"),
)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_an_unreadable_data_directory_is_reported(tmp_path: Path, command: tuple[str, ...]):
    place = tmp_path / "theirs"
    for each in ("", "run", "run/h1"):
        (place / each).mkdir()
    (place / "run" / "h1").chmod(0o000)  # as the place of somebody else's server is
    if command[0] in ("gc", "audit"):
        place.chmod(0o000)
    for above in (tmp_path, *tmp_path.parents):  # the way there is open
        if above.stat().st_uid == os.geteuid() and above != Path("/"):
            above.chmod(above.stat().st_mode | 0o001)
    CliRunner().invoke(cli.main, [*command, "--help"])  # what is imported is
    with as_another_user():
        refused = cloche(place, *command)
    place.chmod(0o700)
    (place / "run" / "h1").chmod(0o700)
    assert refused.exit_code == OURS
    assert f"the data directory {place} cannot be used: Permission denied" in refused.stderr


# --- the wrong place, and the wrong name


@pytest.mark.parametrize("command", [("owner", "erase", "carol", "--yes"), ("audit", "verify"), ("gc",)], ids=" ".join)
def test_a_data_directory_that_is_not_there_is_no_success_and_is_not_made(tmp_path: Path, command: tuple[str, ...]):
    refused = cloche(tmp_path / "mistyped", *command)
    assert refused.exit_code == OURS and "there is no data directory" in refused.stderr
    assert not (tmp_path / "mistyped").exists()


def test_a_log_without_a_line_is_not_verified(tmp_path: Path):
    for _ in range(2):
        refused = cloche(tmp_path, "audit", "verify")
        assert refused.exit_code == OURS and "nothing was verified" in refused.stderr
        (tmp_path / "audit").mkdir(exist_ok=True)


def test_verification_results_are_printed_as_json(place: Path):
    verdict = json.loads(cloche(place, "audit", "verify", "--json").stdout)
    assert verdict["lines"] > 0 and verdict["problems"] == []


def test_erasing_an_unknown_owner_is_reported_and_harmless(place: Path):
    erased = cloche(place, "owner", "erase", "alcie", "--yes")
    assert erased.exit_code == 0 and "nothing is known of an owner 'alcie'" in erased.stderr
    assert "nothing is known" not in cloche(place, "owner", "erase", "alice", "--yes").stderr
    assert "nothing is known" in cloche(place, "owner", "erase", "alice", "--yes").stderr


def test_the_quota_of_a_misspelt_owner_is_not_shown(place: Path):
    assert cloche(place, "quota", "show", "alice").exit_code == 0
    refused = cloche(place, "quota", "show", "alcie")
    assert refused.exit_code == OURS and "there is no owner 'alcie'" in refused.stderr
    set_early = cloche(place, "quota", "set", "carol", "--sandboxes", "1")
    assert set_early.exit_code == 0 and "'carol' has no key yet" in set_early.stderr
    assert cloche(place, "quota", "show", "carol").exit_code == 0


def test_usage_of_a_misspelt_owner_is_an_error(server_in_place: tuple[Path, RunningServer]):
    refused = cloche(server_in_place[0], "usage", "nosuch")
    assert refused.exit_code == OURS and "there is no owner 'nosuch'" in refused.stderr


@pytest.mark.parametrize("name", ["vic tim", "é", "victim?audit=false", "a/b", "..", ""])
def test_an_invalid_owner_is_refused_before_any_request(place: Path, name: str):
    for command in (["owner", "erase", name, "--yes"], ["quota", "show", name], ["usage", name]):
        refused = cloche(place, *command)
        assert refused.exit_code == WRONG and "cannot be an owner" in refused.stderr


@pytest.mark.parametrize("id", ["a/b", "..", "", "a b"])
def test_an_invalid_key_id_is_refused_before_any_request(place: Path, id: str):
    for command in (["key", "revoke", id], ["key", "rotate", id], ["quota", "reset", "--key", id]):
        refused = cloche(place, *command)
        assert refused.exit_code == WRONG and "cannot be the id of a key" in refused.stderr


def test_a_server_refuses_to_erase_an_invalid_owner(server: RunningServer):
    answer = httpx2.delete(f"{server.url}/admin/owners/vic%20tim", headers={"x-api-key": server.key})
    assert answer.status_code == 400 and "cannot be an owner" in answer.text


# --- gc, in cron


def test_a_damaged_store_is_a_failure_of_gc(tmp_path: Path):
    (tmp_path / "store.sqlite3").write_bytes(b"this is no database, whatever its name may say" * 100)
    refused = cloche(tmp_path, "gc")
    assert refused.exit_code == OURS
    assert re.fullmatch("cloche: not everything in .* could be checked: .*file is damaged.*\n", refused.stderr)


def test_a_store_of_a_newer_version_is_a_failure_of_gc(place: Path):
    with closing(sqlite3.connect(place / "store.sqlite3")) as db:
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    refused = cloche(place, "gc", "--dry-run")
    assert refused.exit_code == OURS and f"of version {len(MIGRATIONS) + 1}" in refused.stderr


def test_a_part_that_fails_is_a_failure_of_gc(place: Path):
    with closing(sqlite3.connect(place / "store.sqlite3")) as db:
        db.execute("DROP TABLE snapshots")
    refused = cloche(place, "gc")
    assert refused.exit_code == OURS and "no such table" in refused.stderr
    assert "things gone" in refused.stdout  # of all other parts


# --- keys


def test_a_key_that_would_hold_for_ages_is_refused(place: Path):
    assert parse_expiry("99999y", time.time()) is None
    refused = cloche(place, "key", "add", "--expires", "99999y")
    assert refused.exit_code == WRONG and "100 years" in refused.stderr


def test_the_quota_of_a_revoked_key_can_be_seen_and_removed_but_not_set(place: Path):
    id = id_in(place)
    assert cloche(place, "quota", "set", "--key", id, "--sandboxes", "3").exit_code == 0
    assert cloche(place, "key", "revoke", id).exit_code == 0
    assert id in cloche(place, "quota", "show", "--key", id).stdout
    assert cloche(place, "quota", "set", "--key", id, "--sandboxes", "4").exit_code == OURS
    assert cloche(place, "quota", "reset", "--key", id).exit_code == 0
    assert json.loads(cloche(place, "quota", "show", "--json").stdout)["own"] == []


def test_a_revoked_keys_sandboxes_end_where_that_is_asked_for(server_in_place: tuple[Path, RunningServer]):
    place, server = server_in_place
    admin = httpx2.Client(base_url=server.url, headers={"x-api-key": server.key}, timeout=60)
    old = admin.post("/admin/keys", json={"owner": "kelly", "name": "laptop"}).json()
    box = Sandbox.create(**{**server.e2b, "api_key": old["key"]})
    new = admin.post(f"/admin/keys/{old['id']}/rotate").json()
    assert old["id"] in cloche(place, "ps").stdout

    assert cloche(place, "key", "revoke", new["id"]).exit_code == 0
    assert box.run_code("20 + 3").text == "23"  # by the sandbox's own token
    assert "laptop" in cloche(place, "usage", "kelly").stdout  # not its id

    done = cloche(place, "key", "revoke", new["id"], "--kill")
    assert done.exit_code == 0 and "1 sandboxes killed" in done.stderr
    assert box.sandbox_id not in cloche(place, "ps").stdout
    again = admin.delete(f"/admin/keys/{new['id']}?kill=true")
    assert again.json() == {"id": new["id"], "sandboxes_killed": 0}
    assert admin.delete("/admin/keys/nosuch?kill=true").status_code == 404
    assert admin.delete(f"/admin/keys/{new['id']}?kill=yes").status_code == 400


def test_without_a_server_paused_sandboxes_of_a_revoked_key_are_told_of(place: Path):
    id = id_in(place)
    with closing(sqlite3.connect(place / "store.sqlite3")) as db, db:
        db.execute(
            """INSERT INTO sandboxes (id, owner, template, state, instance, created_at, metadata, limits, key_id)
            VALUES ('i1', 'alice', 't', 'paused', 'h', 0, '{}', '{}', ?)""",
            (id,),
        )
    left = cloche(place, "key", "revoke", id, "--kill")
    assert left.exit_code == OURS and "1 of its sandboxes are paused" in left.stderr
    assert "revoked" in cloche(place, "key", "list").stdout


# --- what is said


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        (["--sandboxes", "-1"], "0 or more"),
        (["--sandboxes", "1.5"], "int"),
        (["--memory-bytes", "5GB"], "5GiB"),
        (["--lifetime-seconds", "1h"], "such as 3600"),
    ],
    ids=" ".join,
)
def test_a_quota_that_is_none_is_explained(place: Path, option: list[str], hint: str):
    refused = cloche(place, "quota", "set", "alice", *option)
    assert refused.exit_code == WRONG and hint in refused.stderr


def test_a_quota_that_was_set_is_told_as_json(place: Path):
    told = json.loads(cloche(place, "quota", "set", "alice", "--sandboxes", "3", "--json").stdout)
    assert told["owner"] == "alice" and told["own"] == {"sandboxes": 3}


def test_a_default_quota_that_is_none_is_named_with_where_it_came_from(tmp_path: Path):
    refused = cloche(tmp_path, "key", "list", env={"CLOCHE_QUOTAS_OWNER_SANDBOXES": "-3"})
    assert refused.exit_code == OURS
    assert "quotas.owner.sandboxes" in refused.stderr and "CLOCHE_QUOTAS_OWNER_SANDBOXES" in refused.stderr


def test_an_excessive_request_is_not_reported_as_used_up():
    account = QuotaAccount("owner 'alice'", Quota(stored_bytes=1000, memory_bytes=1000))
    with pytest.raises(errors.QuotaExceeded, match="would be exceeded: 0 bytes of 1000 bytes"):
        account.check_stored(2000)
    with pytest.raises(errors.QuotaExceeded, match="would be exceeded"):
        account.check_sandbox(2000)
    account.stored_bytes = 1000
    with pytest.raises(errors.QuotaExceeded, match="is used up"):
        account.check_stored(0)


def test_a_locked_store_is_reported_with_advice_to_retry(place: Path):
    with (
        closing(sqlite3.connect(place / "store.sqlite3")) as one,
        closing(sqlite3.connect(place / "store.sqlite3")) as other,
    ):
        other.execute("PRAGMA busy_timeout = 0")
        one.execute("BEGIN EXCLUSIVE")
        with pytest.raises(sqlite3.OperationalError) as raised:
            other.execute("BEGIN IMMEDIATE")
        one.rollback()
    assert "try again in a moment" in str(explain_unusable(raised.value))


def test_the_process_behind_an_instance_is_known(tmp_path: Path):
    instance = Instance(tmp_path / "run")
    instance.open()
    try:
        assert find_instance_pid(tmp_path / "run", instance.name) == os.getpid()
        assert find_instance_pid(tmp_path / "run", "nosuch") is None
    finally:
        instance.close()
