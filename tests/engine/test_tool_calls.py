"""Programs that call tools, which live with the client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tests.engine.tool_programs import ECHO, Client, execute, script, shell

from cloche import errors
from cloche.engine.commands.program import PythonScript
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import Run, ToolsCalled, fold
from cloche.model import MAX_TOOL_RESULT_BYTES, ToolCall, ToolDefinition, ToolResult

pytestmark = pytest.mark.asyncio(loop_scope="session")


# --- Python


async def test_thirty_calls_in_gathers_of_ten_are_three_rounds_of_one_run(box: Sandbox):
    client = Client(lambda call: {"name": call.name, "city": call.input["city"]})
    result = await script(
        box,
        """
with open("count", "a") as file:
    file.write("ran;")
for turn in range(3):
    got = await asyncio.gather(*(get_weather(city=f"{turn}-{each}") for each in range(10)))
    assert [one["city"] for one in got] == [f"{turn}-{each}" for each in range(10)], got
print(got[-1], open("count").read())
""",
        client,
    )
    assert (result.stdout, result.stderr) == ("{'name': 'get-weather', 'city': '2-9'} ran;\n", "")
    assert client.sizes == [10, 10, 10]
    assert client.rounds[0][0] == {"city": "0-0"}


async def test_concurrent_calls_are_one_round_in_any_notation(box: Sandbox):
    client = Client()
    result = await script(
        box,
        """
async def both(n):
    return await asyncio.gather(echo_it(n=n), echo_it(n=n + 1))
await asyncio.gather(echo_it(n=0), both(1), asyncio.gather(both(3), both(5)))
first, second = asyncio.create_task(echo_it(n=7)), asyncio.ensure_future(echo_it(n=8))
print((await first)["n"] + (await second)["n"])
async with asyncio.Semaphore(1):
    await echo_it(n=9)
print(sorted([(await each)["n"] for each in asyncio.as_completed([echo_it(n=n) for n in range(4)])]))
""",
        client,
    )
    assert (result.stdout, result.stderr) == ("15\n[0, 1, 2, 3]\n", "")
    assert client.sizes == [7, 2, 1, 4]


async def test_threads_have_loops_of_their_own(box: Sandbox):
    source = """
import threading
got = []
threads = [threading.Thread(target=lambda n=n: got.append(asyncio.run(echo_it(n=n)))) for n in range(4)]
for thread in threads: thread.start()
for thread in threads: await asyncio.to_thread(thread.join)
print(sorted(one["n"] for one in got))
"""
    client = Client()
    assert (await script(box, source, client)).stdout == "[0, 1, 2, 3]\n"
    assert sum(client.sizes) == 4


async def test_the_signature_is_the_schemas(box: Sandbox):
    tools = [
        ToolDefinition(
            name="send mail",
            description="Sends.",
            parameters={
                "properties": {
                    "note": {"type": ["string", "null"]},
                    "to": {"type": "string"},
                    "class": {"type": "integer"},
                    "reply-to": {},
                    "copies": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                },
                "required": ["to", "class"],
            },
        ),
        ECHO,
    ]
    client = Client()
    source = """
import inspect
print(inspect.signature(send_mail), inspect.iscoroutinefunction(send_mail), send_mail.__doc__)
for wrong in (lambda: send_mail(to="a"), lambda: send_mail("a", 1, other=2), lambda: send_mail("a", 1, 2, 3, 4, 5)):
    try:
        wrong()
    except TypeError as error:
        print(error)
print(await send_mail("a", class_=3, reply_to="r", note=None))
print(await echo_it(anything=[1], nothing=None))
"""
    result = await script(box, source, client, tools)
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    shape = "(to: str, class_: int, note: str = None, reply_to: object = None, copies: int = None)"
    assert lines[0] == f"{shape} True Sends."
    assert "missing 1 required positional argument: 'class_'" in lines[1]
    assert "unexpected keyword argument 'other'" in lines[2]
    assert "takes from 2 to 5 positional arguments but 6 were given" in lines[3]
    assert lines[4:] == ["{'to': 'a', 'class': 3, 'reply-to': 'r'}", "{'anything': [1]}"]
    assert client.sizes == [1, 1]


async def test_schemas_that_python_cannot_say_as_they_are_still_work(box: Sandbox):
    names = ["ﬁ", "fi", "__debug__", "a-b", "a b", "1st", "", "größe", "others", "self", "None", "😀", "__call__"]
    schema = {"properties": {name: {"type": 5} for name in names}, "required": ["self", 7, {}], "type": "array"}
    other = ToolDefinition(name="stranger", parameters={"properties": 5, "required": 5})
    source = f"""
