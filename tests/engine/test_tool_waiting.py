"""Programs that wait for their tools: whose time that is, and how it ends."""

from __future__ import annotations

import asyncio

import pytest
from tests.engine.tool_programs import ECHO, Client, execute, script

from cloche import errors
from cloche.engine.commands.program import PythonScript
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import ToolsCalled
from cloche.model import ToolCall, ToolResult

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_time_with_the_client_is_not_the_programs(box: Sandbox):
    source = "await echo_it(); await echo_it(); print('done')"
    result = await script(box, source, Client(delay_seconds=0.7), timeout_seconds=1.0)
    assert (result.stdout, result.outcome) == ("done\n", "ok"), result.stderr
    own = await script(box, "import time; await echo_it(); time.sleep(60)", Client(), timeout_seconds=1.0)
    assert own.outcome == "timed_out"


async def test_time_with_the_client_is_not_a_contexts(box: Sandbox):
    async with box.context().execute("await echo_it(); print(1)", tools=[ECHO], timeout_seconds=0.5) as execution:
        async for event in execution:
            if isinstance(event, ToolsCalled):
                await asyncio.sleep(0.8)  # more than the time limit of the execution
                execution.answer_tools([ToolResult(call_id=event.calls[0].id)])
        assert execution.ended is not None and execution.ended.outcome == "ok"
    late = await execute(box, "import time; await echo_it(); time.sleep(60)", Client(), timeout_seconds=0.5)
    assert late.outcome == "timed_out"


@pytest.mark.parametrize(("language", "code"), [("python", "await echo_it()"), ("bash", "echo_it")])
async def test_a_run_that_waits_can_be_interrupted_and_the_context_lives_on(box: Sandbox, language: str, code: str):
    context = box.default_context(language)
    await context.execute("x=5").result()
    async with context.execute(code, tools=[ECHO]) as execution:
        async for event in execution:
            if isinstance(event, ToolsCalled):
                execution.interrupt()
        assert execution.ended is not None and execution.ended.outcome == "interrupted"
    kept = await context.execute("print(x)" if language == "python" else "echo $x").result()
    assert kept.stdout == "5\n"


async def test_leaving_a_run_that_waits_ends_it(box: Sandbox):
    async with box.context().execute("await echo_it()", tools=[ECHO]) as execution:
        async for event in execution:
            if isinstance(event, ToolsCalled):
                break
    assert execution.ended is not None and execution.ended.outcome == "interrupted"
    assert (await box.context().execute("1").result()).outcome == "ok"


async def test_a_program_that_is_killed_takes_its_calls_along(box: Sandbox):
    async with box.tools.make_offer([ECHO]) as offer:
        program = PythonScript(source="await asyncio.gather(echo_it(), echo_it())", awaits=True, tools=offer.header)
        process = await box.commands.start(script=program)
        offer.runs(process)
        async with process:
            calls = await offer.next_round()
            process.kill()
            await process.result()
        while offer.calls:
            await asyncio.sleep(0.001)
        offer.answer([ToolResult(call_id=call.id) for call in calls])  # nobody is there; nobody is harmed
    assert await offer.next_round() == ()


async def test_a_sandbox_that_ends_ends_its_offers(box: Sandbox):
    async with box.tools.make_offer([ECHO]) as offer:
        process = await box.commands.start(
            script=PythonScript(source="await echo_it()", awaits=True, tools=offer.header)
        )
        offer.runs(process)
        await offer.next_round()
        waiting = asyncio.create_task(offer.next_round())
        await asyncio.sleep(0)
        await box.kill()
        assert await waiting == ()
    with pytest.raises(errors.Gone):
        await box.tools.make_offer([ECHO]).open()


async def test_results_must_be_of_calls_that_were_made(box: Sandbox):
    async with box.tools.make_offer([ECHO]) as offer:
        process = await box.commands.start(
            script=PythonScript(source="await echo_it()", awaits=True, tools=offer.header)
        )
        async with process:
            (call,) = await offer.next_round()
            for wrong in ("call_002", "call_1", "call_" + "1" * 5000, "x", ""):
                with pytest.raises(errors.InvalidRequest, match="made no call"):
                    offer.answer([ToolResult(call_id=call.id), ToolResult(call_id=wrong)])
            with pytest.raises(errors.InvalidRequest, match="has 2 results"):
                offer.answer([ToolResult(call_id=call.id), ToolResult(call_id=call.id)])
            assert offer.calls == ("call_001",)
            offer.answer([ToolResult(call_id=call.id)])
            assert (await process.result()).exit_code == 0


@pytest.mark.parametrize(
    "then",
    [
        "await inner()",
        "async with asyncio.TaskGroup() as group: group.create_task(inner())",
        "try: await inner()\nexcept ToolExecutionError: raise ValueError",
    ],
)
async def test_internals_of_a_tool_function_are_in_no_traceback(box: Sandbox, then: str):
    def fail(call: ToolCall) -> None:
        raise LookupError("no")

    source = f"async def inner():\n    await echo_it()\n{then}"
    run = await execute(box, source, Client(fail))
    assert run.error is not None
    for text in ((await script(box, source, Client(fail))).stderr, run.error.traceback):
        assert "await echo_it()" in text and "ToolExecutionError: no" in text
        assert "<tool" not in text and "model.py" not in text and "__call__" not in text
