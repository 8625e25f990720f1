"""The audit log: who did what, whole and in order, without what they wrote, and telling where it was changed."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.conftest import RunningServer, serving, wait_until

from cloche.api.requests import RequestAudit
from cloche.config.sections import AuditConfig
from cloche.engine.operations import audit as ration_of
from cloche.engine.operations import audit as trails
from cloche.engine.operations.audit import FLOOD_ENTRIES, MOST_LINES, AuditLog
from cloche.engine.principal import set_current_principal
from cloche.model import Principal, SandboxSpec
from cloche.store import audit
from cloche.store.audit import AuditFileWriter, AuditLine
from cloche.store.audit_reader import AuditQuery, read_last, verify_log
from cloche.store.base import SandboxRecord
from cloche.store.sandboxes import SqliteSandboxRecords

CLOCHE = str(Path(sys.executable).with_name("cloche"))
MARK = "what-alice-wrote-51d0"
NO_MOMENTS = ("later", "99999999999999999999", "-1", "nan", "inf", "1e400", "0001-01-01", "")


def said(directory: Path, **wanted: Any) -> list[AuditLine]:
    return read_last(directory, AuditQuery(**wanted), 100_000)


def alive(name: str) -> bool:
    return True


def write(directory: Path, count: int, instance: str = "h1", **fields: Any) -> AuditFileWriter:
    files = AuditFileWriter(directory, instance, 1 << 30)
    files.append([AuditLine(at=audit.format_time(1.0 * n), what="x", **fields) for n in range(count)])
    return files


# --- the files


def test_a_log_is_for_its_owner_alone(tmp_path: Path):
    write(tmp_path / "audit", 1)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "audit").iterdir()}
    assert stat.S_IMODE((tmp_path / "audit").stat().st_mode) == 0o700
    assert set(modes.values()) == {0o600}


@pytest.mark.parametrize("change", ["changed", "removed", "swapped", "added"])
def test_a_line_that_was_tampered_with_is_found(tmp_path: Path, change: str):
    write(tmp_path, 5, owner="alice")
    (file,) = tmp_path.glob("*.jsonl")
    lines = file.read_text().splitlines(keepends=True)
    if change == "changed":
        lines[2] = lines[2].replace("alice", "bobby")
    elif change == "removed":
        del lines[2]
    elif change == "swapped":
        lines[1], lines[2] = lines[2], lines[1]
    else:
        lines.insert(2, lines[1])
    assert verify_log(tmp_path, alive).problems == ()
    file.write_text("".join(lines))
    assert verify_log(tmp_path, alive).problems


@pytest.mark.parametrize("removed", ["h1", "h2", "h3"])
def test_all_lines_of_a_process_cannot_be_removed_unseen(tmp_path: Path, removed: str):
    one = write(tmp_path, 2, "h1")
    write(tmp_path, 3, "h2")
    one.append([AuditLine(at="", what="x")])
    write(tmp_path, 1, "h3")
    write(tmp_path, 1, "h4")
    assert verify_log(tmp_path, alive).problems == ()
    (file,) = tmp_path.glob("*.jsonl")
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if f'"instance":"{removed}"' not in line))
    assert verify_log(tmp_path, alive).problems


def test_a_file_with_all_lines_of_a_process_cannot_be_removed_unseen(tmp_path: Path):
    for name, count in (("2026-01-01", 2), ("2026-01-02", 3), ("2026-01-03", 1)):
        write(tmp_path, count, "h" + name)
        (tmp_path / str(audit.list_files(tmp_path)[-1])).rename(tmp_path / f"{name}.jsonl")
    assert verify_log(tmp_path, alive).problems == ()
    (tmp_path / "2026-01-02.jsonl").unlink()
    assert len(verify_log(tmp_path, alive).problems) == 1


@pytest.mark.parametrize("foreign", ['{"at":"","what":"x"}', '{"at":"","what":"x","n":-5,"instance":"h1"}', "{}", "x"])
def test_a_line_that_no_process_wrote_is_named_and_spoils_no_other(tmp_path: Path, foreign: str):
    files = write(tmp_path, 3)
    (file,) = tmp_path.glob("*.jsonl")
    file.write_text(file.read_text() + foreign + "\n")
    files.append([AuditLine(at="", what="y")])
    write(tmp_path, 2, "h2")
    (problem,) = verify_log(tmp_path, alive).problems
    assert problem.startswith(f"{file.name}:4: no process of Cloche has written this")


def test_a_file_that_was_removed_is_found_unless_the_log_says_so(tmp_path: Path):
    files = write(tmp_path, 3)
    next(tmp_path.glob("*.jsonl")).unlink()
    files.append([AuditLine(at="", what="y")])
    assert "3 lines of h1 are not there" in verify_log(tmp_path, alive).problems[0]
    files.append([audit.removal_line(audit.PrunableFile("2026-01-01.jsonl", 1, "its days are over"))])
    assert verify_log(tmp_path, alive).problems == ()


def test_processes_append_at_once_and_every_line_is_whole(tmp_path: Path):
    program = """