import inspect
parameters = list(inspect.signature(strange).parameters)
print((await strange(**dict.fromkeys(parameters, 1))).keys() == set({names!r}), parameters[0])
print(await stranger(x=1))
"""
    result = await script(box, source, Client(), [ToolDefinition(name="strange", parameters=schema), other])
    assert result.stdout == "True self\n{'x': 1}\n", result.stderr


async def test_an_error_of_a_tool_is_an_exception_in_the_program(box: Sandbox):
    def fail(call: ToolCall) -> None:
        raise LookupError(f"no city {call.input['city']!r} ü")

    source = """
try:
    await get_weather(city="x")
except ToolExecutionError as error:
    print(error)
print(*await asyncio.gather(get_weather("a"), get_weather("b"), return_exceptions=True), sep=", ")
await get_weather(city="y")
"""
    client = Client(fail)
    result = await script(box, source, client)
    assert result.stdout == "no city 'x' ü\nno city 'a' ü, no city 'b' ü\n"
    assert result.stderr.endswith("ToolExecutionError: no city 'y' ü\n") and result.exit_code == 1
    assert client.sizes == [1, 2, 1]


async def test_values_come_through_as_they_are(box: Sandbox):
    values = {
        "text": 'ü "quoted"\n\t\\ 🐚 \x00',
        "list": [1, 2.5, None, True],
        "deep": {"a": [{"b": {}}]},
        "big": 2**60,
    }
    source = f"""
import numpy, datetime
print((await echo_it(**{values!r})) == {values!r})
print(await echo_it(n=numpy.int64(3), a=numpy.arange(3), d=datetime.date(2026, 1, 2)))
for bad in ({{1, 2}}, float("nan"), object()):
    try:
        await echo_it(bad=bad)
    except TypeError as error:
        print("refused", str(error)[:30])
"""
    client = Client()
    result = await script(box, source, client)
    lines = result.stdout.splitlines()
    assert lines[:2] == ["True", "{'n': 3, 'a': [0, 1, 2], 'd': '2026-01-02'}"], result.stderr
    assert len(lines) == 5 and client.sizes == [1, 1]


async def test_any_json_value_is_a_result(box: Sandbox):
    values: list[Any] = ["text", "", None, 0, False, [], {}, [None, {"a": "ü"}]]
    client = Client(lambda call: values[call.input["n"]])
    all_of_them = f"await asyncio.gather(*(echo_it(n=n) for n in range({len(values)})))"
    said = await script(box, f"import json; print(json.dumps({all_of_them}))", client)
    assert json.loads(said.stdout) == values
    printed = await shell(box, f"for n in $(seq 0 {len(values) - 1}); do echo_it '{{\"n\": '$n'}}'; done", client)
    assert [json.loads(line) for line in printed.stdout.splitlines()] == values


async def test_large_values_pass_and_larger_ones_are_refused(box: Sandbox):
    limit = MAX_TOOL_RESULT_BYTES
    source = f"""
print(len(await echo_it(size={limit - 2})))
try:
    await echo_it(size={limit})
except ToolExecutionError as error:
    print(error)
print(len((await echo_it(text='a,[,"' * 500_000))["text"]))
try:
    await echo_it(text="x" * 6_000_000)
except ValueError as error:
    print(error)
"""
    client = Client(lambda call: "x" * call.input["size"] if "size" in call.input else call.input)
    result = await script(box, source, client)
    lines = result.stdout.splitlines()
    assert (lines[0], lines[2]) == (str(limit - 2), "2500000"), result.stderr
    assert lines[1] == f"the result of echo_it has {limit + 2} bytes: {limit} are possible"
    assert "bytes: a tool takes 5242880 at most" in lines[3]
    assert client.sizes == [1, 1, 1]


async def test_a_result_that_is_no_json_is_the_calls_own_error(box: Sandbox):
    source = "print([str(one) for one in await asyncio.gather(echo_it(n=1), echo_it(n=2), return_exceptions=True)])"
    result = await script(box, source, Client(lambda call: object() if call.input["n"] == 1 else "fine"))
    assert "the result of echo_it is no JSON value" in result.stdout and "fine" in result.stdout


async def test_a_program_calls_so_often_and_no_more(box: Sandbox):
    source = """
