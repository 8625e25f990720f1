"""Executions: first Started, last exactly one Ended, whatever happens."""

from __future__ import annotations

import asyncio

import pytest

from cloche import errors
from cloche.engine.engine import Engine
from cloche.engine.executions.execution import Execution
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import AnyEvent, Display, Ended, Input, Output, Run, Started, Truncated, fold
from cloche.guest import wire
from cloche.model import Limits, SandboxSpec

pytestmark = pytest.mark.asyncio(loop_scope="session")


def check(events: list[AnyEvent]) -> Run:
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Ended)
    assert sum(isinstance(event, (Started, Ended)) for event in events) == 2
    return fold(events)


async def events_of(execution: Execution) -> Run:
    return check([event async for event in execution])


async def run(box: Sandbox, code: str, **how) -> Run:
    return await events_of(box.context().execute(code, **how))


async def until_output(execution: Execution, text: str) -> list[AnyEvent]:
    seen: list[AnyEvent] = []
    async for event in execution:
        seen.append(event)
        if isinstance(event, Output) and text in event.text:
            return seen
    raise AssertionError(f"{text!r} never came: {seen}")


async def test_a_value_and_state(box: Sandbox):
    await run(box, "x = 20")
    answer = await run(box, "x * 2 + 2")
    assert (answer.text, answer.outcome, answer.error) == ("42", "ok", None)
    assert answer.usage.wall_seconds > 0
    assert answer.usage.memory_peak_bytes > 0


async def test_an_exception_is_data(box: Sandbox):
    raised = await run(box, "1/0")
    assert raised.outcome == "raised"
    assert raised.error is not None and raised.error.name == "ZeroDivisionError" and "1/0" in raised.error.traceback


@pytest.mark.parametrize("code", ["", "   \n", "# nothing"])
async def test_code_without_anything_to_do_is_ok(box: Sandbox, code: str):
    assert (await run(box, code)).outcome == "ok"


@pytest.mark.parametrize("code", ["\0", "x = 'a\0b'", "'\ud800'.encode()", "def", "print('\udfff')"])
async def test_bad_code_is_the_programs_affair(box: Sandbox, code: str):
    assert (await run(box, code)).outcome == "raised"
    assert (await run(box, "1")).text == "1"


@pytest.mark.long
async def test_a_program_of_fifty_megabytes_runs(box: Sandbox):
    code = "x = '" + "y" * (50 << 20) + "'\nlen(x)"
    assert (await run(box, code)).text == str(50 << 20)


async def test_output_and_displays_keep_their_order(box: Sandbox):
    step = "print('o', i); display(i); print('e', i, file=sys.stderr); display(-i)"
    code = f"import sys\nfor i in range(5):\n  {step}\n'last'"
    seen: list[str] = []
    async for event in box.context().execute(code):
        if isinstance(event, Output):
            seen += event.text.splitlines()
        elif isinstance(event, Display):
            seen.append(event.data["text/plain"])
    assert seen == [each for i in range(5) for each in (f"o {i}", str(i), f"e {i}", str(-i))] + ["'last'"]


@pytest.mark.parametrize("pause", ["", "time.sleep(0.3)"], ids=["at once", "when all was read"])
async def test_output_that_ends_within_a_partial_mark_is_kept(box: Sandbox, pause: str):
    """What may be the beginning of a mark (see `guest.wire`) is the program's, once it is known that none follows."""
    code = f"import sys, time; _ = sys.stdout.write('a\\x1b]cloche;'), sys.stdout.flush(); {pause}\n'value'"
    events = [event async for event in box.context().execute(code)]
    assert [type(event) for event in events if not isinstance(event, Output)] == [Started, Display, Ended]
    assert isinstance(events[-2], Display)
    assert check(events).stdout == "a\x1b]cloche;"


async def test_output_of_subprocesses_and_c_code_is_caught(box: Sandbox):
    answer = await run(
        box, "import os, subprocess\nsubprocess.run(['echo', 'child'])\nos.write(1, b'raw\\n'); os.write(2, b'err\\n');"
    )
    assert answer.stdout == "child\nraw\n"
    assert answer.stderr == "err\n"


async def test_env_and_cwd_hold_for_one_run(box: Sandbox):
    code = "import os; (os.environ.get('CLOCHE_T'), os.getcwd())"
    before = (await run(box, code)).text
    assert (await run(box, code, env={"CLOCHE_T": "é"}, cwd="/tmp")).text == "('é', '/tmp')"
    assert (await run(box, code)).text == before


