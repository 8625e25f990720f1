"""What an engine takes on at once: beyond that requests wait, and nothing that ends keeps its place."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from tests.conftest import with_template

from cloche import errors
from cloche.config import Config, PoolConfig
from cloche.config.sections import CapacityConfig, QuotaOverride
from cloche.engine.engine import Engine
from cloche.engine.operations.health import Health
from cloche.engine.quotas import capacity
from cloche.engine.quotas.capacity import AdmissionQueue
from cloche.engine.sandboxes import pool
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import Limits, SandboxSpec, Template
from cloche.store.quotas import QuotaSubject

pytestmark = pytest.mark.asyncio(loop_scope="session")

SLEEP = "import time; time.sleep(60)"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def small(own_config: Config, opening) -> AsyncIterator[Engine]:
    """An engine with room for three sandboxes and two executions, in which a request waits for half a minute."""
    capacity = CapacityConfig(sandboxes=3, executions=2, queued=8, queued_per_owner=4)
    async with opening(msgspec.structs.replace(own_config, capacity=capacity, pool=PoolConfig(ready=0))) as engine:
        yield engine


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def _everything_is_given_back(small: Engine) -> AsyncIterator[None]:
    for gate in (sandboxes(small), executions(small)):  # each finds an engine that nobody has used
        gate._known, gate._is_shared = "", False
    yield
    for sandbox in small.live_sandboxes():
        await sandbox.kill()
    await until(lambda: sandboxes(small).in_use == 0)
    assert executions(small).in_use == 0
    assert sandboxes(small).waiting == executions(small).waiting == 0


def sandboxes(engine: Engine) -> AdmissionQueue:
    return engine.cell_supply.admission.sandboxes


def executions(engine: Engine) -> AdmissionQueue:
    return engine.cell_supply.admission.executions


def of(owner: str, **spec) -> SandboxSpec:
    return SandboxSpec(owner=owner, **spec)


async def until(true) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline, "it never became true"
        await asyncio.sleep(0.005)


async def test_one_sandbox_too_many_waits_until_another_has_ended(small: Engine):
    first, *_ = [await small.create(of("ann")) for _ in range(3)]
    waiting = asyncio.create_task(small.create(of("ann")))
    await until(lambda: sandboxes(small).waiting == 1)
    await first.kill()
    assert (await (await waiting).context().execute("6*7").result()).text == "42"
    assert sandboxes(small).in_use == 3


@pytest.mark.parametrize("end", ["kill", "deadline", "lost", "pause without memory"])
async def test_however_a_sandbox_ends_its_place_is_free_once(small: Engine, end: str):
    box = await small.create(of("ann", lifetime_seconds=0.05 if end == "deadline" else 60.0))
    assert sandboxes(small).in_use == 1
    if end == "kill":
        await asyncio.gather(box.kill(), box.kill())
    elif end == "lost":
        box.abandon("a test")
    elif end == "pause without memory":
        await small.pause(box.id, "ann", memory=False)
    await until(lambda: sandboxes(small).in_use == 0)
    if end == "pause without memory":
        await small.kill(box.id, "ann")


async def test_a_sandbox_that_could_not_be_made_leaves_its_place(small: Engine):
    for _ in range(4):
        with pytest.raises(errors.ClocheError):
            await small.make(of("ann"), None, image="there-is-no-such-image")
    assert sandboxes(small).in_use == 0


async def test_a_cancelled_wait_for_a_sandbox_leaves_no_trace(small: Engine):
    boxes = [await small.create(of("ann")) for _ in range(3)]
    waiting = [asyncio.create_task(small.create(of("bob"))) for _ in range(3)]
    await until(lambda: sandboxes(small).waiting == 3)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    assert sandboxes(small).waiting == 0
    await boxes[0].kill()
    await until(lambda: sandboxes(small).in_use == 2)


async def test_the_canary_runs_on_a_full_host(small: Engine):
    for _ in range(3):
        await small.create(of("ann"))
    health = Health(small, 30.0)
    await health.check()
    assert health.verdict.ok


async def test_a_request_that_makes_no_sense_does_not_wait_to_be_told(small: Engine):
    for _ in range(3):
        await small.create(of("ann"))
    async with asyncio.timeout(10):
        with pytest.raises(errors.InvalidRequest):
            await small.create(of("ann", limits=Limits(memory_bytes=1 << 60)))


async def test_one_execution_too_many_waits_and_its_time_begins_when_it_does(small: Engine):
    boxes = [await small.create(of(owner)) for owner in ("ann", "ann", "bob")]
    long = [boxes[0].context().execute(SLEEP), boxes[1].context().execute(SLEEP)]
    for each in long:
        await each.__aenter__()
    short = asyncio.create_task(boxes[2].context().execute("6*7", timeout_seconds=30.0).result())
    await until(lambda: executions(small).waiting == 1)
    await long[0].aclose()
    run = await short
    assert run.text == "42" and run.usage.wall_seconds < 30
    await long[1].aclose()


@pytest.mark.parametrize("end", ["sandbox", "context", "request"])
async def test_a_waiting_execution_ends_with_its_context_or_sandbox(small: Engine, end: str):
    busy = await small.create(of("ann"))
    other = await small.create(of("bob"))
    contexts = [busy.context(), await busy.create_context()]
    long = [each.execute(SLEEP) for each in contexts]
    for each in long:
        await each.__aenter__()
    mine = await other.create_context()
    waiting = [asyncio.create_task(mine.execute("6*7").result()) for _ in range(2)]
    await until(lambda: executions(small).waiting == 1)  # the second waits for the first
    if end == "sandbox":
        await other.kill()
    elif end == "context":
        other.remove_context(mine.id)
    else:
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])
        await until(lambda: executions(small).waiting == 1)
        waiting.pop(0)
        waiting[0].cancel()
    await asyncio.wait(waiting)
    if end != "request":
        assert [task.result().outcome for task in waiting] == ["died", "died"]
    assert executions(small).waiting == 0 and executions(small).in_use == 2
    for each in long:
        await each.aclose()


async def test_a_restart_does_not_drop_executions_that_wait_for_capacity(small: Engine):
    busy, other = await small.create(of("ann")), await small.create(of("bob"))
    long = [context.execute(SLEEP) for context in (busy.context(), await busy.create_context())]
    for each in long:
        await each.__aenter__()
    waiting = asyncio.create_task(other.context().execute("6*7").result())
    await until(lambda: executions(small).waiting == 1)
    await other.context().restart()
    await busy.kill()
    assert (await waiting).text == "42"


async def test_an_owner_with_too_many_waiting_is_refused_before_an_answer_begins(small: Engine):
    box = await small.create(of("ann"))
    contexts = [box.context(), *[await box.create_context() for _ in range(6)]]
    long = [context.execute(SLEEP) for context in contexts[:2]]
    for each in long:
        await each.__aenter__()
    waiting = [asyncio.create_task(context.execute("1").result()) for context in contexts[2:6]]
    await until(lambda: executions(small).waiting == 4)
    with pytest.raises(errors.QuotaExceeded, match="4 requests of yours wait"):
        contexts[6].execute("1")
    await box.kill()
    await asyncio.wait(waiting)


async def test_an_execution_of_a_paused_sandbox_lets_others_run_and_goes_on_later(small: Engine, config: Config):
    box, other = await small.create(of("ann")), await small.create(of("bob"))
    long = [
        context.execute("import time; time.sleep(0.5); 1") for context in (box.context(), await box.create_context())
    ]
    for each in long:
        await each.__aenter__()
    try:
        await small.pause(box.id, "ann")
    except errors.Unavailable as error:
        pytest.skip(str(error))
    assert executions(small).in_use == 0 and sandboxes(small).in_use == 2
    assert (await other.context().execute("6*7").result()).text == "42"
    await small.resume(box.id, "ann")
    assert [(await each.result()).text for each in long] == ["1", "1"]


async def test_where_several_owners_are_known_none_takes_all_after_a_restart(
    own_config: Config, opening, template: Template, tmp_path: Path
):
    place = str(with_template(tmp_path / "shared", template))
    capacity = CapacityConfig(sandboxes=20)
    config = msgspec.structs.replace(own_config, data_dir=place, capacity=capacity, pool=PoolConfig(ready=0))
    async with opening(config) as engine:
        assert sum(sandboxes(engine).enter_now("ann") for _ in range(30)) == 20  # of whom nobody knows
        for owner in ("ann", "bob"):
            await engine.quotas.set(QuotaSubject(owner), QuotaOverride(executions_per_minute=1000))
    async with opening(config) as engine:
        assert sum(sandboxes(engine).enter_now("ann") for _ in range(30)) == 18


async def test_waiting_requests_are_told_of_the_shutdown(own_config: Config, opening):
    capacity = CapacityConfig(sandboxes=1, executions=1)
    config = msgspec.structs.replace(own_config, capacity=capacity, pool=PoolConfig(ready=0))
    async with opening(config) as engine:
        box: Sandbox = await engine.create(of("ann"))
        running = box.context().execute(SLEEP)
        await running.__aenter__()
        second = await box.create_context()
        waiting = [asyncio.create_task(engine.create(of("bob"))), asyncio.create_task(second.execute("1").result())]
        await until(lambda: sandboxes(engine).waiting + executions(engine).waiting == 2)
    await asyncio.wait(waiting)
    assert isinstance(waiting[0].exception(), errors.ShuttingDown)
    assert isinstance(waiting[1].exception(), errors.ShuttingDown)


async def test_where_memory_runs_short_cells_that_wait_go_first_and_come_back(
    own_config: Config, opening, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pool, "MEMORY_WATCH_SECONDS", 0.01)
    monkeypatch.setattr(pool, "SHORT_MEMORY_SECONDS", 0.01)
    monkeypatch.setattr(capacity, "FRESH_MEMORY_SECONDS", 0.01)
    config = msgspec.structs.replace(own_config, pool=PoolConfig(ready=2), capacity=CapacityConfig(queue_seconds=0.05))
    async with opening(config) as engine:
        box = await engine.create(of("ann"))
        await until(lambda: engine.waiting == 2)
        left = engine.cell_supply.admission.memory
        enough, left.reserve_bytes = left.reserve_bytes, 1 << 60
        await until(lambda: engine.waiting == 0)
        with pytest.raises(errors.Busy, match="too little memory left"):
            await engine.create(of("bob"))
        assert (await box.context().execute("6*7").result()).text == "42"  # what runs goes on
        await Health(engine, 30.0).check()
        assert engine.waiting == 0 and engine.cell_supply.wanted == 2
        left.reserve_bytes = enough
        await until(lambda: engine.waiting == 2)
        await (await engine.create(of("bob"))).kill()


@pytest.mark.long
async def test_a_pool_fills_up_also_where_programs_never_let_a_core_go(own_config: Config, opening):
    async with opening(
        msgspec.structs.replace(own_config, pool=PoolConfig(ready=2), capacity=CapacityConfig())
    ) as engine:
        box = await engine.create(of("ann"))
        held = [box.context(), *[await box.create_context() for _ in range(len(os.sched_getaffinity(0)))]]
        async with contextlib.AsyncExitStack() as stack:
            for context in held:
                await stack.enter_async_context(context.execute(SLEEP))
            assert engine.cell_supply.admission.busy()
            await until(lambda: engine.waiting == 2)
            await box.kill()


async def test_a_sandbox_whose_programs_find_no_room_stays_paused(small: Engine):
    box, *others = [await small.create(of(owner)) for owner in ("ann", "bob", "carl")]
    long = box.context().execute(SLEEP)
    await long.__aenter__()
    try:
        await small.pause(box.id, "ann")
    except errors.Unavailable as error:
        pytest.skip(str(error))
    busy = [other.context().execute(SLEEP) for other in others]
    for each in busy:
        await each.__aenter__()
    with pytest.raises(errors.Busy, match="running executions"):
        await small.resume(box.id, "ann")
    assert (await small.describe(box.id, "ann")).state == "paused"
    await busy[0].aclose()
    assert (await small.resume(box.id, "ann")).record.state == "running"
    for each in (busy[1], long):
        await each.aclose()


async def test_creations_begun_before_an_owners_lockout_are_abandoned(small: Engine):
    """Also where that is over before the cell is there."""
    admission = small.cell_supply.admission
    making = asyncio.create_task(small.create(SandboxSpec(owner="erased")))
    while not sandboxes(small).slots_held_by("erased"):
        await asyncio.sleep(0)
    admission.shut("erased")
    with pytest.raises(errors.Unauthenticated):
        await small.create(SandboxSpec(owner="erased"))
    admission.lockout.end("erased")
    with pytest.raises(errors.Unauthenticated):
        await making
    assert small.list("erased") == []
    assert (await small.create(SandboxSpec(owner="erased"))).ending is None
