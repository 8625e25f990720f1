"""How much of sandboxes is kept, and that what is asked for at once ends well."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from cloche import errors
from cloche.config import Config, Kept, Pool
from cloche.engine import lasting
from cloche.engine.engine import Engine
from cloche.model import SandboxSpec

pytestmark = pytest.mark.asyncio(loop_scope="session")

Opening = Callable[[Config], Engine]
ME = "local"


@pytest.fixture
def few(own_config: Config) -> Config:
    """One of each may be kept."""
    return msgspec.structs.replace(own_config, pool=Pool(ready=0), kept=Kept(paused=1, snapshots=1))


async def test_there_is_an_end_to_paused_sandboxes_and_snapshots(opening: Opening, few: Config):
    async with opening(few) as engine:
        first, second = await engine.create(SandboxSpec()), await engine.create(SandboxSpec())
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
        assert list(Path(few.data_dir, "images").iterdir()) == []


async def test_snapshots_have_so_many_bytes(opening: Opening, own_config: Config):
    config = msgspec.structs.replace(own_config, pool=Pool(ready=0), kept=Kept(snapshot_bytes=1))
    async with opening(config) as engine:
        box = await engine.create(SandboxSpec())
        first = await engine.snapshot(box.id, ME)
        with pytest.raises(errors.InvalidRequest, match="remove some first"):
            await engine.snapshot(box.id, ME)
        await engine.snapshots.remove(first.id, ME)


async def test_a_paused_sandbox_is_given_up_after_a_while(
    opening: Opening, own_config: Config, monkeypatch: pytest.MonkeyPatch
):
    config = msgspec.structs.replace(own_config, pool=Pool(ready=0), kept=Kept(paused_seconds=0.01))
    monkeypatch.setattr(lasting, "SWEEP_SECONDS", 0.05)
    async with opening(config) as engine:
        box = await engine.create(SandboxSpec())
        await engine.pause(box.id, ME, memory=False)
        ends_at = time.monotonic() + 30
        while (await engine.describe(box.id, ME)).state == "paused" and time.monotonic() < ends_at:
            await asyncio.sleep(0.02)
        with pytest.raises(errors.SandboxExpired, match="paused for longer"):
            await engine.resume(box.id, ME)
        assert engine.list(ME) == [] and list(Path(config.data_dir, "images").iterdir()) == []


async def test_whoever_resumes_while_it_leaves_its_cell_gets_it(engine: Engine):
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
