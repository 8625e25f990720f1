"""How much of sandboxes is kept, and that what is asked for at once ends well."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tests.conftest import with_template

from cloche import errors
from cloche.config import Config, PoolConfig, RetentionLimits
from cloche.engine.engine import Engine
from cloche.engine.pauses import pause
from cloche.model import SandboxSpec, Template

pytestmark = pytest.mark.asyncio(loop_scope="session")

Opening = Callable[[Config], Engine]
ME = "local"


@pytest.fixture
def own_config(own_config: Config, template: Template, tmp_path: Path) -> Config:
    """With a data directory in which nobody else leaves anything."""
    return msgspec.structs.replace(own_config, data_dir=str(with_template(tmp_path / "kept", template)))


@pytest.fixture
def few(own_config: Config) -> Config:
    """One of each may be kept."""
    return msgspec.structs.replace(own_config, pool=PoolConfig(ready=0), kept=RetentionLimits(paused=1, snapshots=1))


async def gone(config: Config, unneeded: set[str]) -> None:
    """Images that nobody needs are removed a moment later, when nobody waits for it."""
    ends_at = time.monotonic() + 30
    while images(config) & unneeded and time.monotonic() < ends_at:
        await asyncio.sleep(0.02)
    assert not images(config) & unneeded


async def test_there_is_an_end_to_paused_sandboxes_and_snapshots(opening: Opening, few: Config):
    async with opening(few) as engine:
        first, second, before = await engine.create(SandboxSpec()), await engine.create(SandboxSpec()), images(few)
        for memory in (True, False):
            await engine.pause(first.id, ME, memory=memory)
            with pytest.raises(errors.InvalidRequest, match="kill or resume one first"):
                await engine.pause(second.id, ME)
            assert second.record.state == "running"
            first = await engine.resume(first.id, ME)
        await engine.snapshot(second.id, ME)
        with pytest.raises(errors.InvalidRequest, match="remove some first"):
            await engine.snapshot(second.id, ME)
        (kept,) = await engine.snapshots.list(ME)
        await engine.snapshots.remove(kept.id, ME)
        await engine.snapshots.remove((await engine.snapshot(second.id, ME)).id, ME)
        await gone(few, images(few) - before)


async def test_snapshots_have_so_many_bytes(opening: Opening, own_config: Config):
    config = msgspec.structs.replace(own_config, pool=PoolConfig(ready=0), kept=RetentionLimits(snapshot_bytes=1))
    async with opening(config) as engine:
        box = await engine.create(SandboxSpec())
        first = await engine.snapshot(box.id, ME)
        with pytest.raises(errors.InvalidRequest, match="remove some first"):
            await engine.snapshot(box.id, ME)
        await engine.snapshots.remove(first.id, ME)


async def test_a_paused_sandbox_is_given_up_after_a_while(
    opening: Opening, own_config: Config, monkeypatch: pytest.MonkeyPatch
):
    config = msgspec.structs.replace(own_config, pool=PoolConfig(ready=0), kept=RetentionLimits(paused_seconds=0.01))
    monkeypatch.setattr(pause, "PAUSE_SWEEP_SECONDS", 0.05)
    async with opening(config) as engine:
        box = await engine.create(SandboxSpec())
        await engine.pause(box.id, ME, memory=False)
        ends_at = time.monotonic() + 30
        while (await engine.describe(box.id, ME)).state == "paused" and time.monotonic() < ends_at:
            await asyncio.sleep(0.02)
        with pytest.raises(errors.SandboxExpired, match="paused for longer"):
            await engine.resume(box.id, ME)
        assert engine.list(ME) == []
        await gone(config, images(config))


async def test_a_resume_while_it_leaves_its_cell_succeeds(engine: Engine):
    """And so do those who keep or fork it then."""
    box = await engine.create(SandboxSpec())
    await box.files.write("f", b"kept")
    pausing = asyncio.create_task(engine.pause(box.id, ME, memory=False))
    await asyncio.sleep(0)  # it has begun
    snapshot, forks = await asyncio.gather(engine.snapshot(box.id, ME), engine.fork(box.id, ME))
    again = await engine.resume(box.id, ME)
    assert (await pausing).state == "paused" and await again.files.read("f") == b"kept"
    for each in forks:
        assert not isinstance(each, errors.ClocheError)
        assert await each.files.read("f") == b"kept"
        await each.kill()
    await engine.snapshots.remove(snapshot.id, ME)
    await engine.kill(box.id, ME)


async def test_a_pause_whose_caller_left_is_whole(engine: Engine):
    box = await engine.create(SandboxSpec())
    pausing = asyncio.create_task(engine.pause(box.id, ME, memory=False))
    await asyncio.sleep(0)
    pausing.cancel()
    await asyncio.wait([pausing])
    await box.wait_ended()
    assert [each.state for each in engine.list(ME) if each.id == box.id] == ["paused"]
    assert (await engine.resume(box.id, ME)).record.state == "running"
    assert [each.state for each in engine.list(ME) if each.id == box.id] == ["running"]
    await engine.kill(box.id, ME)


async def test_many_at_once_are_not_more_than_there_may_be(opening: Opening, few: Config):
    async with opening(few) as engine:
        boxes = [await engine.create(SandboxSpec()) for _ in range(3)]
        made = await asyncio.gather(*(engine.snapshot(boxes[0].id, ME) for _ in range(4)), return_exceptions=True)
        assert sum(isinstance(each, errors.InvalidRequest) for each in made) == 3
        (kept,) = await engine.snapshots.list(ME)
        await asyncio.gather(*(engine.pause(each.id, ME) for each in boxes), return_exceptions=True)
        assert sorted(each.record.state for each in boxes) == ["paused", "running", "running"]
        await engine.snapshots.remove(kept.id, ME)


async def test_the_files_of_paused_sandboxes_have_so_many_bytes(opening: Opening, own_config: Config):
    config = msgspec.structs.replace(own_config, pool=PoolConfig(ready=0), kept=RetentionLimits(paused_bytes=1))
    async with opening(config) as engine:
        box, before = await engine.create(SandboxSpec()), images(config)
        with pytest.raises(errors.InvalidRequest, match="would take"):
            await engine.pause(box.id, ME)
        assert (await box.context().execute("6 * 7").result()).text == "42"
        assert images(config) == before


async def test_one_that_cannot_be_paused_at_its_deadline_does_not_run_for_ever(
    opening: Opening, own_config: Config, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pause, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(pause, "OVERTIME_SECONDS", -86400.0 + 0.4)
    config = msgspec.structs.replace(own_config, pool=PoolConfig(ready=0), kept=RetentionLimits(paused=0))
    async with opening(config) as engine:
        box = await engine.create(SandboxSpec(lifetime_seconds=0.1, on_deadline="pause"))
        await asyncio.wait_for(box.wait_ended(), 20)
        assert box.record.state == "expired"
        assert "could not be paused" in (box.record.end_reason or "")


async def test_a_host_that_ends_during_a_wake_loses_nothing(opening: Opening, own_config: Config):
    config = msgspec.structs.replace(own_config, pool=PoolConfig(ready=0))
    async with opening(config) as engine:
        box = await engine.create(SandboxSpec(metadata={"m": "kept"}))
        await box.context().execute("open('f', 'wb').write(bytes(50_000_000))").result()
        await engine.pause(box.id, ME, memory=False)
        waking = asyncio.create_task(engine.resume(box.id, ME))
        await asyncio.sleep(0.05)
    with pytest.raises(errors.ClocheError):
        await waking
        raise errors.ShuttingDown("it was awake already, and ended with its host")
    async with opening(config) as engine:
        info = await engine.describe(box.id, ME)
        if info.state == "paused":
            again = await engine.resume(box.id, ME)
            assert (await again.context().execute("len(open('f', 'rb').read())").result()).text == "50000000"
        else:
            assert waking.exception() is None


async def test_a_kill_during_a_resume_kills(engine: Engine):
    box = await engine.create(SandboxSpec())
    await engine.pause(box.id, ME, memory=False)
    waking = asyncio.create_task(engine.resume(box.id, ME))
    await asyncio.sleep(0)
    await engine.kill(box.id, ME)
    await asyncio.gather(waking, return_exceptions=True)
    assert (await engine.describe(box.id, ME)).state == "ended"
    assert box.id not in {each.id for each in engine.list(ME)}
    with pytest.raises(errors.SandboxKilled):
        await engine.kill(box.id, ME)


async def test_a_snapshot_whose_caller_left_leaves_no_image(opening: Opening, own_config: Config):
    config = msgspec.structs.replace(own_config, pool=PoolConfig(ready=0))
    async with opening(config) as engine:
        box, before = await engine.create(SandboxSpec()), images(config)
        asking = asyncio.create_task(engine.snapshot(box.id, ME))
        while images(config) == before and not asking.done():
            await asyncio.sleep(0)
        asking.cancel()
        (answer,) = await asyncio.gather(asking, return_exceptions=True)
        if not isinstance(answer, asyncio.CancelledError):  # it was made before its caller left
            await engine.snapshots.remove(answer.id, ME)
    assert images(config) == before


async def test_one_that_was_paused_before_is_kept_when_its_host_ends(opening: Opening, own_config: Config):
    config = msgspec.structs.replace(own_config, pool=PoolConfig(ready=0))
    async with opening(config) as engine:
        box, other = await engine.create(SandboxSpec()), await engine.create(SandboxSpec())
        await engine.pause(box.id, ME)
        await engine.resume(box.id, ME)
        await box.context().execute("open('f', 'w').write('later')").result()
    for _ in range(2):
        async with opening(config) as engine:
            again = await engine.resume(box.id, ME)
            assert (await again.context().execute("open('f').read()").result()).text == "'later'"
            with pytest.raises(errors.SandboxKilled):
                await engine.resume(other.id, ME)


async def test_one_that_is_paused_again_and_again_at_once_ends_when_it_is_killed(engine: Engine, config: Config):
    box = await engine.create(SandboxSpec())
    for memory in (True, False, True):
        await engine.pause(box.id, ME, memory=memory)
        await engine.resume(box.id, ME)
    await engine.kill(box.id, ME)
    await asyncio.sleep(3 * pause.REMOVE_IMAGE_SECONDS)  # all removals that were put off have come
    assert (await engine.describe(box.id, ME)).state == "ended"
    record = await engine.records.get(box.id)
    assert record is not None and (record.state, record.files) == ("killed", None)


def images(config: Config) -> set[str]:
    directory = Path(config.data_dir, "images")
    return {path.name for path in directory.iterdir()} if directory.is_dir() else set()