import sys; from pathlib import Path; from cloche.store.audit import *
files = AuditFileWriter(Path(sys.argv[1]), sys.argv[2], 1 << 20)
for n in range(100): files.append([AuditLine(at="", what="x", about="y" * 900)] * 3)
files.append([AuditLine(at="", what=CLOSED_EVENT)])"""
    writers = [subprocess.Popen([sys.executable, "-c", program, tmp_path, f"h{n}"]) for n in range(3)]
    assert [each.wait(60) for each in writers] == [0, 0, 0]
    verdict = verify_log(tmp_path, lambda name: False)
    assert (verdict.lines, verdict.problems, verdict.notes) == (3 * 301, (), ())
    assert verdict.files > 1  # a full one is followed by the next


def test_a_process_killed_within_a_line_spoils_that_line_only(tmp_path: Path):
    write(tmp_path, 2)
    (file,) = tmp_path.glob("*.jsonl")
    os.truncate(file, file.stat().st_size - 5)
    write(tmp_path, 2, "h2")
    assert len(said(tmp_path)) == 3
    assert len(verify_log(tmp_path, alive).problems) == 1


def test_a_batch_that_does_not_fit_on_the_disk_leaves_nothing_behind(tmp_path: Path):
    """A limit on the size of files, which cuts a write short as a full disk does."""
    program = """
