"""While programs stand still nothing counts against them, and nobody waits for them to end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from cloche.engine.commands import program
from cloche.engine.engine import Engine
from cloche.engine.executions import execution as stopping
from cloche.engine.executions.execution import Execution
from cloche.engine.executions.program_limits import PausableTimer, ProgramTime
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import Output
from cloche.model import SandboxSpec

pytestmark = pytest.mark.asyncio(loop_scope="session")

OWNER = "ann"
SLEEPS = "import time\nx = 41\nprint('begun')\ntime.sleep(1000)"
IGNORES = """
import signal, time
x = 41
signal.signal(signal.SIGINT, lambda *_: print('heard'))
print('begun')
while True: time.sleep(1000)
"""
LONG_SECONDS = 0.3  # more than both limits of `hurry`
PATIENCE_SECONDS = 8  # less than any wait for who cannot end takes by itself


@pytest_asyncio.fixture(loop_scope="session")
async def box(engine: Engine) -> AsyncIterator[Sandbox]:
    made = await engine.create(SandboxSpec(owner=OWNER))
    yield made
    await made.kill()


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Until it is undone, little is waited for programs to end."""
    monkeypatch.setattr(stopping, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(stopping, "KILL_SECONDS", 0.1)
    monkeypatch.setattr(program, "KILL_SECONDS", 0.1)
    return monkeypatch


async def said(execution: Execution, text: str) -> None:
    async for event in execution:
        if isinstance(event, Output) and text in event.text:
            return
    raise AssertionError(f"it never said {text!r}")


async def begun(box: Sandbox, code: str, **how: float) -> Execution:
    execution = box.context().execute(code, **how)
    await said(execution, "begun")
    return execution


async def resumed(engine: Engine, box: Sandbox, hurry: pytest.MonkeyPatch) -> None:
    """After more than a program has to end. How long it takes now decides nothing."""
    await asyncio.sleep(LONG_SECONDS)
    assert (await engine.describe(box.id, OWNER)).state == "paused"
    hurry.undo()
    await engine.resume(box.id, OWNER)


async def test_a_program_that_is_left_in_a_pause_is_interrupted_after_it(
    engine: Engine, box: Sandbox, hurry: pytest.MonkeyPatch
) -> None:
    execution = await begun(box, SLEEPS)
    await engine.pause(box.id, OWNER)
    hurry.setattr(stopping, "GRACE_SECONDS", stopping.KILL_SECONDS * 20)  # it gets to hear of it
    async with asyncio.timeout(PATIENCE_SECONDS):
        await execution.aclose()
    assert execution.ended is not None and execution.ended.outcome == "interrupted"
    assert "paused" in str(execution.ended.reason)
    await resumed(engine, box, hurry)
    assert (await box.context().execute("x + 1").result()).text == "42"


async def test_one_that_ignores_it_is_killed_before_the_next(
    engine: Engine, box: Sandbox, hurry: pytest.MonkeyPatch
) -> None:
    execution = await begun(box, IGNORES)
    await engine.pause(box.id, OWNER)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await execution.aclose()
    await resumed(engine, box, hurry)
    run = await box.context().execute("'x' in globals()").result()
    assert run.text == "False" and "state was lost" in run.stderr


async def test_a_pause_releases_waits_for_an_end(engine: Engine, box: Sandbox) -> None:
    execution = await begun(box, IGNORES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stopping, "GRACE_SECONDS", 1000)
        closing = asyncio.create_task(execution.aclose())
        await asyncio.sleep(0)
        await engine.pause(box.id, OWNER)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await closing
    assert execution.ended is not None and "paused" in str(execution.ended.reason)
    await engine.resume(box.id, OWNER)
    await box.context().restart()
    assert (await box.context().execute("1").result()).text == "1"


async def test_a_time_limit_just_before_a_pause_kills_after_it(
    engine: Engine, box: Sandbox, hurry: pytest.MonkeyPatch
) -> None:
    short = stopping.KILL_SECONDS
    hurry.undo()
    hurry.setattr(stopping, "GRACE_SECONDS", 0.5)
    execution = await begun(box, IGNORES, timeout_seconds=0.05)
    await said(execution, "heard")
    await engine.pause(box.id, OWNER)
    hurry.setattr(stopping, "KILL_SECONDS", short)
    await asyncio.sleep(0.5)  # as long as its grace, which must not pass meanwhile
    await resumed(engine, box, hurry)
    assert (await execution.result()).outcome == "timed_out"
    assert (await box.context().execute("1").result()).text == "1"


async def test_interrupts_far_apart_in_a_pause_do_not_kill(
    engine: Engine, box: Sandbox, hurry: pytest.MonkeyPatch
) -> None:
    execution = await begun(box, SLEEPS)
    await engine.pause(box.id, OWNER)
    hurry.setattr(stopping, "STUBBORN_SECONDS", 0.01)
    execution.interrupt()
    await asyncio.sleep(0.05)
    execution.interrupt()
    await resumed(engine, box, hurry)
    assert (await execution.result()).outcome == "interrupted"
    assert (await box.context().execute("x + 1").result()).text == "42"


async def test_a_detached_run_is_removed_in_a_pause(engine: Engine, box: Sandbox, hurry: pytest.MonkeyPatch) -> None:
    run = await engine.runs.start(box, "default", box.context().execute(IGNORES))
    async for batch in await engine.runs.attach(run.id, OWNER):
        if any(isinstance(line.event, Output) for line in batch):
            break
    await engine.pause(box.id, OWNER)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await engine.runs.remove(run.id, OWNER)
    await resumed(engine, box, hurry)
    assert (await box.context().execute("'x' in globals()").result()).text == "False"


@pytest.mark.parametrize("before", [True, False])
async def test_killing_a_command_in_a_pause_does_not_wait_for_its_end(
    engine: Engine, box: Sandbox, before: bool
) -> None:
    process = await box.commands.start("sleep 1000")
    if before:  # the signal and the pause may come in any order
        process.kill()
    await engine.pause(box.id, OWNER)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await process.aclose()
    assert process.exited is not None and (process.exited.outcome, process.exited.signal) == ("interrupted", 9)
    if not before:
        assert "paused" in str(process.exited.reason)
    await engine.resume(box.id, OWNER)
    async with asyncio.timeout(30):
        while await box.commands.list():
            await asyncio.sleep(0.01)


async def test_time_stands_still_for_images_and_executions_begun_meanwhile(box: Sandbox) -> None:
    await box.freezer.hold()
    running = asyncio.create_task(box.context().execute("'done'", timeout_seconds=0.05).result())
    ended: list[str] = []
    PausableTimer(0.05, lambda: ended.append("ended"), box.guest.time)  # as a command's
    await asyncio.sleep(LONG_SECONDS)
    assert not running.done() and not ended
    await box.freezer.release()
    assert (await running).outcome in ("ok", "timed_out") and box.info.state == "running"
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not ended:
            await asyncio.sleep(0.01)


async def test_a_timeout_counts_only_the_time_of_programs() -> None:
    time = ProgramTime()
    time.hold()
    before = time.now()
    async with asyncio.timeout(PATIENCE_SECONDS), time.timeout(0.02):
        await asyncio.sleep(0.1)
    assert time.now() == before
    time.go_on()
    with pytest.raises(TimeoutError):
        async with time.timeout(0.02):
            await asyncio.sleep(PATIENCE_SECONDS)
    assert time.now() > before
