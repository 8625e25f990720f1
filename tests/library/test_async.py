"""The same library with `await`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

import cloche
from cloche import errors
from cloche.events import AnyEvent, Ended, Output, Started

pytestmark = pytest.mark.usefixtures("library")


@pytest.fixture
async def box() -> AsyncIterator[cloche.AsyncSandbox]:
    async with cloche.AsyncSandbox() as box:
        yield box


async def test_run_stream_files_commands(box: cloche.AsyncSandbox):
    await box.run("x = 20")
    assert (await box.run("x + 1")).text == "21"
    events = [event async for event in box.stream("print(1)\n2")]
    assert isinstance(events[0], Started) and isinstance(events[-1], Ended)
    await box.files.write("a", b"1")
    assert await box.files.read("a") == b"1"
    assert [info.name for info in await box.files.list()] == ["a"]
    assert (await box.commands.run("cat a")).stdout == "1"
    process = await box.commands.run("cat", background=True, stdin=True)
    await process.send_stdin(b"in")
    await process.close_stdin()
    assert (await process.wait()).stdout == "in"


async def test_it_can_be_awaited_and_connected_to():
    box = await cloche.AsyncSandbox()
    other = await cloche.AsyncSandbox.connect(box.id)
    assert (await other.run("1")).text == "1"
    await box.close()
    with pytest.raises(errors.SandboxKilled):
        await box.run("1")
    with pytest.raises(errors.SandboxKilled):
        await cloche.AsyncSandbox.connect(box.id)


async def test_one_that_was_not_awaited_says_so():
    with pytest.raises(errors.InvalidRequest, match="await"):
        cloche.AsyncSandbox().id


async def test_many_tasks_share_a_sandbox(box: cloche.AsyncSandbox):
    await box.run("seen = []")
    await asyncio.gather(*(box.run(f"seen.append({i})") for i in range(8)))
    assert (await box.run("sorted(seen)")).text == str(list(range(8)))


async def test_cancelling_a_run_interrupts_the_program(box: cloche.AsyncSandbox):
    await box.run("x = 1")
    running = asyncio.Event()

    def started(event: AnyEvent) -> None:
        if isinstance(event, Output):
            running.set()

    code = "import time\nprint('in', flush=True)\ntime.sleep(60)"
    task = asyncio.create_task(box.run(code, on_event=started))
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await box.run("x", timeout=30)).text == "1"


async def test_leaving_a_stream_early_interrupts(box: cloche.AsyncSandbox):
    async with box.stream("import time\nprint('in', flush=True)\ntime.sleep(60)") as stream:
        async for event in stream:
            if isinstance(event, Output):
                break
    assert (await box.run("1", timeout=30)).text == "1"


async def test_answers_come_from_the_callers_loop(box: cloche.AsyncSandbox):
    loop = asyncio.get_running_loop()

    async def answer(prompt: str) -> str:
        assert asyncio.get_running_loop() is loop
        await asyncio.sleep(0)
        return prompt.upper()

    assert (await box.run("input('a')", input=answer)).text == "'A'"


async def test_chunks_come_from_the_callers_loop(box: cloche.AsyncSandbox):
    loop = asyncio.get_running_loop()

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(20):
            assert asyncio.get_running_loop() is loop
            await asyncio.sleep(0)
            yield b"x" * 100_000

    await box.files.write("big", chunks())
    assert sum([len(chunk) async for chunk in box.files.read_chunks("big")]) == 2_000_000


async def test_contexts_and_watch(box: cloche.AsyncSandbox):
    context = await box.contexts.create()
    await context.run("a = 1")
    await context.restart()
    assert (await box.run("a", context=context)).outcome == "raised"
    await box.contexts.remove(context)
    async with box.files.watch(".") as changes:
        await box.files.write("new", "x")
        assert (await anext(aiter(changes))).path == "/mnt/data/new"


async def test_a_non_boolean_flag_is_refused(box: cloche.AsyncSandbox):
    context = await box.contexts.get("default")
    for run in (box.run, context.run):
        assert (await run("1", tools=None, detach=False)).text == "1"
        with pytest.raises(errors.InvalidRequest, match="True or False"):
            await run("1", detach="yes")


async def test_bad_input_is_refused(box: cloche.AsyncSandbox):
    with pytest.raises(errors.InvalidPath):
        await box.run("1", cwd="")
    with pytest.raises(errors.InvalidRequest):
        await box.commands.run("true", user="nobody")
    with pytest.raises(errors.InvalidRequest):
        await box.commands.run("true", env={str(n): "x" * 100_000 for n in range(11)})
    with pytest.raises(errors.InvalidRequest):
        await box.stream("input()", input=True).answer("x" * (1 << 20) + "x")