import resource, signal, sys; from pathlib import Path; from cloche.store.audit import *
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
files = AuditFileWriter(Path(sys.argv[1]), "h1", 1 << 20)
files.append([AuditLine(at="", what="x")])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
try: files.append([AuditLine(at="", what="y")] * 100)
except OSError as error: print(error.strerror)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
files.append([AuditLine(at="", what="z")])"""
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True)
    assert done.stdout == "File too large\n", done.stderr
    assert [line.what for line in said(tmp_path)] == ["x", "z"]
    assert verify_log(tmp_path, alive).problems == ()


def test_a_batch_that_the_disk_does_not_confirm_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = write(tmp_path, 2)

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="Input/output"):
            files.append([AuditLine(at="", what="y")], sync=True)
    files.append([AuditLine(at="", what="y")], sync=True)
    assert [line.what for line in said(tmp_path)] == ["x", "x", "y"]
    assert verify_log(tmp_path, alive).problems == ()


def test_old_files_are_removed_and_the_newest_stays_at_any_size(tmp_path: Path):
    for name in ("2020-01-01.jsonl", "2020-01-01.1.jsonl", "2020-01-02.jsonl"):
        (tmp_path / name).write_bytes(b"x" * 1000)
    write(tmp_path, 1)
    assert len(audit.find_prunable(tmp_path, 90, 1 << 20)) == 3
    assert [each.why for each in audit.prune_old(tmp_path, 1e6, 2000)] == [audit.TOO_MUCH_REASON] * 2
    assert [each.name for each in audit.prune_old(tmp_path, 90, 1 << 20)] == ["2020-01-02.jsonl"]
    assert [path.name for path in tmp_path.glob("*.jsonl")] == [str(audit.list_files(tmp_path)[0])]


def test_a_name_can_be_forgotten_and_the_chain_holds(tmp_path: Path):
    files = write(tmp_path, 3, owner="alice", by="bob")
    assert audit.pseudonymize_owner(tmp_path, "alice") == 3
    files.append([AuditLine(at="", what="y", owner="alice")])
    assert audit.pseudonymize_owner(tmp_path, "alice") == 1
    assert {line.owner[0] for line in said(tmp_path)} == {"#"}
    assert len({line.owner for line in said(tmp_path)}) == 1
    assert verify_log(tmp_path, alive).problems == ()


# --- what was noted


async def noted(directory: Path, *work: Any, config: AuditConfig | None = None) -> AuditLog:
    audit_log = AuditLog()
    audit_log.open(AuditFileWriter(directory, "h1", 1 << 30), config or AuditConfig())
    for each in work:
        each(audit_log)
    await audit_log.aclose()
    return audit_log


async def test_a_flood_is_one_line_that_says_how_much_it_was(tmp_path: Path):
    def flood(audit_log: AuditLog) -> None:
        for _ in range(1000):
            audit_log.record("files.read", "alice", sandbox="s", bytes=2)

    await noted(tmp_path, flood)
    lines = said(tmp_path, what="files.read")
    assert (sum(line.count for line in lines), sum(line.bytes for line in lines)) == (1000, 2000)
    assert len(lines) == 1


async def test_a_flood_in_many_sandboxes_is_few_lines_and_others_are_told_one_by_one(tmp_path: Path):
    def flood(audit_log: AuditLog) -> None:
        for n in range(2000):
            audit_log.record("port.reached", "alice", sandbox=f"s{n}", about=str(n))
            if n % 500 == 0:
                audit_log.record("port.reached", "bob", sandbox="b", about="80", id=str(n))

    await noted(tmp_path, flood)
    of = {owner: said(tmp_path, owner=owner) for owner in ("alice", "bob")}
    assert sum(line.count for line in of["alice"]) == 2000
    assert len(of["alice"]) < MOST_LINES
    assert [line.id for line in of["bob"]] == ["0", "500", "1000", "1500"]
    assert FLOOD_ENTRIES > 4


def lines_of(owner: str, count: int, **fields: Any) -> list[AuditLine]:
    return [
        AuditLine(at=audit.format_time(1.0 * n), owner=owner, **{"what": "files.read", **fields}) for n in range(count)
    ]


@pytest.mark.parametrize("what", ["files.read", "sandbox.paused", "request.refused"])
def test_a_busy_owner_has_a_bounded_part_of_the_log_and_nothing_is_omitted(what: str):
    """Six kinds in each of four sandboxes, twice a second, for ten minutes."""
    ration, passed = ration_of.AuditRateLimit(), []
    for half in range(1200):
        flood = [
            each for n in range(4) for about in "abcdef" for each in lines_of("m", 1, sandbox=f"s{n}", about=about)
        ]
        for each in flood:
            each.what, each.count = what, 8
        passed += ration.filter_lines(flood, half / 2)
    passed += ration.filter_lines([], 600.0, whole=True)
    assert sum(line.count for line in passed) == 1200 * 24 * 8
    most = ration_of.BURST_LINES + 10 * (ration_of.LINES_PER_MINUTE + ration_of.MAX_HELD_KINDS + 1)
    assert len(passed) <= most


def test_a_ration_is_each_owners_and_admins_are_told_one_by_one():
    ration, many = ration_of.AuditRateLimit(), 3 * ration_of.BURST_LINES
    assert len(ration.filter_lines(lines_of("m", many), 0.0)) == ration_of.BURST_LINES
    assert len(ration.filter_lines(lines_of("m", many, what="admin.keys.read"), 0.0)) == many
    assert len(ration.filter_lines(lines_of("alice", 10), 0.0)) == 10
    assert len(ration.filter_lines(lines_of("m", 10), 1.0)) == ration_of.LINES_PER_MINUTE // 60
    assert ration.holds


def test_of_very_many_kinds_at_once_only_actions_are_recorded():
    ration = ration_of.AuditRateLimit()
    ration.filter_lines(lines_of("m", ration_of.BURST_LINES), 0.0)
    boxes = [each for n in range(1000) for each in lines_of("m", 1, sandbox=str(n), bytes=3)]
    held = ration.filter_lines(boxes, 0.0, whole=True)
    assert (len(held), sum(line.count for line in held), sum(line.bytes for line in held)) == (
        ration_of.MAX_HELD_KINDS + 1,
        1000,
        3000,
    )
    assert not ration.holds


async def test_held_lines_are_in_the_file_before_a_full_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As an erasure does, before the log forgets a name."""
    monkeypatch.setattr(ration_of, "BURST_LINES", 1)
    audit_log = AuditLog()
    audit_log.open(AuditFileWriter(tmp_path, "h1", 1 << 30), AuditConfig())
    for n in range(3):
        audit_log.record("port.reached", "alice", id=str(n))
    await audit_log.wait_flushed()
    assert [(line.id, line.count) for line in said(tmp_path, owner="alice")] == [("0", 1), ("", 2)]
    await audit_log.aclose()


