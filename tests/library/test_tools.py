"""`run(code, tools=...)`: code in a sandbox calls functions of the program that runs it."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import cloche
from cloche import errors
from cloche.events import Ended, ToolsCalled

pytestmark = pytest.mark.usefixtures("library")


@pytest.fixture(scope="module")
def box(library: str) -> Iterator[cloche.Sandbox]:
    with cloche.Sandbox() as box:
        yield box


def get_weather(city: str, unit: str = "C") -> dict[str, Any]:
    """The weather of a city."""
    if city == "nowhere":
        raise LookupError("there is no such city")
    return {"city": city, "unit": unit}


def test_code_calls_functions_of_the_caller(box: cloche.Sandbox):
    run = box.run("print(get_weather.__doc__)\nawait get_weather(city='SF')", tools={"get_weather": get_weather})
    assert (run.text, run.stdout) == ("{'city': 'SF', 'unit': 'C'}", "The weather of a city.\n"), run.error
    assert box.run("'get_weather' in globals()").text == "False"


def test_thirty_calls_in_gathers_of_ten_are_three_rounds_of_one_run(box: cloche.Sandbox):
    code = """
with open("ran", "a") as file: file.write("once;")
for turn in range(3):
    got = await asyncio.gather(*(get_weather(f"{turn}-{each}") for each in range(10)))
print(got[-1]["city"], open("ran").read())
"""
    rounds: list[int] = []
    seen = lambda event: rounds.append(len(event.calls)) if isinstance(event, ToolsCalled) else None  # noqa: E731
    run = box.run(code, tools=[get_weather], on_event=seen)
    assert (run.stdout, rounds) == ("2-9 once;\n", [10, 10, 10]), run.error


def test_the_calls_of_a_round_run_at_the_same_time(box: cloche.Sandbox):
    together = threading.Barrier(12)

    def meet(n: int) -> int:
        together.wait(30)
        return n

    run = box.run("sum(await asyncio.gather(*(meet(n=n) for n in range(12))))", tools=[meet])
    assert run.text == "66", run.error


def test_an_answer_does_not_wait_for_those_beside_it(box: cloche.Sandbox):
    came = threading.Event()

    def first() -> str:
        return "first"

    def last() -> str:
        came.wait(30)
        return "last"

    def tell(what: str) -> None:
        came.set()

    code = """
slow, fast = asyncio.create_task(last()), asyncio.create_task(first())
await tell(what=await fast)
await slow
"""
    assert box.run(code, tools=[first, last, tell]).text == "'last'"


def test_a_tools_exception_is_raised_inside(box: cloche.Sandbox):
    run = box.run("await get_weather(city='nowhere')", tools=[get_weather])
    assert run.error is not None and run.outcome == "raised"
    assert (run.error.name, run.error.value) == ("ToolExecutionError", "there is no such city")

    def throw(name: str) -> None:
        raise {each.__name__: each for each in (KeyError, SystemExit, KeyboardInterrupt, StopIteration)}[name]

    code = """
for name in ("KeyError", "SystemExit", "KeyboardInterrupt", "StopIteration"):
    try:
        await throw(name)
    except ToolExecutionError as error:
        print(error)
