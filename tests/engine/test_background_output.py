"""What is written while nobody reads it: how much of it is kept, and for how long."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref

import pytest

from cloche import errors
from cloche.engine.commands.process import SandboxProcess
from cloche.engine.engine import Engine
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import EVENT_OVERHEAD_BYTES, HIGH_WATER_BYTES, Exited, Output, Truncated
from cloche.model import SandboxSpec

pytestmark = pytest.mark.asyncio(loop_scope="session")

LINES = "seq 1500000; exit 5"  # some 10 MiB
SMILES = ["python3", "-c", "print(('\U0001f600' + 'a' * 64000) * 300)"]  # 18 MiB, and 4 bytes in ours for each


async def ended(process: SandboxProcess) -> Exited:
    while process.exited is None:
        await asyncio.sleep(0.01)
    return process.exited


async def test_unread_output_does_not_block_the_process_and_its_end_is_kept(box: Sandbox):
    process = await box.commands.start(LINES, background=True)
    assert (await ended(process)).exit_code == 5
    events = await process.next_events()
    assert isinstance(events[0], Truncated) and events[0].stream == "stdout"
    texts = [event.text for event in events if isinstance(event, Output) and event.stream == "stdout"]
    kept = "".join(texts)
    assert kept.endswith("\n1500000\n") and 3_000_000 < len(kept) <= HIGH_WATER_BYTES
    assert events[0].dropped_bytes + len(kept) == len("".join(f"{n}\n" for n in range(1, 1500001)))
    assert isinstance(events[-1], Exited) and await process.next_events() == []


async def test_a_result_reports_its_missing_output(box: Sandbox):
    process = await box.commands.start(LINES, background=True)
    await ended(process)
    result = await process.result()
    assert result.stdout.endswith("\n1500000\n")
    assert result.stderr.startswith("[cloche] not read in time; dropped: ") and "bytes of stdout" in result.stderr


async def test_iterating_tells_of_the_gap_first(box: Sandbox):
    process = await box.commands.start(LINES, background=True)
    await ended(process)
    events = [event async for event in process]
    assert isinstance(events[0], Truncated) and isinstance(events[-1], Exited)


async def test_the_limit_counts_host_memory_and_not_written_bytes(box: Sandbox):
    process = await box.commands.start(SMILES, background=True)
    await ended(process)
    texts = [event.text for event in await process.next_events() if isinstance(event, Output)]
    assert 0 < sum(sys.getsizeof(text) + EVENT_OVERHEAD_BYTES for text in texts) <= HIGH_WATER_BYTES + (1 << 10)


async def test_a_slow_reader_stops_a_program_at_that_much_of_our_memory(box: Sandbox):
    async with await box.commands.start(SMILES) as process:
        while not process._events._paused:
            await asyncio.sleep(0.01)
        waiting = [event.text for event in await process.next_events() if isinstance(event, Output)]
        assert (
            HIGH_WATER_BYTES / 2 < sum(map(sys.getsizeof, waiting)) <= HIGH_WATER_BYTES + (1 << 20)
        )  # one more of them fits


async def test_nothing_is_dropped_while_a_slow_reader_reads(box: Sandbox):
    process = await box.commands.start("read _; " + LINES, background=True, stdin=True)
    kept = []
    with process.reading():
        await process.send_stdin(b"\n")
        while not process._events._paused:
            await asyncio.sleep(0.01)
        while events := await process.next_events():
            kept += events
    assert not any(isinstance(event, Truncated) for event in kept)
    text = "".join(event.text for event in kept if isinstance(event, Output))
    assert text == "".join(f"{n}\n" for n in range(1, 1500001))


async def test_a_reader_that_leaves_in_the_middle_holds_up_nothing(box: Sandbox):
    process = await box.commands.start("read _; " + LINES, background=True, stdin=True)
    with process.reading():
        await process.send_stdin(b"\n")
        while not process._events._paused:
            await asyncio.sleep(0.01)
    assert (await ended(process)).exit_code == 5


async def test_a_process_has_one_reader_at_a_time(box: Sandbox):
    process = await box.commands.start("sleep 100", background=True)
    refused = pytest.raises(errors.InvalidRequest, match=f"process {process.id} has a reader already")
    with process.reading(), refused, process.reading():
        pass
    with process.reading():
        process.kill()
        assert isinstance((await process.next_events())[-1], Exited)


@pytest.mark.parametrize("how", ["kill the process", "end the sandbox"])
async def test_queued_output_is_freed_at_the_end_and_not_by_the_garbage_collector(engine: Engine, how: str):
    box = await engine.create(SandboxSpec())
    process = await box.commands.start("seq 200000; exec sleep 100", background=True)
    while process._events._bytes < 1_000_000:
        await asyncio.sleep(0.01)
    left = weakref.ref(process)
    gc.disable()
    try:
        if how == "kill the process":
            process.kill()
            await ended(process)
        del process
        await box.kill()
        assert left() is None
    finally:
        gc.enable()


async def test_of_a_job_that_ended_only_its_end_is_remembered(engine: Engine):
    box = await engine.create(SandboxSpec())
    job = await box.commands.launch(["cat"], stdin=True, env={"A": "x" * 100_000}, tag="mine")
    listener = job.listen()
    job.close_stdin()
    await job.wait()
    pid, left = job.pid, weakref.ref(listener)
    past = box.commands.jobs.recall(tag="mine")
    assert (past.pid, past.exited.exit_code) == (pid, 0) and not hasattr(past, "ask")
    gc.disable()
    try:
        listener.close()
        del listener
        assert left() is None
    finally:
        gc.enable()
    await box.kill()


async def test_an_unstarted_execution_is_freed_with_its_code(box: Sandbox):
    execution = box.context().execute("#" * 1_000_000)
    left = weakref.ref(execution)
    gc.disable()
    try:
        del execution
        assert left() is None
    finally:
        gc.enable()


async def test_an_ended_execution_is_freed_with_its_unread_output(box: Sandbox):
    execution = box.context().execute("print('x' * 1_000_000)")
    async with execution:
        await execution._events.wait_closed()
    left = weakref.ref(execution)
    gc.disable()
    try:
        del execution
        assert left() is None
    finally:
        gc.enable()
