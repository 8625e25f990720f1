"""Commands, by E2B's asynchronous Python SDK: several at a time."""

from __future__ import annotations

import asyncio

import pytest
from e2b import CommandExitException, TimeoutException
from e2b_code_interpreter import AsyncSandbox


async def test_many_commands_at_once(async_box: AsyncSandbox):
    results = await asyncio.gather(*(async_box.commands.run(f"echo {number}") for number in range(20)))
    assert [result.stdout for result in results] == [f"{number}\n" for number in range(20)]


async def test_all_connected_clients_receive_the_same(async_box: AsyncSandbox):
    command = await async_box.commands.run("read line; seq 20000; echo $line", background=True, stdin=True)
    others = [await async_box.commands.connect(command.pid) for _ in range(3)]
    await command.send_stdin("go\n")
    results = await asyncio.gather(command.wait(), *(other.wait() for other in others))
    assert len({result.stdout for result in results}) == 1
    assert results[0].stdout.endswith("20000\ngo\n")


async def test_kill_and_list(async_box: AsyncSandbox):
    command = await async_box.commands.run("sleep 60", background=True)
    assert command.pid in [each.pid for each in await async_box.commands.list()]
    assert await command.kill()
    with pytest.raises(CommandExitException):
        await command.wait()


async def test_a_time_limit(async_box: AsyncSandbox):
    with pytest.raises(TimeoutException):
        await async_box.commands.run("sleep 60", timeout=1)


async def test_killing_the_sandbox_is_reported_to_waiting_clients(server):
    box = await AsyncSandbox.create(**server.e2b)
    command = await box.commands.run("sleep 60", background=True)
    await box.kill()
    with pytest.raises(TimeoutException, match="sandbox was killed or reached its end of life"):
        await command.wait()
