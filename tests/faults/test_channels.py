"""Inits and zygotes that break the rules of their channels, or do not read what is sent to them.

Both are ours, but not trusted: a template's package ran in the zygote, and what it does when an interpreter starts runs
before inits are forked. Here such a package replaces what they do. What kernels can send is in `escape/test_frames.py`, and what zygotes announce in
`escape/test_nursery.py`.
"""

# ruff: noqa: E501 - a lie reads better on one line

from __future__ import annotations

import asyncio
import os
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.escape.test_nursery import hostile, nursery_of, trace
from tests.faults.test_hung import engine_with

from cloche import errors
from cloche.engine.sandboxes import files, init_client
from cloche.engine.sandboxes.init_client import InitReply
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.isolation import nursery
from cloche.model import MIB, SandboxSpec

__all__ = ["hostile", "nursery_of", "trace"]
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.long]

ANSWER = """
import cloche.guest.init.init as i, os, socket, time
from cloche.guest import wire
def answer(self, header, body):
    number = header["id"]
    send = lambda header, body=b"", fds=(): wire.send_frame(self._channel, header, body, fds)
    {}
i.Init._answer_request = answer
"""
INITS = {
    "garbage": "self._channel.sendall(os.urandom(100_000))",
    "half a frame, then nothing": "self._channel.sendall(bytes([0, 0, 4, 0, 0, 0, 0, 0]) + b'{'); time.sleep(600)",
    "no result": "send({'id': number})",
    "an error that is none": "send({'id': number, 'err': {'code': 'format_the_disk', 'message': ['x']}})",
    "answers to what nobody asked": "[send({'id': n, 'ok': {}}) for n in range(10**6, 10**6 + 5000)]; send({'id': number})",
    "strange events": "[send({'ev': each, 'kernel': each}) for each in ('kernel_exited', ['x'], None)]; send({'id': number})",
    "descriptors that nobody asked for": "send({'id': number, 'ok': {}}, b'', [0, 1, 2])",
    "more descriptors than it announces": "socket.send_fds(self._channel, [b'x'], [0] * 60); time.sleep(600)",
    "millions of lists": """send({'id': number, 'ok': {}}, b'{"files":[' + b'[],' * 5_000_000 + b'1]}')""",
    "nesting without end": """send({'id': number, 'ok': {}}, b'{"files":[' + b'[' * 5_000_000)""",
    "events without end": "while True: send({'ev': 'changes', 'watch': 1, 'changes': [['created', 'x' * 1000]] * 100})",
    "its own end": "os._exit(0)",
    "silence": "time.sleep(600)",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def neighbour(place: Path) -> AsyncIterator[Sandbox]:
    """One whose init is honest, in the same process."""
    async with engine_with(place) as engine:
        box = await engine.create(SandboxSpec(owner="neighbour"))
        await box.context().execute("kept = 41").result()
        yield box


async def assert_unharmed(neighbour: Sandbox) -> None:
    assert (await neighbour.context().execute("kept + 1").result()).text == "42"
    assert (await neighbour.commands.run("echo there")).stdout == "there\n"


def memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_masses_of_values_from_an_init_are_refused_before_they_are_parsed():
    """Right ones, by their types: as objects they would be a gibibyte, and the host would do little else meanwhile."""
    reply = InitReply({"passed": {}, "at_ns": 1}, b'{"files":[' + b'["a",1,null],' * 1_000_000 + b"1]}", [])
    tracemalloc.start()
    try:
        with pytest.raises(errors.ProtocolViolation):
            files.parse_survey(reply)
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("lie", INITS)
async def test_an_init_that_answers_with(nursery_of, neighbour: Sandbox, monkeypatch, lie: str):
    """Whoever asked is told that something is wrong, within the time that any init has."""
    monkeypatch.setattr(init_client, "HUNG_SECONDS", 1.0)
    before = memory()
    async with asyncio.timeout(60), nursery_of("", ANSWER.format(INITS[lie])) as engine:
        box = await engine.create(SandboxSpec(owner="me"))
        asking = asyncio.create_task(box.files.list("/"))
        await assert_unharmed(neighbour)
        if lie == "events without end":  # which is an answer that does not come; only its owner can end that
            await asyncio.sleep(2)  # more than HUNG_SECONDS
            await assert_unharmed(neighbour)
            await box.kill()
        with pytest.raises(errors.ClocheError):
            await asking
        await box.kill()
    assert memory() - before < 64 * MIB
    await assert_unharmed(neighbour)


async def test_an_init_that_reads_nothing_holds_up_its_own_uploads_and_no_memory(
    nursery_of,
    neighbour: Sandbox,
    monkeypatch,
):
    monkeypatch.setattr(init_client, "HUNG_SECONDS", 2.0)
    deaf = "import cloche.guest.init.init as i, time\ni.Init._serve_host = lambda self: time.sleep(600)"
    async with asyncio.timeout(60), nursery_of("", deaf) as engine:
        box = await engine.create(SandboxSpec(owner="me"))
        before = memory()
        content = b"x" * 200_000
        writing = [asyncio.create_task(box.files.write(f"/mnt/data/{n}", content)) for n in range(500)]
        await asyncio.sleep(1)  # time to send all of it, if nothing bounded it
        await assert_unharmed(neighbour)
        assert memory() - before < 64 * MIB
        told = await asyncio.gather(*writing, return_exceptions=True)
        assert {type(each) for each in told} == {errors.SandboxLost}


ZYGOTES = {
    "millions of lists": """send({'id': number, 'ok': {}}, b'{"files":[' + b'[],' * 5_000_000 + b'1]}')""",
    "nesting without end": """send({'id': number, 'ok': {}}, b'{"files":[' + b'[' * 5_000_000)""",
    "events without end": "while True: z.wire.send_frame(self._channel, {'ev': 'kernel_exited', 'cell': 'x' * 1000})",
    "half a frame, then nothing": "self._channel.sendall(b'\\0\\0\\4\\0\\0\\0\\0\\0{'); __import__('time').sleep(600)",
    "silence": "__import__('time').sleep(600)",
}


@pytest.mark.parametrize("lie", ZYGOTES)
async def test_a_zygote_that_answers_with(nursery_of, neighbour: Sandbox, monkeypatch, lie: str):
    monkeypatch.setattr(nursery, "SPAWN_SECONDS", 1.0)
    attack = f"import cloche.guest.zygote.zygote as z\ndef spawn(self, *_):\n    {ZYGOTES[lie]}\nz.Zygote._spawn_cell = spawn"
    before = memory()
    async with asyncio.timeout(60), nursery_of(attack) as engine:
        making = asyncio.create_task(engine.create(SandboxSpec(owner="me")))
        await assert_unharmed(neighbour)
        with pytest.raises(errors.NurseryFailed) as failed:
            await making
        assert failed.value.retry_after_seconds
    assert memory() - before < 64 * MIB
    await assert_unharmed(neighbour)


@pytest.mark.parametrize("end", ["raise ConnectionResetError(104, 'Connection reset by peer')", "os._exit(1)"])
async def test_a_first_kernel_that_ends_early_is_not_the_callers_fault(nursery_of, end: str):
    """Init was killed, say, and the kernel was the first to notice. Its child keeps init from noticing before."""
    early = f"import cloche.guest.init.processes as p, os, time\ndef end(*_):\n    os.fork() or time.sleep(60)\n    {end}\nassert p.enter_enclosure\np.enter_enclosure = end"
    async with asyncio.timeout(60), nursery_of(early) as engine:
        with pytest.raises(errors.Unavailable, match="a new sandbox died before it was ready: the kernel exited"):
            await engine.create(SandboxSpec(owner="me"))