got = await asyncio.gather(*(echo_it(n=n) for n in range(7)), return_exceptions=True)
print(sum(isinstance(one, dict) for one in got), got[-1])
"""
    result = await script(box, source, Client(), max_calls=5)
    assert result.stdout == "5 a program can call tools 5 times, and this one has\n"


async def test_a_call_that_is_given_up_is_withdrawn(box: Sandbox):
    source = """
try:
    async with asyncio.timeout(0.05):
        await echo_it(slow=True)
except TimeoutError:
    print("gave up")
print(await echo_it(slow=False))
"""
    async with box.tools.make_offer([ECHO]) as offer:
        process = await box.commands.start(script=PythonScript(source=source, awaits=True, tools=offer.header))
        offer.runs(process)
        async with process:
            (slow,) = await offer.next_round()
            (next_one,) = await offer.next_round()
            assert offer.calls == (next_one.id,)
            offer.answer([ToolResult(call_id=slow.id, result="late"), ToolResult(call_id=next_one.id, result="ok")])
            assert (await process.result()).stdout == "gave up\nok\n"


async def test_output_printed_before_a_call_comes_with_it(box: Sandbox):
    async with box.tools.make_offer([ECHO]) as offer:
        source = "print('before'); await echo_it(); print('after')"
        process = await box.commands.start(script=PythonScript(source=source, awaits=True, tools=offer.header))
        offer.runs(process)
        async with process:
            (call,) = await offer.next_round()
            assert [event.text for event in await process.next_events()] == ["before\n"]  # type: ignore[union-attr]
            offer.answer([ToolResult(call_id=call.id)])
            assert (await process.result()).stdout == "after\n"


# --- bash


async def test_a_shells_calls_are_functions_of_one_json_argument(box: Sandbox):
    def answer(call: ToolCall) -> Any:
        if call.input.get("city") == "nowhere":
            raise LookupError("no such city")
        return {"name": call.name, **call.input}

    client = Client(answer)
    source = """
set -eu
get_weather '{"city": "it'"'"'s\\nü",
  "unit": "C"}'
raw=$(get_weather '{"city":"b"}'); printf '[%s]\\n' "$raw"
get_weather '{"city":"nowhere"}' || echo "status $?"
get_weather {city} || echo "status $?"
get_weather '["list"]' || echo "status $?"
get_weather '{"city":"a"}' '{"city":"b"}' || echo "status $?"
echo_it
echo_it ''
bash -c 'echo_it "{\\"in\\": \\"a child\\"}"' | cat
if echo_it > file; then cat file; fi
echo_it "{\\"text\\": \\"$(head -c 100000 /dev/zero | tr '\\0' x)\\"}" | wc -c
"""
    result = await shell(box, source, client)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines() == [
        '{"name":"get-weather","city":"it\'s\\nü","unit":"C"}',
        '[{"name":"get-weather","city":"b"}]',
        *["status 1"] * 4,
        *['{"name":"echo_it"}'] * 2,
        '{"name":"echo_it","in":"a child"}',
        '{"name":"echo_it"}',
        str(100_000 + len('{"name":"echo_it","text":""}\n')),
    ]
    said = result.stderr.splitlines()
    assert said[0] == "no such city" and "is no JSON" in said[1] and "not list" in said[2] and "one argument" in said[3]
    assert client.sizes == [1] * 8


async def test_calls_in_the_background_are_one_round(box: Sandbox):
    client = Client(lambda call: call.input["n"])
    source = """