async def test_a_log_that_is_full_gives_up_its_oldest_file_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ration_of, "BURST_LINES", 1 << 20)
    most = 1 << 20
    audit_log = AuditLog()
    audit_log.open(AuditFileWriter(tmp_path, "h1", most), AuditConfig(max_bytes=most))
    for n in range(40):
        for _ in range(trails.FLOOD_ENTRIES):
            audit_log.record("x", "alice", sandbox=str(n), about="y" * 5000)
        await audit_log.wait_flushed()
        assert sum(path.stat().st_size for path in tmp_path.glob("*.jsonl")) <= most
    await audit_log.aclose()
    assert said(tmp_path, what=audit.REMOVED_EVENT)
    assert verify_log(tmp_path, alive).problems == ()


async def test_an_execution_is_one_line_if_it_was_short_and_else_its_start_is_told_at_once(tmp_path: Path):
    audit_log = AuditLog()
    audit_log.open(AuditFileWriter(tmp_path, "h1", 1 << 30), AuditConfig())
    for what, id in ((trails.STARTED, "a"), (trails.ENDED, "a"), (trails.STARTED, "b")):
        audit_log.record(what, "alice", sandbox="s", id=id)
    await audit_log.wait_flushed()
    audit_log.record(trails.ENDED, "alice", sandbox="s", id="b")
    await audit_log.aclose()
    told = [(line.what, line.id, bool(line.until)) for line in said(tmp_path, what="execution")]
    assert told == [(trails.ENDED, "a", True), (trails.STARTED, "b", False), (trails.ENDED, "b", False)]


async def test_each_line_names_owner_and_key(tmp_path: Path):
    def by(principal: Principal | None) -> Any:
        def work(audit_log: AuditLog) -> None:
            if principal is not None:
                set_current_principal(principal)
            audit_log.record("x", "alice")
            audit_log.record("y", "alice", itself=True)

        return work

    async def in_a_task(audit_log: AuditLog, *works: Any) -> None:
        for work in works:
            await asyncio.create_task(_call(work, audit_log))

    audit_log = AuditLog()
    audit_log.open(AuditFileWriter(tmp_path, "h1", 1 << 30), AuditConfig())
    await in_a_task(audit_log, by(None), by(Principal(owner="bob", key_id="k1")), by(Principal(owner="bob")))
    await audit_log.aclose()
    assert [(line.by, line.key) for line in said(tmp_path, what="x")] == [
        ("", trails.TOKEN),
        ("bob", "k1"),
        ("bob", trails.LOCAL),
    ]
    assert {line.key for line in said(tmp_path, what="y")} == {trails.SERVER}


async def test_of_a_sandboxs_own_token_it_says_which_key_the_sandbox_was_made_with(tmp_path: Path):
    audit_log = AuditLog()
    audit_log.open(AuditFileWriter(tmp_path, "h1", 1 << 30), AuditConfig())
    noted = audit_log.of("i1", "alice", "k1")
    noted("x")
    noted("x", who=Principal(owner="bob", key_id="k2"))
    audit_log.of("i2", "alice")("x")
    await audit_log.aclose()
    found = [(line.by, line.key) for line in said(tmp_path, what="x")]
    assert found == [("", "sandbox-token:k1"), ("bob", "k2"), ("", "sandbox-token")]


async def _call(work: Any, audit_log: AuditLog) -> None:
    work(audit_log)