async def test_a_timeout_interrupts_and_keeps_the_state(box: Sandbox):
    await run(box, "kept = 7")
    late = await run(box, "import time; time.sleep(60)", timeout_seconds=0.3)
    assert late.outcome == "timed_out"
    assert late.reason is not None and "kept" in late.reason
    assert late.usage.wall_seconds < 20
    assert (await run(box, "kept")).text == "7"


async def test_a_program_that_ignores_a_timeout_is_killed_and_the_context_works_on(box: Sandbox):
    await run(box, "gone = 7")
    code = "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\nwhile True: time.sleep(0.1)"
    late = await run(box, code, timeout_seconds=0.3)
    assert late.outcome == "timed_out"
    assert late.reason is not None and "lost" in late.reason
    after = await run(box, "'gone' in globals()")
    assert (after.text, after.stderr) == ("False", "")


async def test_an_interrupt_keeps_the_state(box: Sandbox):
    await run(box, "kept = 8")
    execution = box.context().execute("import time\nprint('in', flush=True)\ntime.sleep(60)")
    seen = await until_output(execution, "in")
    assert box.context().interrupt()
    seen += [event async for event in execution]
    assert check(seen).outcome == "interrupted"
    assert (await run(box, "kept")).text == "8"
    assert not box.context().interrupt()


async def test_an_interrupt_at_once_is_not_lost(box: Sandbox):
    async with box.context().execute("import time; time.sleep(60)") as execution:
        execution.interrupt()
        assert check([event async for event in execution]).outcome == "interrupted"


@pytest.mark.parametrize(
    "spoil", ["raise type('E' * 5_000_000, (Exception,), {})()", "get_ipython().execution_count = -5"]
)
async def test_a_cell_after_one_that_could_not_be_told_properly_streams_all_that_it_prints(box: Sandbox, spoil: str):
    await run(box, spoil)
    assert len((await run(box, "print('x' * 300_000)")).stdout) == 300_001
    async with box.context().execute("import time\nprint('in', flush=True)\ntime.sleep(60)") as execution:
        await until_output(execution, "in")
        execution.interrupt()
        assert [event async for event in execution][-1].outcome == "interrupted"


async def test_leaving_early_interrupts_and_the_next_run_works(box: Sandbox):
    async with box.context().execute("import time\nprint('in', flush=True)\ntime.sleep(60)") as execution:
        await until_output(execution, "in")
    assert execution.ended is not None and execution.ended.outcome == "interrupted"
    assert (await run(box, "1")).text == "1"


async def test_cancelling_the_waiting_task_interrupts(box: Sandbox):
    context = box.context()
    waiting = asyncio.create_task(context.execute("import time\ntime.sleep(60)").result())
    while context._running is None or not context._running.started:
        await asyncio.sleep(0.005)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (await run(box, "1")).text == "1"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; os._exit(3)", "exited with code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
        ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
    ],
)
async def test_a_kernel_that_dies_says_how_once_and_the_context_works_on(box: Sandbox, code: str, reason: str):
    await run(box, "gone = 1")
    died = await run(box, "print('last words', flush=True)\n" + code)
    assert died.outcome == "died"
    assert died.reason is not None and reason in died.reason
    assert died.stdout == "last words\n"
    after = await run(box, "'gone' in globals()")
    assert (after.text, after.stderr) == ("False", "")


async def test_a_kernel_that_dies_while_idle_is_told_in_the_next_run(box: Sandbox):
    code = "import os, threading\nthreading.Timer(0.05, os._exit, [9]).start()"
    assert (await run(box, code)).outcome == "ok"
    context = box.context()
    while context._kernel is not None:
        await asyncio.sleep(0.01)
    events = [event async for event in context.execute("1")]
    assert isinstance(events[1], Output) and "exited with code 9" in events[1].text and "lost" in events[1].text
    assert check(events).text == "1"
    assert (await run(box, "2")).stderr == ""


