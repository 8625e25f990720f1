"""Programs that outlive whoever started them, and those who listen to them."""

from __future__ import annotations

import asyncio

import pytest

from cloche import errors
from cloche.engine.commands.jobs import JobListener, OutputChunk
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import Exited

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def heard(listener: JobListener) -> tuple[dict[str, bytes], Exited]:
    """Everything until the end."""
    streams = {"stdout": bytearray(), "stderr": bytearray()}
    last: Exited | None = None
    async with listener:
        while events := await listener.next_events():
            for event in events:
                if isinstance(event, OutputChunk):
                    streams[event.stream] += event.data
                else:
                    last = event
    assert last is not None
    return {name: bytes(data) for name, data in streams.items()}, last


async def test_bytes_arrive_as_they_were_written(box: Sandbox):
    job = await box.commands.launch(["printf", "a\\xe2\\x00b"])
    streams, exited = await heard(job.listen())
    assert (streams["stdout"], exited.exit_code, exited.signal) == (b"a\xe2\x00b", 0, None)


async def test_output_of_any_size_reaches_a_listener_whole(box: Sandbox):
    job = await box.commands.launch(["bash", "-c", "head -c 20000000 /dev/zero; echo end >&2"])
    streams, _ = await heard(job.listen())
    assert (len(streams["stdout"]), streams["stderr"]) == (20_000_000, b"end\n")


async def test_all_listeners_hear_the_same_and_one_that_leaves_ends_nothing(box: Sandbox):
    job = await box.commands.launch(["bash", "-c", "read line; echo got $line; read line"], stdin=True)
    leaving, staying, late = job.listen(), job.listen(), job.listen()
    leaving.close()
    await job.send_stdin(b"one\n")
    await staying.next_events()
    await job.send_stdin(b"two\n")
    streams, exited = await heard(late)
    assert (streams["stdout"], exited.exit_code) == (b"got one\n", 0)


async def test_output_without_a_listener_is_dropped_and_blocks_nothing(box: Sandbox):
    job = await box.commands.launch(["bash", "-c", "read line; head -c 10000000 /dev/zero; exit 5"], stdin=True)
    job.listen().close()
    await job.send_stdin(b"go\n")
    assert (await job.wait()).exit_code == 5
    streams, exited = await heard(job.listen())
    assert (streams["stdout"], exited.exit_code) == (b"", 5)


async def test_a_listener_that_does_not_read_slows_the_job_until_it_leaves(box: Sandbox):
    job = await box.commands.launch(["bash", "-c", "head -c 50000000 /dev/zero; exit 6"])
    slow = job.listen()
    quick = job.listen()
    first = await quick.next_events()
    assert first and job.exited is None
    slow.close()
    _, exited = await heard(quick)
    assert exited.exit_code == 6


async def test_a_job_is_found_by_pid_and_tag_and_for_a_while_after_its_end(box: Sandbox):
    job = await box.commands.launch(["cat"], stdin=True, tag="mine")
    jobs = box.commands.jobs
    assert jobs.find(job.pid) is job and jobs.find(tag="mine") is job and jobs.list() == [job]
    seen = await box.commands.run(f"kill -0 {job.pid}")
    assert seen.exit_code == 0
    job.close_stdin()
    await job.wait()
    assert jobs.list() == []
    streams, exited = await heard(jobs.recall(job.pid).listen())
    assert (streams["stdout"], exited.exit_code) == (b"", 0)
    with pytest.raises(errors.ProcessNotFound):
        jobs.find(job.pid)
    with pytest.raises(errors.ProcessNotFound):
        jobs.recall(999_999)


async def test_a_signal_ends_the_job_with_its_children(box: Sandbox):
    job = await box.commands.launch(["bash", "-c", "sleep 4321 & wait"])
    job.kill()
    exited = await job.wait()
    assert (exited.signal, exited.exit_code, exited.outcome) == (9, 137, "interrupted")
    gentle = await box.commands.launch(["sleep", "4321"])
    gentle.kill(15)
    assert (await gentle.wait()).signal == 15


async def test_a_time_limit_kills(box: Sandbox):
    job = await box.commands.launch(["sleep", "60"], timeout_seconds=0.2)
    assert (await job.wait()).outcome == "timed_out"


async def test_a_working_directory_must_be_there(box: Sandbox):
    with pytest.raises(errors.FileNotFound):
        await box.commands.launch(["true"], cwd="/tmp/not/there")
    with pytest.raises(errors.NotADirectory):
        await box.commands.launch(["true"], cwd="/usr/bin/env")


async def test_unread_input_is_refused_at_the_end_and_blocks_no_other(box: Sandbox):
    job = await box.commands.launch(["sleep", "60"], stdin=True)
    writing = asyncio.create_task(job.send_stdin(bytes(8 << 20)))
    await asyncio.sleep(0)
    job.kill()
    with pytest.raises(errors.InvalidRequest):
        await asyncio.wait_for(writing, 10)


async def test_commands_that_end_at_once_are_heard_whole(box: Sandbox):
    async def one(number: int) -> bytes:
        job = await box.commands.launch(["echo", str(number)])
        return (await heard(job.listen()))[0]["stdout"]

    assert await asyncio.gather(*map(one, range(20))) == [b"%d\n" % number for number in range(20)]