for n in 1 2 3 4 5; do echo_it "{\\"n\\": $n}" & done; wait
{ a=$(echo_it '{"n": 6}'); echo "a=$a" > a; } &
{ b=$(echo_it '{"n": 7}'); echo "b=$b" > b; } &
wait
cat a b
echo_it '{"n": 8}' | { read -r n; echo "piped $n"; }
"""
    result = await shell(box, source, client)
    assert sorted(result.stdout.splitlines()) == ["1", "2", "3", "4", "5", "a=6", "b=7", "piped 8"], result.stderr
    # How many rounds is a matter of when all of a program waits; on a machine that is busy it may be seen later.
    assert client.sizes[-1] == 1 and sum(client.sizes) == 8 and len(client.sizes) <= 4


async def test_a_program_that_goes_on_keeps_no_call_waiting_for_long(box: Sandbox):
    source = "(while [ ! -e stop ]; do :; done) & echo_it '{}'; touch stop; wait"
    client = Client()
    result = await shell(box, source, client, timeout_seconds=30.0)
    assert (result.stdout, client.sizes) == ("{}\n", [1])


async def test_a_shell_that_cannot_connect_by_itself_has_a_program_do_it(box: Sandbox):
    client = Client(lambda call: call.input.get("n", "x" * 5000))
    source = """
ulimit -n 32
echo_it '{"n": "ü"}'
echo_it | wc -c
echo_it no || echo "status $?"
"""
    result = await shell(box, source, client)
    assert result.stdout == '"ü"\n5003\nstatus 1\n' and "is no JSON" in result.stderr
    assert client.sizes == [1, 1]


# --- contexts


async def test_contexts_have_tools_for_one_run(box: Sandbox):
    client = Client(lambda call: call.input.get("city"))
    code = "echo_it = 'mine'\nprint(await asyncio.gather(get_weather('a'), get_weather(city='b')))\n"
    run = await execute(box, code + "(await get_weather('c'))", client)
    assert (run.stdout, run.text, client.sizes) == ("['a', 'b']\n", "'c'", [2, 1]), run.error
    after = await box.context().execute("print('get_weather' in globals(), echo_it, ToolExecutionError)").result()
    assert after.stdout == "False mine <class '__main__.ToolExecutionError'>\n"
    failed = await execute(box, "await get_weather(town='x')", client)
    assert failed.error is not None and failed.error.name == "TypeError"


async def test_a_bash_context_has_tools_for_one_run(box: Sandbox):
    client = Client()
    context = box.default_context("bash")
    await context.execute("echo_it() { echo own; }").result()
    code = 'get_weather \'{"city":"a"}\' & get_weather \'{"city":"b"}\' & wait; echo_it \'{"n":1}\'; get_weather 1 2'
    run = await execute(box, code, client, language="bash")
    assert sorted(run.stdout.splitlines()) == ['{"city":"a"}', '{"city":"b"}', '{"n":1}'] and run.exit_code == 1
    assert sum(client.sizes) == 3
    after = await context.execute("echo_it; declare -F").result()
    assert after.stdout == "own\ndeclare -f echo_it\n"


async def test_two_contexts_at_once_do_not_mix(box: Sandbox):
    one, other = await box.create_context(), await box.create_context()

    async def run(context: Any, name: str) -> Run:
        tool = ToolDefinition(name="who")
        async with context.execute("print([await who() for _ in range(5)])", tools=[tool]) as execution:
            events = []
            async for event in execution:
                events.append(event)
                if isinstance(event, ToolsCalled):
                    await asyncio.sleep(0.002)
                    execution.answer_tools([ToolResult(call_id=call.id, result=name) for call in event.calls])

        return fold(events)

    runs = await asyncio.gather(run(one, "one"), run(other, "other"))
    assert [each.stdout for each in runs] == [f"{['one'] * 5}\n", f"{['other'] * 5}\n"]


async def test_other_languages_have_no_tools(box: Sandbox):
    with pytest.raises(errors.InvalidRequest, match="programs in javascript cannot call tools"):
        box.default_context("javascript").execute("1", tools=[ECHO])
    with pytest.raises(errors.InvalidRequest, match="cannot call tools"):
        box.tools.make_offer([ECHO], language="ruby")


async def test_tools_that_cannot_be_are_refused_before_anything_runs(box: Sandbox):
    with pytest.raises(errors.InvalidRequest, match="'a-b' and 'a b' would both be called 'a_b'"):
        box.tools.make_offer([ToolDefinition(name="a-b"), ToolDefinition(name="a b")])
    with pytest.raises(errors.InvalidRequest, match="can have 100 tools"):
        box.tools.make_offer([ToolDefinition(name=f"t{n}") for n in range(101)])
    with pytest.raises(errors.InvalidRequest, match="shorten their schemas"):
        properties = {f"p{n}" * 20: {} for n in range(30_000)}
        box.tools.make_offer([ToolDefinition(name="t", parameters={"properties": properties})])
