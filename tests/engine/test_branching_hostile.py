"""Kernels whose programs have taken their place, and are asked for a copy: nobody else comes to harm."""

from __future__ import annotations

import os

import pytest

from cloche import errors
from cloche.engine.engine import Engine
from cloche.engine.executions.context import Context
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import SandboxSpec

pytestmark = pytest.mark.asyncio(loop_scope="session")

# `answer(header, channel, said)` stands for the kernel's own way to answer; `said` is a channel on the copy's wires.
_TAKE_OVER = """
import os, socket, sys, time
import cloche.guest.kernel.kernel as kernels
from cloche.guest import wire
kernel = kernels.prepared[0]
honest = kernel._branching.branch

def branch(header, channel, score_fd, loop):
    copy = socket.socket(fileno=header["wires"][0])
    try:
        answer(header, channel, copy)
    finally:
        copy.close()
        for fd in header["wires"][1:]:
            os.close(fd)

def name(pid):
    def answer(header, channel, copy):
        wire.send_frame(copy, {"ev": "ready"})
        channel.send({"ev": "branched", "branch": header["branch"], "pid": pid})
        time.sleep(0.01)
    return answer

kernel._branching.branch = branch
"""


async def run(context: Context, code: str) -> str:
    result = await context.execute(code).result()
    assert result.error is None, result.error
    return result.text or ""


async def is_whole(box: Sandbox) -> bool:
    """Whether a sandbox does what it is asked."""
    return await run(await box.create_context(), "1 + 1") == "2"


_PIDS = {
    "init": "1",
    "nobody": "4194303",
    "all": "-1",
    "itself": "os.getpid()",
    "its parent": "os.getppid()",
    "another kernel": "int(other)",
    "a child in its own session": "__import__('subprocess').Popen(['sleep', '100']).pid",
}


@pytest.mark.parametrize("pid", _PIDS.values(), ids=_PIDS)
async def test_a_process_that_is_no_copy_does_not_become_a_kernel(box: Sandbox, pid: str):
    context, other = box.context(), await box.create_context()
    mine = await run(other, "import os; x = 'mine'; os.getpid()")
    await run(context, f"other = {mine}\n{_TAKE_OVER}\nanswer = name({pid})")
    with pytest.raises(errors.ProtocolViolation):
        await context.checkpoint()
    with pytest.raises(errors.ProtocolViolation):
        await context.fork(3)
    assert context.marks() == [] and len(box.contexts) == 2
    assert await run(other, "x") == "'mine'"
    assert await run(context, "1 + 1") == "2"
    assert await is_whole(box)


async def test_one_process_does_not_become_two_kernels(box: Sandbox):
    """A copy that exists already is named again; killing the second would be killing the first."""
    context = box.context()
    (fork,) = await context.fork()
    pid = await run(fork, "import os; os.getpid()")
    await run(context, f"{_TAKE_OVER}\nanswer = name({pid})")
    with pytest.raises(errors.ProtocolViolation, match="has a name"):
        await context.checkpoint()
    assert await run(fork, "1 + 1") == "2"


_ANSWERS = {
    "garbage on the copy's channel": "copy.sendall(b'x' * 1000)",
    "a frame that is too long": "copy.sendall(b'\\xff' * 8)",
    "pid is no number": (
        "wire.send_frame(copy, {'ev': 'ready'}); "
        "channel.send({'ev': 'branched', 'branch': header['branch'], 'pid': '7'})"
    ),
    "silence": "pass",
    "a descriptor": (
        "wire.send_frame(copy, {'ev': 'ready'}, b'', (0,));"
        "channel.send({'ev': 'branched', 'branch': header['branch'], 'pid': 1})"
    ),
    "its end": "os._exit(1)",
}


@pytest.mark.parametrize("said", _ANSWERS.values(), ids=_ANSWERS)
async def test_nonsense_instead_of_an_answer_is_an_error_of_its_own_context(
    box: Sandbox, said: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("cloche.engine.executions.kernel.READY_SECONDS", 0.5)
    context = box.context()
    await run(context, f"{_TAKE_OVER}\ndef answer(header, channel, copy):\n    {said}")
    with pytest.raises((errors.ProtocolViolation, errors.Unavailable)):
        await context.fork()
    monkeypatch.undo()
    assert len(box.contexts) == 1
    assert (await context.execute("1 + 1").result()).outcome in ("ok", "died")
    assert await is_whole(box)


async def test_unrequested_copies_are_dropped(box: Sandbox):
    context = box.context()
    (fork,) = await context.fork()
    await run(
        context,
        "import cloche.guest.kernel.kernel as kernels\nsay = kernels.prepared[0]._channel.send\n"
        "for odd in (None, [], {}, 'x' * 100000, 1e300, '0'):\n"
        "    say({'ev': 'branched', 'branch': odd, 'pid': odd})\n"
        "    say({'ev': 'refused', 'branch': odd, 'message': odd})\n"
        "    say({'ev': 'collected', 'branch': odd, 'status': odd, 'cpu': odd, 'rss': odd})\n",
    )
    assert [await run(each, "1 + 1") for each in (context, fork)] == ["2", "2"]


async def test_a_lie_about_a_copy_ends_no_more_than_the_copy(box: Sandbox):
    context = box.context()
    (fork,) = await context.fork()
    await run(
        context,
        "import cloche.guest.kernel.kernel as kernels\nkernel = kernels.prepared[0]\n"
        "for name in kernel._branching._names.values():\n"
        "    kernel._channel.send({'ev': 'collected', 'branch': name, 'status': -5, 'cpu': 'x', 'rss': -1})",
    )
    assert (await fork.execute("1 + 1").result()).outcome == "ok"  # a new kernel, as after any end
    assert await run(context, "1 + 1") == "2"


async def test_both_sides_of_a_fork_on_one_channel_are_one_kernel_that_broke_the_rules(engine: Engine):
    """The program forks, and parent and child speak as the kernel at once: at worst its context dies."""
    box = await engine.create(SandboxSpec())
    try:
        context = box.context()
        program = (
            "import os, socket\n"
            "sock = socket.socket(fileno=os.dup(kernels.prepared[0]._channel.fileno()))\n"
            "pid = os.fork()\n"
            "for _ in range(200): sock.send(b'\\0\\0\\0\\2\\0\\0\\0\\0{}')\n"
            "if pid == 0: os._exit(0)\n"
            "os.waitpid(pid, 0); sock.close()\n"
        )
        await context.execute("import cloche.guest.kernel.kernel as kernels\n" + program).result()
        await context.fork()
        assert await run(box.contexts[-1], "1 + 1") == "2"
        assert await run(await box.create_context(), "1 + 1") == "2"
    finally:
        await box.kill()


async def test_refusals_leave_no_descriptor_with_the_host(box: Sandbox):
    context = box.context()
    await run(context, _TAKE_OVER + "\nanswer = name(1)")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(40):
        with pytest.raises(errors.ProtocolViolation):
            await context.checkpoint()
    await run(context, "kernel._branching.branch = honest; ends = os.pipe()")
    for _ in range(40):
        with pytest.raises(errors.NotCopyable):
            await context.checkpoint()
    assert len(os.listdir("/proc/self/fd")) < before + 80  # cells are made in advance meanwhile, which have some