@pytest.mark.parametrize("started", [False, True])
async def test_executions_of_a_killed_sandbox_end_and_say_so(engine: Engine, started: bool):
    box = await engine.create(SandboxSpec())
    context = box.context()
    running = context.execute("import time\nprint('in', flush=True)\ntime.sleep(60)")
    seen = await until_output(running, "in")
    queued = asyncio.create_task(context.execute("1").result()) if started else None
    await asyncio.sleep(0)
    await box.kill()
    seen += [event async for event in running]
    assert (check(seen).outcome, check(seen).reason) == ("died", "sandbox killed")
    if queued is not None:
        assert ((await queued).outcome, (await queued).reason) == ("died", "sandbox killed")
    with pytest.raises(errors.SandboxKilled):
        context.execute("1")


async def test_a_deadline_ends_running_executions(engine: Engine):
    box = await engine.create(SandboxSpec(lifetime_seconds=0.5))
    ended = await run(box, "import time; time.sleep(60)")
    assert (ended.outcome, ended.reason) == ("died", "deadline")
    with pytest.raises(errors.SandboxExpired):
        await engine.get(box.id, "local")


async def test_executions_of_a_context_run_one_after_another_in_order(box: Sandbox):
    context = box.context()
    await run(box, "seen = []")
    await asyncio.gather(
        *(context.execute(f"import time; time.sleep(0.01); seen.append({i})").result() for i in range(10))
    )
    assert (await run(box, "seen")).text == str(list(range(10)))


async def test_output_over_the_limit_is_dropped_and_told(engine: Engine):
    box = await engine.create(SandboxSpec(limits=Limits(output_bytes=100_000)))
    try:
        events = [event async for event in box.context().execute("print('x' * 5_000_000)\nprint('end')\n6*7")]
        answer = check(events)
        assert answer.outcome == "ok"
        assert len(answer.stdout) == 100_000
        assert "limit of 100000 bytes" in answer.stderr
        truncated = [event for event in events if isinstance(event, Truncated)]
        assert {event.stream for event in truncated} >= {"stdout"}
        assert sum(event.dropped_bytes for event in truncated if event.stream == "stdout") == 5_000_005 - 100_000
        assert (await run(box, "1")).text == "1"
    finally:
        await box.kill()


async def test_an_output_flood_of_a_timed_out_program_is_bounded(engine: Engine):
    box = await engine.create(SandboxSpec(limits=Limits(output_bytes=1 << 20)))
    try:
        late = await run(box, "while True: print('x' * 1000)", timeout_seconds=0.5)
        assert late.outcome == "timed_out"
        assert len(late.stdout) <= 1 << 20
    finally:
        await box.kill()


async def test_a_reader_that_stops_holds_the_program_and_not_our_memory(box: Sandbox):
    async with box.context().execute("print('x' * (20 << 20))\n'done'") as execution:
        first = await execution.__anext__()
        assert isinstance(first, Started)
        await asyncio.sleep(0.5)  # time to send all of it, if nothing held it
        assert execution._events._bytes < 8 << 20
        rest = [event async for event in execution]
    answer = check([first, *rest])
    assert (len(answer.stdout), answer.text) == ((20 << 20) + 1, "'done'")


async def test_output_between_runs_comes_with_the_next_one(box: Sandbox):
    await run(box, "import threading\nthreading.Timer(0.05, lambda: print('later', flush=True)).start()")
    context = box.context()
    while not context._kernel._idle:
        await asyncio.sleep(0.01)
    assert "later" in (await run(box, "1")).stdout


async def test_input_is_answered_or_refused(box: Sandbox):
    assert (await run(box, "input('a') + input('b')", input="one\ntwo\n")).text == "'onetwo'"
    assert (await run(box, "input()", input=["x"])).text == "'x'"
    assert (await run(box, "input('name?')", input=lambda prompt: prompt.upper())).text == "'NAME?'"
    assert (await run(box, "input(); input()", input="only")).outcome == "raised"
    assert (await run(box, "input()")).outcome == "raised"

    def fails(prompt: str) -> str:
        raise KeyError(prompt)

    assert (await run(box, "input('q')", input=fails)).outcome == "raised"


async def test_a_caller_can_answer_an_input_event(box: Sandbox):
    events = []
    async with box.context().execute("input('who? ')", input=True) as execution:
        async for event in execution:
            events.append(event)
            if isinstance(event, Input):
                assert event.prompt == "who? "
                execution.answer("me")
    assert check(events).text == "'me'"


async def test_an_execution_is_used_once(box: Sandbox):
    execution = box.context().execute("1")
    await execution.result()
    with pytest.raises(errors.InvalidRequest):
        async with execution:
            pass