async def test_a_full_disk_is_reported_and_missed_lines_are_written_later(tmp_path: Path):
    """A file in the directory's place, as an admin's rights pass every mode."""
    place = tmp_path / "audit"
    place.write_text("")
    audit_log = AuditLog()
    audit_log.open(AuditFileWriter(place, "h1", 1 << 30), AuditConfig())
    for n in range(3):
        audit_log.record("sandbox.created", "alice", sandbox=str(n))
    await audit_log.wait_flushed()
    assert audit_log.failing
    place.unlink()
    await audit_log.aclose()
    assert audit_log.failing == ""
    assert [line.sandbox for line in said(place, what="sandbox.created")] == ["0", "1", "2"]


async def test_lost_lines_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trails, "MOST_ENTRIES", 10)
    place = tmp_path / "audit"
    place.write_text("")
    audit_log = AuditLog()
    audit_log.open(AuditFileWriter(place, "h1", 1 << 30), AuditConfig())
    for n in range(50):
        audit_log.record("sandbox.created", "alice", sandbox=str(n))
        await audit_log.wait_flushed()
    place.unlink()
    await audit_log.aclose()
    told = sum(line.count for line in said(place) if line.what in ("sandbox.created", trails.LINES_LOST))
    assert audit_log.lost > 0
    assert told == 50


async def test_where_it_is_off_nothing_is_written(tmp_path: Path):
    await noted(tmp_path, lambda audit_log: audit_log.record("x", "alice"), config=AuditConfig(enabled=False))
    assert list(tmp_path.iterdir()) == []


async def test_a_404_of_a_program_inside_is_no_refusal(tmp_path: Path):
    audit_log = AuditLog()
    audit_log.open(AuditFileWriter(tmp_path, "h1", 1 << 30), AuditConfig())
    for inside in (True, False):
        scope = {"method": "GET", "state": {"answered_inside": inside}}
        RequestAudit(audit_log).ended("e2b", scope, "-", 404)
    await audit_log.aclose()
    assert [line.about for line in said(tmp_path, what="request.refused")] == ["e2b"]


# --- a server


@pytest.fixture
def place(server_in_place: tuple[Path, RunningServer]) -> Path:
    return server_in_place[0]


@pytest.fixture
def own(server_in_place: tuple[Path, RunningServer]) -> RunningServer:
    return server_in_place[1]


def test_a_server_audits_actors_and_actions_without_contents(own: RunningServer, place: Path):
    admin = httpx2.Client(base_url=own.url, headers={"x-api-key": own.key}, timeout=60)
    made = admin.post("/admin/keys", json={"owner": "alice", "name": MARK}).json()
    with httpx2.Client(base_url=own.url, headers={"x-api-key": made["key"]}, timeout=60) as alice:
        box = alice.post("/api/v1/sandboxes", json={"metadata": {"m": MARK}}).json()["id"]
        alice.post(f"/api/v1/sandboxes/{box}/run", json={"code": f"'{MARK}'"})
        alice.put(f"/api/v1/sandboxes/{box}/files/content?path=/mnt/data/{MARK}", content=MARK.encode())
        snapshot = alice.post(f"/api/v1/sandboxes/{box}/snapshots", json={"name": MARK}).json()["id"]
        alice.get(f"/api/v1/snapshots/{snapshot}")
        alice.delete(f"/api/v1/snapshots/{snapshot}")
        alice.post(f"/api/v1/sandboxes/{box}/pause", json={})
        alice.post(f"/api/v1/sandboxes/{box}/resume", json={})
        file = alice.post("/v1/files", data={"purpose": "user_data"}, files={"file": (MARK, MARK.encode())}).json()
        alice.get(f"/v1/files/{file['id']}/content")
        alice.delete(f"/v1/files/{file['id']}")
        alice.post("/v1/responses", json={"model": "cloche/echo", "input": MARK})
        alice.get(f"/api/v1/sandboxes/{MARK}")
        alice.delete(f"/api/v1/sandboxes/{box}")
    httpx2.get(f"{own.url}/api/v1/sandboxes", headers={"x-api-key": MARK})
    admin.delete(f"/admin/keys/{made['id']}")

    def lines(**query: str) -> list[dict[str, Any]]:
        return list(admin.get("/admin/audit", params=query).json()["lines"])

    wait_until(lambda: any(line["what"] == "admin.keys.removed" for line in lines()))
    by_alice = [line["what"] for line in lines(owner="alice") if line.get("key") == made["id"]]
    by_alice = [what for what in by_alice if what != trails.STARTED]  # a line of its own for those that take long
    assert by_alice == [
        "sandbox.created",
        "execution.ended",
        "files.written",
        "snapshot.made",
        "snapshots.read",
        "snapshot.removed",
        "sandbox.paused",
        "sandbox.resumed",
        "gateway.files.made",
        "gateway.files.content.read",
        "gateway.files.removed",
        "gateway.responses.made",
        "request.refused",
        "sandbox.ended",
    ]
    of_box = lines(sandbox=box, what="sandbox")
    assert [(line["what"], line.get("outcome")) for line in of_box][-1] == ("sandbox.ended", "killed")
    of_key = [(line["what"], line["by"]) for line in lines(what="key", owner="alice") if line["id"] == made["id"]]
    assert of_key == [("key.made", "local"), ("key.revoked", "local")]
    refused = [(line.get("key"), line["outcome"]) for line in lines(what="request.refused")]
    assert {(made["id"], "404"), ("none", "401")} <= set(refused)
    assert MARK not in "".join(path.read_text() for path in (place / "audit").glob("*.jsonl"))


