"""Builds of templates, and what is kept of them, have an end; what is removed is in no file any more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from cloche import errors
from cloche.config import Config, PoolConfig
from cloche.engine.builds import builds
from cloche.engine.builds.build import KEPT_LOG_BYTES, BuildLog, BuildPlan, BuildStep, expand_variables, record_or_undo
from cloche.engine.engine import Engine
from cloche.model import Limits, SandboxSpec, Snapshot, new_id
from cloche.store import builds as template_builds
from cloche.store import database
from cloche.store.base import PausedFiles, SandboxRecord
from cloche.store.builds import BuildLogEntry, StoredBuilds, TemplateBuild
from cloche.store.sandboxes import SqliteSandboxRecords
from cloche.store.snapshots import StoredSnapshots

pytestmark = pytest.mark.asyncio(loop_scope="session")

ME = "local"
SECRET = "a-secret-that-is-nowhere-else"


@pytest_asyncio.fixture(loop_scope="session")
async def records(tmp_path: Path) -> AsyncIterator[SqliteSandboxRecords]:
    records = SqliteSandboxRecords(tmp_path / "store.sqlite3")
    await records.open()
    yield records
    await records.aclose()


async def test_a_text_is_expanded_as_far_as_it_may_be():
    known = {"A": "x" * 1000, "EMPTY": ""}
    assert expand_variables("5$ $A${EMPTY}$NONE", known, 2000) == "5$ " + "x" * 1000 + "$NONE"
    assert expand_variables("$A" * 2, known, 2000) == "x" * 2000
    for text in ("$A" * 1_000_000, "$A$A.", "y" * 2001, "$EMPTY" + "y" * 2001):
        with pytest.raises(errors.TemplateBuildFailed, match="more than 2000 bytes"):
            expand_variables(text, known, 2000)


# -- what is removed


def a_snapshot(**fields) -> Snapshot:
    made = Snapshot(
        id=new_id("s"), owner=ME, sandbox="i", template="python@1", image=new_id("i"), bytes=1, created_at=time.time()
    )
    return msgspec.structs.replace(made, env={"KEY": SECRET}, **fields)


def a_record(**fields) -> SandboxRecord:
    spec = SandboxSpec(owner=ME, template="python@1", env={"KEY": SECRET})
    record = SandboxRecord(id="i1", spec=spec, state="running", instance="here", created_at=1.0)
    return msgspec.structs.replace(record, **fields)


def a_build(**fields) -> TemplateBuild:
    now = time.time()
    build = TemplateBuild(
        id=new_id("b"), template="", owner=ME, tags=("default",), limits=Limits(), created_at=now, updated_at=now
    )
    return msgspec.structs.replace(build, **fields)


async def remove_a_snapshot(records: SqliteSandboxRecords) -> None:
    store, snapshot = StoredSnapshots(records.database), a_snapshot()
    await store.add(snapshot)
    await store.remove(snapshot.id, ME)


async def wake_one(records: SqliteSandboxRecords) -> None:
    records.put(a_record(state="paused", files=PausedFiles(image="x")))
    await records.get("i1")
    records.put(a_record())


async def kill_a_paused_one(records: SqliteSandboxRecords) -> None:
    await records.keep(a_record(state="paused", files=PausedFiles(image="x")))
    assert await records.conclude(a_record(state="killed", ended_at=time.time()))


async def remove_a_template(records: SqliteSandboxRecords) -> None:
    store, build, snapshot = StoredBuilds(records.database), a_build(), a_snapshot()
    template = await store.request("t", build)
    ready = msgspec.structs.replace(build, template=template.id, state="ready", snapshot=snapshot.id)
    assert await store.finish(ready, snapshot) == []
    assert await store.remove(template.id) == [snapshot.image]


@pytest.mark.parametrize("remove", [remove_a_snapshot, wake_one, kill_a_paused_one, remove_a_template])
async def test_the_environment_of_a_removed_build_is_soon_in_no_file(
    records: SqliteSandboxRecords, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remove: Callable
):
    monkeypatch.setattr(database, "SCRUB_SECONDS", 0.05)
    await remove(records)
    ends_at = time.monotonic() + 10
    while holds_secret(tmp_path) and time.monotonic() < ends_at:
        await asyncio.sleep(0.02)
    assert not holds_secret(tmp_path)


def holds_secret(place: Path) -> bool:
    return any(SECRET.encode() in file.read_bytes() for file in place.glob("store.sqlite3*"))


async def test_ordinary_records_do_not_empty_the_log(records: SqliteSandboxRecords):
    for state in ("running", "killed"):
        await records.keep(a_record(state=state))
    assert records.database._scrubbing is None


# -- how many


async def test_a_list_of_snapshots_has_no_environments(records: SqliteSandboxRecords):
    store, snapshot = StoredSnapshots(records.database), a_snapshot()
    await store.add(snapshot)
    (listed,) = await store.list(ME)
    assert listed == msgspec.structs.replace(snapshot, env={}) and await store.find(snapshot.id, ME) == snapshot


async def test_the_logs_of_a_build_are_read_with_it_alone_and_go_with_it(records: SqliteSandboxRecords):
    store, build = StoredBuilds(records.database), a_build()
    template = await store.request("t", build)
    said = (BuildLogEntry(at=1.0, level="info", message="hello"),)
    begun = msgspec.structs.replace(build, template=template.id, state="building", instance="here")
    assert await store.begin(begun) and not await store.begin(begun)
    failed = msgspec.structs.replace(begun, state="error", logs=said)
    await store.put(failed)
    await store.put(msgspec.structs.replace(failed, logs=()))  # it has ended already
    assert await store.build(build.id, ME) == failed
    assert await store.builds(template.id) == [msgspec.structs.replace(failed, logs=())]
    await store.remove(template.id)
    count = "SELECT COUNT(*) FROM template_build_logs"
    assert await records.database.do(lambda db: db.execute(count).fetchone()) == (0,)


async def test_a_stored_log_is_small_however_short_its_lines_are():
    said = BuildLog()
    for _ in range(9000):
        said.output("", "stdout", "1")
    assert len(msgspec.json.encode(said.last())) < 2 * KEPT_LOG_BYTES


async def test_a_template_and_an_owner_have_so_many_tags(
    records: SqliteSandboxRecords, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(template_builds, "MAX_TAGS", 3)
    monkeypatch.setattr(template_builds, "MAX_OWNER_TAGS", 4)
    store = StoredBuilds(records.database)
    ids = []
    for name in ("one", "two"):
        build, snapshot = a_build(), a_snapshot()
        ids.append((await store.request(name, build)).id)
        ready = msgspec.structs.replace(build, template=ids[-1], state="ready", snapshot=snapshot.id)
        await store.finish(ready, snapshot)
    assert await store.assign(ids[0], ["a", "b"], "default") is not None
    with pytest.raises(errors.InvalidRequest, match="a template can have 3 tags"):
        await store.assign(ids[0], ["c"], "default")
    with pytest.raises(errors.InvalidRequest, match="your templates can have 4 tags"):
        await store.assign(ids[1], ["c"], "default")
    assert await store.tag_names(ids[0], 10) == ["a", "b", "default"]
    assert await store.assign(ids[0], ["a"], "default") is not None  # it is there already
    assert await store.assign(ids[0], ["a"], "gone") is None


async def test_an_owner_has_so_many_builds(records: SqliteSandboxRecords, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(template_builds, "MAX_BUILDS", 2)
    store = StoredBuilds(records.database)
    asked = await asyncio.gather(*(store.request(f"t{n}", a_build()) for n in range(4)), return_exceptions=True)
    assert [isinstance(each, errors.InvalidRequest) for each in asked] == [False, False, True, True]
    assert [each.name for each in await store.templates(ME)] == ["t0", "t1"]


async def test_many_that_are_started_at_once_are_not_more_than_may_wait(
    opening: Callable[[Config], Engine], own_config: Config, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(builds, "MAX_WAITING_BUILDS", 2)
    async with opening(msgspec.structs.replace(own_config, pool=PoolConfig(ready=0))) as engine:
        asked = [await engine.builds.request(f"waits-{number}", [], ME, Limits()) for number in range(5)]
        plan = BuildPlan(base="python", steps=(BuildStep(kind="RUN", args=("sleep 1000",)),))
        started = await asyncio.gather(
            *(engine.builds.start(build, plan) for _, build in asked), return_exceptions=True
        )
        assert sum(isinstance(each, errors.InvalidRequest) for each in started) == 3
        for template, _ in asked:
            await engine.builds.remove(template)


# -- whoever leaves


@pytest.mark.parametrize("fails", [False, True])
async def test_a_recorded_build_is_not_undone_by_a_disconnect(fails: bool):
    undone: list[bool] = []
    begun = asyncio.Event()

    async def work() -> None:
        begun.set()
        await asyncio.sleep(0.01)
        if fails:
            raise errors.Unavailable("no")

    async def undo() -> None:
        undone.append(True)

    waiting = asyncio.create_task(record_or_undo(work(), undo))
    await begun.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert undone == [True] * fails
