"""Inits that wait for a sandbox to be of are killed, before they are taken or while they raise their walls."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from tests.faults.test_hung import cradle_of, engine_with, init_of, parent_of

from cloche import errors
from cloche.model import SandboxSpec

pytestmark = pytest.mark.long


def children_of(pid: int) -> set[int]:
    found = set()
    for each in Path("/proc").glob("[0-9]*"):
        try:
            if parent_of(int(each.name)) == pid:
                found.add(int(each.name))
        except (OSError, IndexError):
            pass
    return found


async def embryo_of(cradle: int, inits: set[int]) -> int:
    """The one that waits, once there is one."""
    async with asyncio.timeout(30):
        while not (waiting := children_of(cradle) - inits):
            await asyncio.sleep(0.005)
    return waiting.pop()


async def settled(cradle: int) -> int:
    """How many descriptors it has, once that stays the same: while it makes an embryo it has some more."""
    counts = [0]
    async with asyncio.timeout(30):
        while len(counts) < 20 or len(set(counts[-20:])) > 1:
            counts.append(len(os.listdir(f"/proc/{cradle}/fd")))
            await asyncio.sleep(0.005)
    return counts[-1]


async def test_one_that_is_killed_while_it_waits_is_replaced_and_leaves_nothing(place: Path):
    async with asyncio.timeout(60), engine_with(place) as engine:
        kept = await engine.create(SandboxSpec(owner="me"))
        cradle = cradle_of(kept)
        await embryo_of(cradle, {init_of(kept)})
        held = await settled(cradle)
        for _ in range(4):
            os.kill(await embryo_of(cradle, {init_of(kept)}), signal.SIGKILL)
            box = await engine.create(SandboxSpec(owner="me"))
            assert (await box.context().execute("6 * 7").result()).text == "42"
            assert cradle_of(box) == cradle
            await box.kill()
            await embryo_of(cradle, {init_of(kept)})
            assert await settled(cradle) == held


async def test_one_that_is_killed_while_it_becomes_a_sandbox_is_made_again(place: Path):
    async with asyncio.timeout(60), engine_with(place) as engine:
        kept = await engine.create(SandboxSpec(owner="me"))
        cradle = cradle_of(kept)
        for delay in (0.001, 0.002, 0.003, 0.004):
            embryo = await embryo_of(cradle, {init_of(kept)})
            making = asyncio.create_task(engine.create(SandboxSpec(owner="me")))
            await asyncio.sleep(delay)
            try:
                os.kill(embryo, signal.SIGKILL)
            except ProcessLookupError:
                pass
            try:
                box = await making
            except errors.SandboxLost:  # it was ready: from then on, nobody makes another instead
                continue
            if init_of(box) != embryo:
                assert (await box.context().execute("6 * 7").result()).text == "42"
                await box.kill()
