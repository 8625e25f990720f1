"""Commands and terminals."""

from __future__ import annotations

import asyncio
import os

import pytest

from cloche import errors
from cloche.engine.commands.process import SandboxProcess
from cloche.engine.engine import Engine
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import Exited, Output
from cloche.model import Limits, SandboxSpec

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_output_and_exit_code(box: Sandbox):
    result = await box.commands.run("echo out; echo err >&2; exit 3")
    assert (result.stdout, result.stderr, result.exit_code, result.outcome) == ("out\n", "err\n", 3, "ok")


async def test_a_list_is_not_for_the_shell(box: Sandbox):
    assert (await box.commands.run(["echo", "$HOME;", "a b"])).stdout == "$HOME; a b\n"
    assert (await box.commands.run(["no-such-program"])).exit_code == 127


async def test_env_cwd_and_stdin(box: Sandbox):
    result = await box.commands.run("pwd; echo $A; cat", env={"A": "é"}, cwd="/tmp", stdin="given")
    assert result.stdout == "/tmp\né\ngiven"
    assert (await box.commands.run("head -c 3", stdin=bytes(5 << 20))).stdout == "\0\0\0"
    assert (await box.commands.run("cat")).stdout == ""


async def test_a_signal_is_128_and_more(box: Sandbox):
    result = await box.commands.run("kill -TERM $$")
    assert (result.exit_code, result.outcome) == (143, "died")


async def test_a_timeout_kills_the_whole_session(box: Sandbox):
    own = f"12{os.getpid()}"  # without a pid namespace, others' processes are seen too
    result = await box.commands.run(f"sleep {own} & sleep {own}", timeout_seconds=0.3)
    assert (result.outcome, result.exit_code) == ("timed_out", 137)
    left = await box.commands.run(f"ps -eo args 2>/dev/null | grep -c '^sleep {own[:-1]}[{own[-1]}]' || true")
    assert left.stdout.strip() in ("0", "")


async def test_children_that_keep_the_pipes_do_not_keep_the_caller(box: Sandbox):
    result = await box.commands.run("sleep 20 & echo done")
    assert (result.stdout, result.exit_code) == ("done\n", 0)


async def test_output_is_bounded(engine: Engine):
    box = await engine.create(SandboxSpec(limits=Limits(output_bytes=10_000)))
    try:
        result = await box.commands.run("head -c 3000000 /dev/zero | tr '\\0' x")
        assert (len(result.stdout), result.exit_code) == (10_000, 0)
        assert "limit of 10000 bytes" in result.stderr
    finally:
        await box.kill()


async def read_until(process: SandboxProcess, text: str) -> str:
    seen = ""
    async for event in process:
        if isinstance(event, Output):
            seen += event.text
            if text in seen:
                return seen
    raise AssertionError(f"{text!r} never came: {seen!r}")


async def test_a_conversation_over_stdin(box: Sandbox):
    async with await box.commands.start("while read x; do echo got $x; done", stdin=True) as process:
        await process.send_stdin(b"one\n")
        assert "got one" in await read_until(process, "got one")
        process.close_stdin()
        events = [event async for event in process]
    assert isinstance(events[-1], Exited) and events[-1].exit_code == 0
    with pytest.raises(errors.InvalidRequest):
        await process.send_stdin(b"late")


async def test_leaving_a_process_kills_it(box: Sandbox):
    async with await box.commands.start("sleep 1234") as process:
        assert [info.id for info in await box.commands.list()] == [process.id]
    assert process.exited is not None and process.exited.outcome == "interrupted"
    assert await box.commands.list() == []
    with pytest.raises(errors.ProcessNotFound):
        box.commands.kill(process.id)


async def test_a_terminal_has_a_size_that_can_change(box: Sandbox):
    async with await box.commands.start(["/bin/sh"], pty=(30, 90)) as terminal:
        await terminal.send_stdin(b"stty size; echo re''ady\n")
        assert "30 90" in await read_until(terminal, "ready")
        terminal.resize(40, 100)
        await terminal.send_stdin(b"stty size; echo a''gain; exit 4\n")
        assert "40 100" in await read_until(terminal, "again")
        events = [event async for event in terminal]
    assert isinstance(events[-1], Exited) and events[-1].exit_code == 4
    with pytest.raises(errors.InvalidRequest):
        terminal.resize(1, 1)


async def test_the_end_of_a_sandbox_ends_its_processes(engine: Engine):
    box = await engine.create(SandboxSpec())
    running = asyncio.create_task(box.commands.run("sleep 60"))
    while not await box.commands.list():
        await asyncio.sleep(0.01)
    await box.kill()
    result = await running
    assert (result.outcome, result.reason) == ("died", "sandbox killed")


@pytest.mark.parametrize("command", ["a\0b", ["a", 1], [], "\ud800", "x" * 200_000, ["true", *["x" * 100_000] * 11]])
async def test_a_command_that_makes_no_sense_is_refused(box: Sandbox, command):
    with pytest.raises(errors.InvalidRequest):
        await box.commands.run(command)


@pytest.mark.parametrize("how", [{"user": "nobody"}, {"timeout_seconds": -1}, {"env": {"A=": "1"}}, {"cwd": "a\0"}])
async def test_options_that_make_no_sense_are_refused(box: Sandbox, how):
    with pytest.raises(errors.InvalidRequest):
        await box.commands.run("true", **how)
