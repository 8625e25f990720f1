"""A hundred pauses lose nothing, and a hundred paused sandboxes use nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.engine.conftest import open_engine

from cloche.config import Config, PoolConfig
from cloche.engine.engine import Engine
from cloche.engine.executions.execution import Execution
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import Output
from cloche.model import SandboxSpec

pytestmark = pytest.mark.asyncio(loop_scope="session")

ROUNDS = 100
MANY = 100
MOVING = 5  # of them would use all that there is
LOOK_SECONDS = 0.25  # long enough to count a program that runs, among many that do not


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(bare_dir: str) -> AsyncIterator[Engine]:
    async with open_engine(Config(data_dir=bare_dir, pool=PoolConfig(ready=4))) as engine:
        yield engine


@pytest.mark.long
async def test_a_hundred_times_paused_and_resumed_nothing_is_lost(engine: Engine) -> None:
    box = await engine.create(SandboxSpec(owner="ann"))
    await box.context().execute("total, path = 0, 'kept'; open(path, 'w').close()").result()
    step = "total += 1; _ = open(path, 'a').write('x'); total, len(open(path).read())"
    for done in range(ROUNDS):
        assert (await engine.pause(box.id, "ann")).state == "paused"
        assert await engine.resume(box.id, "ann") is box
        assert (await box.context().execute(step).result()).text == f"({done + 1}, {done + 1})"
    await box.kill()


@pytest.mark.long
async def test_a_hundred_paused_sandboxes_use_no_cpu(engine: Engine) -> None:
    boxes = await asyncio.gather(*(engine.create(SandboxSpec(owner="bob")) for _ in range(MANY)))
    try:
        if boxes[0]._cell.stats().cpu_seconds is None:
            pytest.skip("this host does not count the CPU time of sandboxes")
        busy = []
        for number, box in enumerate(boxes):
            if number < MOVING:
                busy.append(await _busy(box))
            await engine.pause(box.id, "bob")
        before = _cpu_seconds(boxes)
        await asyncio.sleep(LOOK_SECONDS)
        assert _cpu_seconds(boxes) - before < 0.001  # the last that was paused had some steps left to go
        assert not any(execution.ended for execution in busy)
    finally:
        await asyncio.gather(*(engine.kill(box.id, "bob") for box in boxes))


def _cpu_seconds(boxes: list[Sandbox]) -> float:
    return sum(box._cell.stats().cpu_seconds or 0 for box in boxes)


async def _busy(box: Sandbox) -> Execution:
    """Returns when it runs."""
    execution = box.context().execute("print('running')\nwhile True: pass")
    async for event in execution:
        if isinstance(event, Output):
            break
    return execution