"""
    assert box.run(code, tools=[throw]).stdout == "KeyError\nSystemExit\nKeyboardInterrupt\nStopIteration\n"
    missing = box.run("await look()", tools={"look": lambda: {}["id"]})
    assert missing.error is not None and missing.error.value == "KeyError: 'id'"


def test_a_tool_by_another_name_with_a_schema_of_its_own(box: cloche.Sandbox):
    tool = cloche.Tool(
        "look-up",
        lambda **given: given,
        description="Looks up.",
        parameters={"type": "object", "properties": {"a-b": {"type": "string"}}, "required": ["a-b"]},
    )
    assert box.run("(await look_up(a_b='x')), look_up.__doc__", tools=[tool]).text == "({'a-b': 'x'}, 'Looks up.')"
    assert box.run("await look_up()", tools=[tool]).error is not None


@dataclasses.dataclass
class Point:
    x: int
    y: int


def test_results_are_json_values(box: cloche.Sandbox):
    values: list[Any] = [Point(1, 2), ({1}, "ü"), float("nan"), {"a": b"bytes"}, "x" * 1_000_000]
    run = box.run(
        "got = await asyncio.gather(*(give(n=n) for n in range(5)))\ngot[:4], len(got[4])",
        tools={"give": lambda n: values[n]},
    )
    assert run.text == "([{'x': 1, 'y': 2}, [[1], 'ü'], None, {'a': 'Ynl0ZXM='}], 1000000)", run.error
    bad = box.run("await give()", tools={"give": lambda: object()})
    assert bad.error is not None and "no JSON value: it has a object" in bad.error.value
    huge = box.run("await give()", tools={"give": lambda: "x" * (6 << 20)})
    assert huge.error is not None and "5242880 are possible" in huge.error.value


def test_a_function_may_use_the_sandbox(box: cloche.Sandbox):
    def note(text: str) -> int:
        box.files.write("note.txt", text)
        return len(box.commands.run("cat note.txt").stdout)

    assert box.run("sum(await asyncio.gather(*(note(text='abc') for _ in range(8))))", tools=[note]).text == "24"


def test_time_with_a_function_is_not_the_programs(box: cloche.Sandbox):
    run = box.run("await slow()", tools={"slow": lambda: time.sleep(1.0) or "slept"}, timeout=0.7)
    assert (run.text, run.outcome) == ("'slept'", "ok"), run.reason


def test_a_stream_tells_of_rounds(box: cloche.Sandbox):
    with box.stream("await get_weather('a')", tools=[get_weather]) as stream:
        events = list(stream)
    (called,) = [event for event in events if isinstance(event, ToolsCalled)]
    assert [(call.id, call.name, call.input) for call in called.calls] == [("call_001", "get_weather", {"city": "a"})]
    assert isinstance(events[-1], Ended) and events[-1].outcome == "ok"


def test_a_run_that_waits_for_a_function_can_be_interrupted(box: cloche.Sandbox):
    called, free = threading.Event(), threading.Event()

    def wait() -> None:
        called.set()
        free.wait(60)

    def interrupt() -> None:
        called.wait(60)
        box.contexts.get("default").interrupt()

    other = threading.Thread(target=interrupt)
    other.start()
    try:
        assert box.run("await wait()", tools=[wait]).outcome == "interrupted"
    finally:
        free.set()
        other.join()


def test_bash_has_tools_too(box: cloche.Sandbox):
    shell = box.contexts.create("bash")
    run = shell.run('get_weather \'{"city":"a"}\'; get_weather \'{"city":"nowhere"}\'', tools=[get_weather])
    assert (run.stdout, run.stderr) == ('{"city":"a","unit":"C"}\n', "there is no such city\n")
    assert run.exit_code == 1
    piped = shell.run('echo \'{"city": "a"}\' | get_weather; get_weather \'{"unit": "F"}\'', tools=[get_weather])
    assert piped.stdout == "" and piped.stderr.count('get_weather needs {"city": ..}: give it one JSON object') == 2


def test_an_invalid_tool_is_refused_before_anything_runs(box: cloche.Sandbox):
    async def coroutine() -> None: ...

    for tools, why in (
        (5, "tools must be functions by their names"),
        ([5], "cannot be a tool"),
        ({"x": 5}, "must be a function"),
        ([len], "an argument without a name"),
        ([coroutine], "need an AsyncSandbox"),
        ({"a-b": get_weather, "a b": get_weather}, "'a-b' and 'a b'"),
        ({"!": get_weather}, "letters or digits"),
    ):
        with pytest.raises(errors.InvalidRequest, match=why):
            box.run("open('ran-anyway', 'w')", tools=tools)  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidRequest, match="programs in javascript cannot call tools"):
        box.contexts.create("javascript").run("1", tools=[get_weather])
    assert not box.files.exists("ran-anyway")
    assert box.run("1", tools={}).text == "1"


def test_functions_see_the_callers_context(box: cloche.Sandbox):
    who: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="nobody")
    who.set("the caller")
    assert box.run("await ask()", tools={"ask": who.get}).text == "'the caller'"


def test_awaiting_functions_run_on_the_callers_loop(library: str):
    async def main() -> None:
        home = asyncio.get_running_loop()
        together = asyncio.Barrier(3)

        async def meet(n: int) -> bool:
            await together.wait()
            return asyncio.get_running_loop() is home

        def plain() -> bool:
            return threading.current_thread() is threading.main_thread()

        async with cloche.AsyncSandbox() as box:
            code = "await asyncio.gather(meet(1), meet(2), meet(3), plain())"
            run = await box.run(code, tools=[meet, plain])
            assert run.text == "[True, True, True, False]", run.error
            events = [event async for event in box.stream("await plain()", tools=[plain])]
            assert any(isinstance(event, ToolsCalled) for event in events)

            async def give_up() -> None:
                raise asyncio.CancelledError

            given_up = await box.run("await give_up()", tools=[give_up])
            assert given_up.error is not None and given_up.error.name == "ToolExecutionError"

            never = asyncio.Event()

            async def wait() -> None:
                never.set()
                await asyncio.Event().wait()

            running = asyncio.create_task(box.run("await wait()", tools=[wait]))
            await never.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert (await box.run("1")).text == "1"

    asyncio.run(main())