def test_the_command_shows_it_and_says_that_it_is_whole(own: RunningServer, place: Path):
    def cloche(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([CLOCHE, "--data-dir", place, *words], capture_output=True, text=True)

    shown = cloche("audit", "--owner", "alice", "--what", "sandbox", "--since", "1h").stdout.splitlines()
    assert [line.split()[1] for line in shown][:1] == ["sandbox.created"]
    as_json = [json.loads(line) for line in cloche("audit", "--json", "--limit", "2").stdout.splitlines()]
    assert [line["n"] for line in as_json][1] == as_json[0]["n"] + 1
    assert cloche("audit", "verify").returncode == 0
    assert "give 30m" in cloche("audit", "--since", "yesterday").stderr


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "colour=red", *(f"since={each}" for each in NO_MOMENTS)])
def test_a_filter_that_is_none_is_refused(own: RunningServer, query: str):
    answer = httpx2.get(f"{own.url}/admin/audit?{query}", headers={"x-api-key": own.key})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")


@pytest.mark.long
async def remember(data_dir: Path, *sandboxes: str) -> None:
    """A host process of that data directory, long dead, had these running sandboxes of bob's."""
    records = SqliteSandboxRecords(data_dir / "store.sqlite3")
    await records.open()
    for id in sandboxes:
        spec = SandboxSpec(owner="bob", template="python@1")
        records.put(SandboxRecord(id=id, spec=spec, state="running", instance="hdead", created_at=1.0))
    await records.aclose()


def test_a_server_whose_log_cannot_be_written_goes_on_and_says_so(own_data_dir: Path):
    """And once it can be, it also tells which sandboxes were lost with a server that died."""
    asyncio.run(remember(own_data_dir, "ilost1", "ilost2"))
    (own_data_dir / "audit").write_text("")
    with serving(own_data_dir) as running:
        headers = {"x-api-key": running.key}

        def metric(name: str) -> str:
            lines = httpx2.get(f"{running.url}/metrics").text.splitlines()
            return next(line.split()[1] for line in lines if line.startswith(name))

        wait_until(lambda: httpx2.get(f"{running.url}/health").json().get("audit") == "failing")
        assert metric("cloche_audit_failing ") == "1.0"
        made = httpx2.post(f"{running.url}/api/v1/sandboxes", headers=headers, json={}, timeout=60)
        assert made.status_code == 201
        (own_data_dir / "audit").unlink()
        wait_until(lambda: "audit" not in httpx2.get(f"{running.url}/health").json())
        assert [line.sandbox for line in said(own_data_dir / "audit", what="sandbox.created")] == [made.json()["id"]]
        assert metric("cloche_audit_lost_total ") == "0.0"
    lines = said(own_data_dir / "audit")
    assert lines[-1].what == audit.CLOSED_EVENT
    lost = [line for line in lines if line.outcome == "lost"]
    assert [(line.what, line.owner, line.sandbox, line.key) for line in lost] == [
        ("sandbox.ended", "bob", "ilost1", "server"),
        ("sandbox.ended", "bob", "ilost2", "server"),
    ]
