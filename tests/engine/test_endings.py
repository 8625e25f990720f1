"""Endings: everybody who waits hears of it, in the right words, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import msgspec
import pytest

from cloche import errors
from cloche.config import Config, PoolConfig
from cloche.engine.engine import Engine
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import SandboxSpec

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def until(true) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline, "it never became true"
        await asyncio.sleep(0.01)


# -- several who wait for one thing


async def test_all_waiters_for_a_process_get_the_same_result(box: Sandbox):
    process = await box.commands.start("read x; echo got $x", stdin=True)
    waiting = [asyncio.create_task(process.result()) for _ in range(3)]
    cancelled = asyncio.create_task(process.result())
    await asyncio.sleep(0)
    cancelled.cancel()
    await process.send_stdin(b"it\n")
    results = await asyncio.wait_for(asyncio.gather(*waiting), 20)
    assert results[0].stdout == "got it\n"
    assert results == [results[0]] * 3


async def test_all_iterations_over_a_process_come_to_the_end(box: Sandbox):
    process = await box.commands.start("read x; echo got $x", stdin=True)

    async def events() -> int:
        return len([event async for event in process])

    waiting = [asyncio.create_task(events()) for _ in range(2)]
    await asyncio.sleep(0)
    await process.send_stdin(b"it\n")
    assert sum(await asyncio.wait_for(asyncio.gather(*waiting), 20)) == 2  # the output and the end, each once


async def test_all_waiters_for_an_execution_get_the_same_run(box: Sandbox):
    execution = box.context().execute("print('out'); 6*7")
    async with execution:
        runs = await asyncio.wait_for(asyncio.gather(execution.result(), execution.result()), 20)
    assert [(run.stdout, run.text, run.outcome) for run in runs] == [("out\n", "42", "ok")] * 2


async def test_all_waiters_for_a_change_are_woken(box: Sandbox):
    async with box.files.watch(box.spec.cwd) as watch:
        waiting = [asyncio.create_task(anext(watch)) for _ in range(2)]
        await asyncio.sleep(0)
        await box.files.write("a", b"")
        await asyncio.wait_for(asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED), 20)
    done = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 20)
    assert all(not isinstance(each, BaseException) or isinstance(each, StopAsyncIteration) for each in done)


# -- cancelling


async def test_a_command_whose_start_is_cancelled_does_not_run_on(box: Sandbox):
    starting = asyncio.create_task(box.commands.run("sleep 1234"))
    await asyncio.sleep(0)  # it has asked init by now
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    deadline = time.monotonic() + 30
    while await box.commands.list():
        assert time.monotonic() < deadline, "the command runs on"


async def test_a_context_whose_start_is_cancelled_leaves_no_kernel(box: Sandbox):
    starting = asyncio.create_task(box.create_context())
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await until(lambda: ("kernel_exited", "1") in box._guest._unclaimed)


# -- the right words


async def test_waiting_callers_receive_the_sandboxes_end_reason(engine: Engine):
    for end, error in (
        (lambda box: box.kill(), errors.SandboxKilled),
        (lambda box: box.end("expired", "deadline", "its deadline passed"), errors.SandboxExpired),
        (lambda box: _lose(box), errors.SandboxLost),
    ):
        box = await engine.create(SandboxSpec())
        asking = [asyncio.create_task(box.commands.list()) for _ in range(2)]
        await asyncio.sleep(0)
        await end(box)
        for failed in await asyncio.gather(*asking, return_exceptions=True):
            assert type(failed) is error and box.id in str(failed)
        with pytest.raises(error):
            await box.files.read("a")


async def _lose(box: Sandbox) -> None:
    box.abandon("by the test")


async def test_a_sandbox_that_expires_while_it_is_watched_has_expired(engine: Engine):
    box = await engine.create(SandboxSpec(lifetime_seconds=0.3))
    async with box.files.watch(box.spec.cwd) as watch:
        with pytest.raises(errors.SandboxExpired):
            await anext(watch)


async def test_a_context_that_cannot_work_where_it_should_says_why(box: Sandbox):
    with pytest.raises(errors.NotADirectory, match="/etc/passwd/x"):
        await box.create_context(cwd="/etc/passwd/x")
    with pytest.raises(errors.InvalidPath, match="/proc/nowhere"):
        await box.create_context(cwd="/proc/nowhere")
    if _has_walls(box):
        with pytest.raises(errors.PermissionDenied, match="/etc/x"):
            await box.create_context(cwd="/etc/x")
    other = await box.create_context(cwd="made/for/it")
    assert (await other.execute("import os; os.path.basename(os.getcwd())").result()).text == "'it'"


def _has_walls(box: Sandbox) -> bool:
    return not hasattr(box._cell, "_cell")


# -- interrupts

MISSED = """
import signal, time
interrupts = signal.getsignal(signal.SIGINT)
signal.signal(signal.SIGINT, lambda *_: signal.signal(signal.SIGINT, interrupts))
print("ready", flush=True)
time.sleep(60)
"""


async def test_an_interrupt_that_was_missed_is_repeated(box: Sandbox):
    async with box.context().execute(MISSED, timeout_seconds=40) as execution:
        async for event in execution:
            if getattr(event, "text", "") == "ready\n":
                execution.interrupt()
    assert execution.ended is not None and execution.ended.outcome == "interrupted"


async def test_a_timeout_that_was_missed_is_repeated_before_it_kills(box: Sandbox):
    run = await box.context().execute(MISSED, timeout_seconds=1).result()
    assert run.outcome == "timed_out" and "state was kept" in (run.reason or "")


# -- nothing is left


async def test_a_sandbox_that_ended_just_before_the_engine_is_gone_with_it(own_config: Config, opening):
    async with opening(own_config) as engine:
        box = await engine.create(SandboxSpec())
        for _ in range(10):
            await box.commands.start("sleep 1234", background=True)
        groups = _cgroups(engine)
        box.abandon("by the test")
    assert box.destroy_task is not None and box.destroy_task.done()
    assert not box._cell.alive
    assert [path for path in groups if Path(path).exists()] == []
    assert not engine._instance.directory.exists()


def _cgroups(engine: Engine) -> list[str]:
    parent = getattr(engine._backend, "_parent", None)
    return [] if parent is None else parent.directories


async def test_cells_of_a_dead_nursery_are_gone_with_the_engine(own_config: Config, opening):
    async with opening(msgspec.structs.replace(own_config, pool=PoolConfig(ready=0))) as engine:
        box = await engine.create(SandboxSpec())
        (nursery,) = engine.cell_supply._nurseries.values()
        first = await nursery.get()
        os.kill(_parent_pid(box), signal.SIGKILL)
        await until(lambda: not first.alive)
        await engine.create(SandboxSpec())
        await box.kill()
    processes = [each._zygote._process for each in engine._backend._nurseries]
    assert [process.returncode is not None for process in processes] == [True, True]


def _parent_pid(box: Sandbox) -> int:
    cell = getattr(box._cell, "_cell", box._cell)
    fields = Path(f"/proc/self/fdinfo/{cell._pidfd}").read_text().split()
    status = Path(f"/proc/{fields[fields.index('Pid:') + 1]}/status").read_text().split()
    return int(status[status.index("PPid:") + 1])


async def test_cgroups_that_cannot_be_removed_are_remembered(own_config: Config, opening):
    async with opening(msgspec.structs.replace(own_config, pool=PoolConfig(ready=0))) as engine:
        groups = _cgroups(engine)
        if not groups:
            pytest.skip("no cgroups here")
        for path in groups:
            os.mkdir(f"{path}/left")
    assert (engine._instance.directory / "cgroups").read_text().splitlines() == groups
    async with opening(own_config):
        assert [path for path in groups if Path(path).exists()] == []
        assert not engine._instance.directory.exists()


async def test_closing_while_a_nursery_starts_leaves_none(own_config: Config, opening):
    engine = opening(own_config)
    await engine.__aenter__()
    creating = asyncio.create_task(engine.create(SandboxSpec()))
    while not any(nursery._starting.locked() for nursery in engine.cell_supply._nurseries.values()):
        await asyncio.sleep(0)  # and no longer, or it may have started meanwhile
    await engine.aclose()
    with pytest.raises(errors.ClocheError):
        await creating
    assert all(each._zygote._process.returncode is not None for each in engine._backend._nurseries)


async def test_a_create_that_is_cancelled_leaves_no_half_started_nursery(own_config: Config, opening):
    async with opening(msgspec.structs.replace(own_config, pool=PoolConfig(ready=0))) as engine:
        children = _children()
        creating = asyncio.create_task(engine.create(SandboxSpec()))
        await until(lambda: _children() - children)
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating
        assert _children() == children


def _children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


async def test_closing_does_not_say_that_a_nursery_died(own_config: Config, opening, capsys):
    async with opening(own_config) as engine:
        await engine.create(SandboxSpec())
    assert "nursery.died" not in (said := capsys.readouterr().err) and "nursery.failed" not in said
