"""Questions about code: answered beside the running cell, by a thread that idle sandboxes do not have."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from cloche import errors
from cloche.engine.executions.assistance import MAX_MATCHES, bound_completions, decode_answer
from cloche.engine.executions.context import Context
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import Output
from cloche.model import CodeCheck, Completions

pytestmark = pytest.mark.asyncio(loop_scope="session")
THREADS = "import os; len(os.listdir('/proc/self/task'))"


async def value(context: Context, code: str) -> str | None:
    return (await context.execute(code).result()).text


async def test_only_a_kernel_that_was_asked_has_the_thread(box: Sandbox):
    context = box.context()
    await value(context, "number = 1")
    before = int(await value(context, THREADS) or 0)
    assert (await context.complete("num")).matches == ("number",)
    assert int(await value(context, THREADS) or 0) == before + 1
    assert "jedi" not in str(await value(context, "import sys; sorted(sys.modules)"))


async def test_an_answer_comes_while_a_cell_runs_and_an_interrupt_still_stops_it(box: Sandbox):
    context = box.context()
    await context.assistant()
    async with context.execute("number = 1\nprint(1, flush=True)\nimport time\nwhile True: time.sleep(9)") as running:
        async for event in running:
            if isinstance(event, Output):
                break
        assert (await context.complete("num")).matches == ("number",)
        assert (await context.check("if x:")) == CodeCheck(status="incomplete", indent=4)
        assert "seconds" in (await context.describe("time.sleep")).text
        running.interrupt()
        assert (await running.result()).outcome == "interrupted"


async def test_a_context_that_was_asked_can_be_copied_and_each_copy_asked(box: Sandbox):
    context = box.context()
    await value(context, "number = 1")
    await context.complete("num")
    mark = await context.checkpoint()
    await value(context, "numeral = 2")
    assert set((await context.complete("num")).matches) == {"number", "numeral"}
    await context.rollback(mark.id)
    assert (await context.complete("num")).matches == ("number",)
    (fork,) = await context.fork()
    assert (await fork.complete("num")).matches == ("number",)


async def test_a_forked_child_of_the_program_does_not_speak_for_the_kernel(box: Sandbox):
    context = box.context()
    await context.complete("x")
    await value(context, "import os\nif (pid := os.fork()) == 0: os._exit(0)\nos.waitpid(pid, 0)")
    assert "print" in (await context.complete("prin")).matches


async def test_a_kernel_that_is_restarted_is_asked_again(box: Sandbox):
    context = box.context()
    await value(context, "number = 1")
    assert (await context.complete("num")).matches == ("number",)
    await context.restart()
    assert (await context.complete("num")).matches == ()


async def test_a_program_that_writes_to_the_host_instead_harms_only_its_own_kernel(box: Sandbox):
    context = box.context()
    await context.complete("x")
    code = """
import os, socket
for fd in range(3, 64):
    try: socket.socket(fileno=os.dup(fd)).send(b"\\xff" * 64)
    except OSError: pass
"""
    await context.execute(code).result()
    with contextlib.suppress(errors.Unavailable):
        await context.complete("x")
    assert (await context.execute("1").result()).outcome in ("ok", "died")
    assert await value(await box.create_context(), "1") == "1"


async def test_too_many_or_too_long_questions_are_refused(box: Sandbox):
    context = box.context()
    with pytest.raises(errors.InvalidRequest):
        await context.complete("x" * (2 << 20))
    answers = await asyncio.gather(*(context.complete("prin") for _ in range(100)), return_exceptions=True)
    assert {type(each) for each in answers} == {Completions, errors.Unavailable}


async def test_answers_are_bounded():
    found = bound_completions(Completions(start=-5, end=99, matches=("\ud800" * 2000,) * 2000, types=("",)), "abc")
    assert (found.start, found.end, len(found.matches)) == (0, 3, MAX_MATCHES)
    assert found.matches[0].isascii()
    for body in (b"", b"[]", b"{" * 10_000, b'{"start": 1, "end": "x"}', b"\xff"):
        with pytest.raises(errors.ProtocolViolation):
            decode_answer(body, Completions)