@pytest.mark.parametrize("timeout", [-1, 0, float("nan"), float("inf"), "1"])
async def test_a_timeout_that_makes_no_sense_is_refused(box: Sandbox, timeout):
    with pytest.raises(errors.InvalidRequest):
        box.context().execute("1", timeout_seconds=timeout)


async def test_contexts_do_not_share_names_and_have_their_own_queue(box: Sandbox):
    other = await box.create_context()
    await run(box, "a = 1")
    sleeping = asyncio.create_task(box.context().execute("import time; time.sleep(60)", timeout_seconds=30).result())
    assert (await events_of(other.execute("'a' in globals()"))).text == "False"
    while not box.context().interrupt():
        await asyncio.sleep(0.01)
    assert (await sleeping).outcome == "interrupted"
    box.remove_context(other.id)
    with pytest.raises(errors.ContextNotFound):
        box.context(other.id)
    with pytest.raises(errors.ContextNotFound):
        other.execute("1")


async def test_a_restart_keeps_the_id_and_loses_the_state(box: Sandbox):
    context = box.context()
    await run(box, "a = 1")
    execution = context.execute("import time\nprint('in', flush=True)\ntime.sleep(60)")
    seen = await until_output(execution, "in")
    await context.restart()
    seen += [event async for event in execution]
    assert check(seen).outcome == "died"
    assert check(seen).reason == "kernel killed: the context was restarted"
    assert (await run(box, "'a' in globals()")).text == "False"
    assert box.context() is context


async def test_a_restart_ends_processes_of_the_context(box: Sandbox):
    started = await run(box, "import subprocess\nsubprocess.Popen(['sleep', '1234']).pid")
    await box.context().restart()
    alive = f"import os; open('/proc/{started.text}/cmdline').read() if os.path.exists('/proc/{started.text}') else ''"
    for _ in range(200):
        if "1234" not in ((await run(box, alive)).text or ""):
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the context's process outlived its restart")


async def test_a_language_that_does_not_exist_is_refused(box: Sandbox):
    with pytest.raises(errors.InvalidRequest, match="python"):
        await box.create_context(language="cobol")


async def test_out_of_memory_is_an_outcome_of_its_own_and_other_contexts_live_on(engine: Engine, memory_is_enforced):
    if engine.config.backend == "plain-unsafe":
        pytest.skip("has no limits")
    box = await engine.create(SandboxSpec(limits=Limits(memory_bytes=256 << 20, space_bytes=16 << 20)))
    try:
        other = await box.create_context()
        await other.execute("kept = 1").result()
        bomb = await run(box, "x = []\nwhile True: x.append(b'x' * (16 << 20))", timeout_seconds=60)
        assert bomb.outcome == "out_of_memory" or (not memory_is_enforced and bomb.error.name == "MemoryError")
        assert (await events_of(other.execute("kept"))).text == "1"
        assert (await run(box, "6*7")).text == "42"
        killed = await run(box, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
        assert killed.outcome == "died"
    finally:
        await box.kill()


CONTROL = {f"A{number}": "\x01" * 100_000 for number in range(8)}  # 800 kB, and six times that in JSON


@pytest.mark.parametrize(
    "how",
    [
        {"env": CONTROL},
        {"argv": ["y" * 120_000] * 60},
        {"argv": ["\x01" * 100_000] * 8},
        {"cwd": "/" + "x" * 5_000_000},
        {"argv": [1]},
        {"argv": "text"},
    ],
    ids=["env", "long argv", "argv", "cwd", "numbers", "no list"],
)
async def test_code_too_large_for_a_frame_is_refused_and_the_next_run_works(box: Sandbox, how):
    with pytest.raises(errors.InvalidRequest):
        await box.context().execute("1", **how).result()
    assert (await asyncio.wait_for(box.context().execute("6*7").result(), 30)).text == "42"


async def test_any_failure_before_the_kernel_frees_the_context(box: Sandbox):
    execution = box.context().execute("1")
    execution._settings = wire.encode_json({"env": CONTROL})
    with pytest.raises(errors.InvalidRequest):
        await execution.result()
    assert execution.ended is not None and execution.ended.outcome == "died"
    assert (await asyncio.wait_for(box.context().execute("6*7").result(), 30)).text == "42"
