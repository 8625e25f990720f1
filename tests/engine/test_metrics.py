"""What a sandbox uses is sampled while it lives, and no longer; its deadline can be moved in three ways."""

from __future__ import annotations

import asyncio
import time

import pytest

from cloche import errors
from cloche.engine.engine import Engine
from cloche.engine.operations import metrics
from cloche.engine.operations.metrics import Sample, SandboxMeter, measure_inside
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.isolation.base import CellStats
from cloche.model import Limits, SandboxSpec, new_id

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def until(true) -> None:
    deadline = time.monotonic() + 30
    while not await true():
        assert time.monotonic() < deadline, "it never became true"
        await asyncio.sleep(0.01)


async def nobody() -> CellStats:
    raise AssertionError("there was no need to ask")


async def at_least(meter: SandboxMeter, count: int) -> list[Sample]:
    """Its samples, once there are so many."""

    async def enough() -> bool:
        return len(await meter.samples_between()) >= count

    await until(enough)
    return await meter.samples_between()


@pytest.fixture
def often(monkeypatch):
    """Samples every few milliseconds, and keeps 32 of them."""
    monkeypatch.setattr(metrics, "SAMPLE_SECONDS", 0.002)
    monkeypatch.setattr(metrics, "_MAX_SAMPLES", 32)
    monkeypatch.setattr(metrics, "_DROPPED_AT_ONCE", 4)


async def test_concurrent_requests_get_one_sample(box: Sandbox):
    (sample,) = await box.meter.samples_between()
    assert await box.meter.latest_sample() == sample
    assert box.record.created_at <= sample.at <= time.time()
    assert 0 <= sample.cpu_percent <= 100


async def test_samples_are_kept_in_order_and_only_so_many(often):
    meter = SandboxMeter(lambda: CellStats(memory_bytes=1), nobody, Limits())
    first = (await at_least(meter, 28))[0].at

    async def forgotten() -> bool:
        return (await meter.samples_between())[0].at > first

    await until(forgotten)
    meter.close()
    samples = await meter.samples_between()
    assert len(samples) <= 32
    assert [each.at for each in samples] == sorted(each.at for each in samples)


async def test_a_sandbox_in_which_nothing_ran_is_not_read_again(often):
    used, read = [1.0], []

    def stats() -> CellStats:
        read.append(1)
        return CellStats(memory_bytes=100, file_bytes=30, shared_bytes=20, cpu_seconds=used[0], processes=2)

    meter = SandboxMeter(stats, nobody, Limits(), lambda: used[0])
    try:
        told = (await at_least(meter, 8))[1:]
        assert len(read) <= 2  # who asked first, and the first in turn
        assert {(each.memory_bytes, each.cache_bytes, each.space_bytes, each.cpu_percent) for each in told} == {
            (70, 10, 20, 0.0)
        }
        used[0] = 2.0

        async def again() -> bool:
            return len(read) > 2

        await until(again)
        assert (await meter.latest_sample()).cpu_percent > 0 or any(
            each.cpu_percent for each in await meter.samples_between()
        )
    finally:
        meter.close()


async def test_a_window_includes_its_ends(often):
    meter = SandboxMeter(lambda: CellStats(memory_bytes=1), nobody, Limits())
    await at_least(meter, 5)
    meter.close()
    samples = await meter.samples_between()
    assert await meter.samples_between(samples[1].at, samples[3].at) == samples[1:4]
    assert await meter.samples_between(end=samples[0].at - 1) == []
    assert await meter.samples_between(start=samples[-1].at + 1) == []


@pytest.mark.parametrize(
    ("memory", "files", "shared", "told"),
    [(1000, 600, 500, (400, 100, 500)), (10, 600, 900, (0, 0, 600)), (7, None, None, (7, 0, 0))],
)
async def test_memory_is_told_apart_from_caches_and_files_and_nothing_is_negative(memory, files, shared, told):
    stats = CellStats(memory_bytes=memory, file_bytes=files, shared_bytes=shared, cpu_seconds=1e9)
    meter = SandboxMeter(lambda: stats, nobody, Limits())
    meter.close()
    sample = await meter.latest_sample()
    assert (sample.memory_bytes, sample.cache_bytes, sample.space_bytes) == told
    assert sample.cpu_percent == 100


async def test_without_cgroups_init_is_asked(engine: Engine, box: Sandbox, often):
    if engine.config.backend == "plain-unsafe":
        pytest.skip("without a pid namespace, init would count the host's own processes")

    async def inside() -> CellStats:
        return await measure_inside(box._guest)

    await box.context().execute("open('/tmp/big', 'wb').write(bytes(30 << 20)); held = bytearray(40 << 20)").result()
    meter = SandboxMeter(CellStats, inside, Limits())
    samples = await at_least(meter, 3)
    meter.close()
    assert samples[-1].space_bytes >= 30 << 20
    assert 40 << 20 <= samples[-1].memory_bytes < 200 << 20
    assert 0 <= samples[-1].cpu_percent <= 100


async def test_an_unreachable_sandbox_is_not_sampled(often):
    async def gone() -> CellStats:
        raise errors.SandboxLost("it was lost")

    meter = SandboxMeter(CellStats, gone, Limits())
    await asyncio.sleep(0.02)
    with pytest.raises(errors.SandboxLost):
        await meter.latest_sample()
    meter.close()


async def test_sampling_ends_with_the_sandbox(engine: Engine, often):
    box = await engine.create(SandboxSpec())
    await at_least(box.meter, 3)
    await box.kill()
    last = await box.meter.latest_sample()
    await asyncio.sleep(0.05)
    assert await box.meter.latest_sample() == last


# -- deadlines


async def test_extending_never_shortens(engine: Engine):
    box = await engine.create(SandboxSpec(lifetime_seconds=100))
    deadline_at = box.record.deadline_at
    assert box.extend(10).deadline_at == deadline_at
    assert box.extend(200).deadline_at == pytest.approx(time.time() + 200, abs=5)
    for seconds in (0, -1, float("nan")):
        with pytest.raises(errors.InvalidRequest):
            box.extend(seconds)
    await box.kill()
    with pytest.raises(errors.SandboxKilled):
        box.extend(10)


async def test_extending_a_sandbox_without_a_deadline_gives_it_none(box: Sandbox):
    assert box.extend(10).deadline_at is None


async def test_expiring_is_as_if_the_deadline_had_passed(engine: Engine, box: Sandbox):
    box.expire_now()
    with pytest.raises(errors.SandboxExpired, match="timed out at"):
        await engine.get(box.id, "local")
    box.expire_now()


async def test_a_caller_may_choose_the_id(engine: Engine):
    id = new_id()
    box = await engine.create(SandboxSpec(), id=id)
    assert (box.id, (await engine.get(id, "local")).id) == (id, id)
    await box.kill()


async def test_templates_are_listed_and_resolved(engine: Engine):
    assert "python" in {each.name for each in await engine.templates()}
    assert (await engine.template("base")).name == "python"
