"""Sandboxes that are paused and resumed: nothing is lost."""

from __future__ import annotations

import asyncio
import time

import pytest

from cloche import errors
from cloche.engine.engine import Engine
from cloche.model import SandboxSpec

pytestmark = pytest.mark.asyncio(loop_scope="session")

OWNER = "ann"


def spec(**fields: object) -> SandboxSpec:
    return SandboxSpec(owner=OWNER, **fields)  # type: ignore[arg-type]


async def test_memory_and_files_are_as_they_were(engine: Engine) -> None:
    box = await engine.create(spec(env={"A": "1"}))
    await box.context().execute("x = 41; open('f', 'w').write('kept')").result()
    info = await engine.pause(box.id, OWNER)
    assert (info.state, info.pause_memory) == ("paused", True) and info.paused_at is not None
    with pytest.raises(errors.SandboxPaused, match="resume it"):
        await engine.get(box.id, OWNER)
    with pytest.raises(errors.SandboxPaused):
        await engine.pause(box.id, OWNER)
    again = await engine.resume(box.id, OWNER)
    assert again is box
    run = await box.context().execute("x + 1, open('f').read()").result()
    assert run.text == "(42, 'kept')"
    assert box.info.state == "running"


async def test_without_memory_files_and_settings_are_kept(engine: Engine) -> None:
    box = await engine.create(spec(env={"A": "1"}, metadata={"m": "v"}, notes={"n": "w"}))
    await box.context().execute("x = 41; open('f', 'w').write('kept')").result()
    await engine.pause(box.id, OWNER, memory=False)
    assert [each.state for each in engine.list(OWNER) if each.id == box.id] == ["paused"]
    again = await engine.resume(box.id, OWNER)
    assert again is not box and again.id == box.id
    run = await again.context().execute("import os; 'x' in globals(), os.environ['A'], open('f').read()").result()
    assert run.text == "(False, '1', 'kept')"
    assert (again.info.metadata, again.info.notes) == ({"m": "v"}, {"n": "w"})
    assert again.info.created_at == box.info.created_at


async def test_a_paused_execution_continues_and_its_clock_stops(engine: Engine) -> None:
    box = await engine.create(spec())
    code = "import time\nfor n in range(20): time.sleep(0.05)\n'done'"
    running = asyncio.create_task(box.context().execute(code, timeout_seconds=5).result())
    await asyncio.sleep(0.1)
    await engine.pause(box.id, OWNER)
    await asyncio.sleep(0.2)  # a program that went on would come closer to its end
    assert not running.done()
    await engine.resume(box.id, OWNER)
    assert (await running).text == "'done'"


async def test_a_deadline_can_mean_a_pause_and_use_can_wake(engine: Engine) -> None:
    box = await engine.create(spec(lifetime_seconds=0.3, on_deadline="pause", auto_resume=True))
    await box.context().execute("x = 1").result()
    while engine.list(OWNER) and (await engine.describe(box.id, OWNER)).state == "running":
        await asyncio.sleep(0.02)
    assert (await engine.describe(box.id, OWNER)).state == "paused"
    woken = await engine.get(box.id, OWNER)
    assert (await woken.context().execute("x").result()).text == "1"
    assert woken.record.deadline_at is not None and woken.record.deadline_at > time.time()


@pytest.mark.parametrize("memory", [True, False])
async def test_a_paused_sandbox_can_be_killed(engine: Engine, memory: bool) -> None:
    box = await engine.create(spec())
    await engine.pause(box.id, OWNER, memory=memory)
    await engine.kill(box.id, OWNER)
    with pytest.raises(errors.SandboxKilled):
        await engine.resume(box.id, OWNER)
    assert box.id not in {each.id for each in engine.list(OWNER)}


async def test_other_owners_cannot_pause_or_resume_it(engine: Engine) -> None:
    box = await engine.create(spec())
    await engine.pause(box.id, OWNER, memory=False)
    for act in (engine.pause, engine.resume, engine.kill, engine.snapshot, engine.fork, engine.get, engine.describe):
        with pytest.raises(errors.SandboxNotFound):
            await act(box.id, "bob")


async def test_a_snapshot_makes_new_sandboxes(engine: Engine) -> None:
    box = await engine.create(spec(env={"A": "1"}))
    await box.context().execute("open('f', 'w').write('then')").result()
    snapshot = await engine.snapshot(box.id, OWNER, name="after-load")
    await box.context().execute("open('f', 'w').write('later')").result()
    for ref in (snapshot.id, "after-load"):
        made = await engine.create(spec(template=ref))
        run = await made.context().execute("import os; open('f').read(), os.environ['A']").result()
        assert run.text == "('then', '1')"
    with pytest.raises(errors.TemplateNotFound):
        await engine.create(SandboxSpec(template=snapshot.id, owner="bob"))
    assert [each.id for each in await engine.snapshots.list(OWNER)] == [snapshot.id]
    await engine.snapshots.remove(snapshot.id, OWNER)
    with pytest.raises(errors.SnapshotNotFound):
        await engine.snapshots.remove(snapshot.id, OWNER)


@pytest.mark.parametrize("paused", ["no", "memory", "files"])
async def test_forks_have_its_files_and_are_on_their_own(engine: Engine, paused: str) -> None:
    box = await engine.create(spec())
    await box.context().execute("open('f', 'w').write('shared')").result()
    if paused != "no":
        await engine.pause(box.id, OWNER, memory=paused == "memory")
    forks = await engine.fork(box.id, OWNER, 2)
    for number, fork in enumerate(forks):
        assert not isinstance(fork, errors.ClocheError)
        run = await fork.context().execute(f"was = open('f').read(); open('f', 'w').write('{number}'); was").result()
        assert run.text == "'shared'"
    again = await engine.resume(box.id, OWNER)
    assert (await again.context().execute("open('f').read()").result()).text == "'shared'"
