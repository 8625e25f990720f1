"""Processes that are there and do nothing: stopped ones. Nobody waits for them without end.

The engine is in this process, so that its patience can be shortened: minutes are what it has.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cloche import errors
from cloche.config import Config, PoolConfig
from cloche.engine.engine import Engine
from cloche.engine.sandboxes import init_client
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.isolation import cell, nursery
from cloche.isolation.cell import pid_of
from cloche.model import SandboxSpec
from cloche.sdk.assembly import assemble_engine

pytestmark = pytest.mark.long


@asynccontextmanager
async def engine_with(place: Path, ready: int = 0) -> AsyncIterator[Engine]:
    try:
        engine = assemble_engine(Config(data_dir=str(place), pool=PoolConfig(ready=ready)))
    except errors.IsolationUnavailable as error:
        pytest.skip(str(error))
    async with engine:
        yield engine


def init_of(box: Sandbox) -> int:
    return pid_of(box.guest.cell._pidfd)  # type: ignore[attr-defined]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def cradle_of(box: Sandbox) -> int:
    return parent_of(init_of(box))


def zygote_of(box: Sandbox) -> int:
    return parent_of(cradle_of(box))


@pytest.mark.parametrize("which", [zygote_of, cradle_of])
async def test_a_nursery_that_hangs_is_replaced_and_its_sandboxes_live_on(place: Path, monkeypatch, which):
    monkeypatch.setattr(nursery, "SPAWN_SECONDS", 1.0)
    async with asyncio.timeout(60), engine_with(place) as engine:
        box = await engine.create(SandboxSpec(owner="me"))
        await box.context().execute("kept = 1").result()
        hung = zygote_of(box)
        os.kill(which(box), signal.SIGSTOP)
        made = await asyncio.gather(*(engine.create(SandboxSpec(owner="me")) for _ in range(3)))
        # A cradle's last embryo is in the zygote's hands. What it became lives on with neither of them.
        assert sum(zygote_of(each) not in (hung, parent_of(init_of(box))) for each in made) >= 2
        for each in made:
            assert (await each.context().execute("6 * 7").result()).text == "42"
        assert (await box.context().execute("kept").result()).text == "1"


async def test_a_sandbox_whose_nursery_hangs_can_be_killed(place: Path, monkeypatch):
    """Its pid 1 is not dead before the zygote has collected its first kernel."""
    monkeypatch.setattr(cell, "STUCK_SECONDS", 0.5)
    async with asyncio.timeout(60), engine_with(place) as engine:
        box, other = [await engine.create(SandboxSpec(owner="me")) for _ in range(2)]
        os.kill(zygote_of(box), signal.SIGSTOP)
        await box.kill()
        assert (await other.context().execute("6 * 7").result()).text == "42"
        assert await engine.create(SandboxSpec(owner="me"))


async def test_a_hung_init_costs_its_sandbox_and_waiting_callers_get_an_error(place: Path, monkeypatch):
    monkeypatch.setattr(init_client, "HUNG_SECONDS", 0.5)
    async with asyncio.timeout(60), engine_with(place) as engine:
        box, other = [await engine.create(SandboxSpec(owner="me")) for _ in range(2)]
        os.kill(init_of(box), signal.SIGSTOP)
        works = (box.files.list("/"), box.commands.run("true"), box.create_context(), engine.pause(box.id, "me"))
        waiting = [asyncio.create_task(work) for work in works]
        told = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(each) for each in told] == [errors.SandboxLost] * 4
        assert "has not answered" in str(told[0])
        with pytest.raises(errors.SandboxLost):
            await engine.get(box.id, "me")
        await asyncio.sleep(1.5)  # one that answers is not taken for one that hangs, however long ago it was asked
        assert (await other.commands.run("echo there")).stdout == "there\n"


async def test_an_init_that_is_slow_is_waited_for(place: Path, monkeypatch):
    monkeypatch.setattr(init_client, "HUNG_SECONDS", 2.0)
    async with asyncio.timeout(60), engine_with(place) as engine:
        box = await engine.create(SandboxSpec(owner="me"))
        os.kill(init_of(box), signal.SIGSTOP)
        asked = asyncio.create_task(box.commands.run("echo late"))
        await asyncio.sleep(0.3)  # less than HUNG_SECONDS
        os.kill(init_of(box), signal.SIGCONT)
        assert (await asked).stdout == "late\n"


async def test_a_kernel_that_stops_itself_costs_its_execution_the_time_limit(place: Path):
    async with asyncio.timeout(60), engine_with(place) as engine:
        box = await engine.create(SandboxSpec(owner="me"))
        code = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
        run = await box.context().execute(code, timeout_seconds=0.5).result()
        assert run.outcome == "timed_out"
        assert (await box.context().execute("6 * 7").result()).text == "42"


async def test_a_hung_pooled_cell_fails_but_the_creation_ends(place: Path, monkeypatch):
    """Its kernel answers still, so it is taken; what asks its init finds out."""
    monkeypatch.setattr(init_client, "HUNG_SECONDS", 0.5)
    async with asyncio.timeout(60), engine_with(place, ready=1) as engine:
        await engine.cell_supply.warm()
        (pool,) = engine.cell_supply._pools.values()
        while not pool.ready:
            await asyncio.sleep(0.01)
        os.kill(pid_of(pool._ready[0].cell._pidfd), signal.SIGSTOP)  # type: ignore[attr-defined]
        box = await engine.create(SandboxSpec(owner="me"))
        with pytest.raises(errors.SandboxLost):
            await box.files.list("/")
        other = await engine.create(SandboxSpec(owner="me"))
        assert (await other.commands.run("echo there")).stdout == "there\n"
