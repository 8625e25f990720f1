"""Programs that call tools, which live with the client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from cloche import errors
from cloche.engine import tool_calls
from cloche.engine.process import ProcessResult
from cloche.engine.program import Script
from cloche.engine.sandbox import Sandbox
from cloche.engine.tool_calls import Offer
from cloche.events import Run, ToolsCalled, fold
from cloche.tools import Tool, ToolCall, ToolResult

pytestmark = pytest.mark.asyncio(loop_scope="session")

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "unit": {"type": "string"}}, "required": ["city"]}
WEATHER = Tool(name="get-weather", description="The weather of a city.", parameters=CITY)
ECHO = Tool(name="echo_it", parameters={"type": "object"})

Answer = Callable[[ToolCall], Any]


class Client:
    """Answers rounds, as a client of ours would, and remembers them."""

    def __init__(self, answer: Answer | None = None, delay_seconds: float = 0.0):
        self.rounds: list[list[dict[str, Any]]] = []
        self._answer = answer or (lambda call: call.input)
        self._delay_seconds = delay_seconds

    def result(self, call: ToolCall) -> ToolResult:
        try:
            return ToolResult(call_id=call.id, result=self._answer(call))
        except LookupError as error:
            return ToolResult(call_id=call.id, error=str(error.args[0]))

    async def serve(self, offer: Offer) -> None:
        while calls := await offer.next_round():
            self.rounds.append([call.input for call in calls])
            await asyncio.sleep(self._delay_seconds)
            offer.answer(map(self.result, calls))

    @property
    def sizes(self) -> list[int]:
        return [len(each) for each in self.rounds]


async def script(
    box: Sandbox, source: str, client: Client, tools: Sequence[Tool] = (WEATHER, ECHO), **how: Any
) -> ProcessResult:
    async with box.tools.offer(tools, max_calls=how.pop("max_calls", 200)) as offer:
        program = Script(source=source, awaits=True, tools=offer.header)
        return await _run(offer, client, await box.commands.start(script=program, **how))


async def shell(
    box: Sandbox, source: str, client: Client, tools: Sequence[Tool] = (WEATHER, ECHO), **how: Any
) -> ProcessResult:
    async with box.tools.offer(tools, language="bash") as offer:
        return await _run(offer, client, await box.commands.start(source, env=offer.env, **how))


async def _run(offer: Offer, client: Client, process: Any) -> ProcessResult:
    offer.runs(process)
    serving = asyncio.create_task(client.serve(offer))
    try:
        async with process:
            return await process.result()
    finally:
        offer.close()
        await serving


async def execute(box: Sandbox, code: str, client: Client, *, language: str = "python", **how: Any) -> Run:
    """In a context, where rounds are events."""
    seen = []
    context = box.default_context(language)
    async with context.execute(code, tools=[WEATHER, ECHO], **how) as execution:
        async for event in execution:
            seen.append(event)
            if isinstance(event, ToolsCalled):
                client.rounds.append([call.input for call in event.calls])
                execution.answer_tools(map(client.result, event.calls))

    return fold(seen)


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


async def test_what_begins_together_is_a_round_however_it_is_written(box: Sandbox):
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
        Tool(
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
    other = Tool(name="stranger", parameters={"properties": 5, "required": 5})
    source = f"""
import inspect
parameters = list(inspect.signature(strange).parameters)
print((await strange(**dict.fromkeys(parameters, 1))).keys() == set({names!r}), parameters[0])
print(await stranger(x=1))
"""
    result = await script(box, source, Client(), [Tool(name="strange", parameters=schema), other])
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
    limit = tool_calls.MAX_RESULT_BYTES
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
    async with box.tools.offer([ECHO]) as offer:
        process = await box.commands.start(script=Script(source=source, awaits=True, tools=offer.header))
        offer.runs(process)
        async with process:
            (slow,) = await offer.next_round()
            (next_one,) = await offer.next_round()
            assert [call.id for call in offer.calls] == [next_one.id]
            offer.answer([ToolResult(call_id=slow.id, result="late"), ToolResult(call_id=next_one.id, result="ok")])
            assert (await process.result()).stdout == "gave up\nok\n"


async def test_what_was_printed_before_a_call_is_there_with_it(box: Sandbox):
    async with box.tools.offer([ECHO]) as offer:
        source = "print('before'); await echo_it(); print('after')"
        process = await box.commands.start(script=Script(source=source, awaits=True, tools=offer.header))
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
        tool = Tool(name="who")
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
        box.tools.offer([ECHO], language="ruby")


# --- time, interrupts, ends


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
                await asyncio.sleep(0.8)
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
    async with box.tools.offer([ECHO]) as offer:
        program = Script(source="await asyncio.gather(echo_it(), echo_it())", awaits=True, tools=offer.header)
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
    async with box.tools.offer([ECHO]) as offer:
        process = await box.commands.start(script=Script(source="await echo_it()", awaits=True, tools=offer.header))
        offer.runs(process)
        await offer.next_round()
        waiting = asyncio.create_task(offer.next_round())
        await asyncio.sleep(0)
        await box.kill()
        assert await waiting == ()
    with pytest.raises(errors.Gone):
        await box.tools.offer([ECHO]).open()


async def test_results_must_be_of_calls_that_were_made(box: Sandbox):
    async with box.tools.offer([ECHO]) as offer:
        process = await box.commands.start(script=Script(source="await echo_it()", awaits=True, tools=offer.header))
        async with process:
            (call,) = await offer.next_round()
            for wrong in ("call_002", "call_1", "call_" + "1" * 5000, "x", ""):
                with pytest.raises(errors.InvalidRequest, match="made no call"):
                    offer.answer([ToolResult(call_id=call.id), ToolResult(call_id=wrong)])
            with pytest.raises(errors.InvalidRequest, match="has 2 results"):
                offer.answer([ToolResult(call_id=call.id), ToolResult(call_id=call.id)])
            assert [each.id for each in offer.calls] == ["call_001"]
            offer.answer([ToolResult(call_id=call.id)])
            assert (await process.result()).exit_code == 0


# --- what programs inside may try


FORGED = r"""
import json, socket, sys
port, token = json.loads(sys.argv[1])
def say(*parts, end=False):
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.settimeout(20)
        try:
            for part in parts: line.sendall(part)
            if end: line.shutdown(socket.SHUT_WR)
            got = b""
            while more := line.recv(65536): got += more
        except OSError as error:
            return type(error).__name__
        return got.decode()
print(say(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"y" * 200))
print(say(b"wrong\0" + b"0\0echo_it\0{}\0"))
for count in (b"-1", b"x", b"00", b"99999", b""):
    print(say(token.encode() + b"\0" + count + b"\0"))
print(say(token.encode() + b"\0" + b"0\0no_such\0{}\0"))
print(say(token.encode() + b"\0" + b"0\0echo_it\0" + b"[" * 100_000 + b"\0"))
print(say(token.encode() + b"\0" + b"0\0echo_it\0{\"a\":[" + b"0," * 300_000 + b"0]}\0"))
print(say(token.encode() + b"\0" + b"0\0echo_it\0\xff\xfe\0"))
print(repr(say(token.encode() + b"\0" + b"0\0echo", end=True)))
idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
print("done")
"""


async def test_forged_calls_are_answered_and_harm_nobody(box: Sandbox):
    async with box.tools.offer([ECHO]) as offer, box.tools.offer([ECHO]) as other:
        words = json.dumps([offer.header["port"], offer.header["token"]])
        forging = await box.commands.run(["python3", "-c", FORGED, words])
        lines = [line for line in forging.stdout.splitlines() if line]
        assert lines[-1] == "done", forging.stderr
        said = [line for line in lines if not line.startswith(("-1 error", "0 error"))]
        assert "what came is no call" in said[0] and "no tools are offered to this program" in said[1]
        assert all("does not say how many" in line for line in said[2:7])
        assert "there is no tool 'no_such'" in said[7]
        assert "is no JSON" in said[8] and "a call can have 200000 values" in said[9] and "is no JSON" in said[10]
        assert offer.calls == other.calls == ()
        # And whoever is honest is served as before.
        assert (await script(box, "print(await echo_it(n=1))", Client(), [ECHO])).stdout == "{'n': 1}\n"


async def test_a_token_is_good_for_as_long_as_its_offer_is(box: Sandbox):
    async with box.tools.offer([ECHO], language="bash") as offer:
        env = offer.env
    over = await box.commands.run("echo_it '{}'", env=env)
    assert (over.stdout, over.exit_code) == ("", 1) and "no tools are offered to this program" in over.stderr


async def test_a_program_says_so_much_and_no_more(box: Sandbox, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tool_calls, "MAX_PROGRAM_BYTES", 1 << 20)
    source = """
await echo_it(text="x" * 700_000)
try:
    await echo_it(text="x" * 700_000)
except ToolExecutionError as error:
    print(error)
"""
    result = await script(box, source, Client(lambda _: None), [ECHO])
    assert "a program can say 1048576 bytes to its tools" in result.stdout, result.stderr


async def test_tools_that_cannot_be_are_refused_before_anything_runs(box: Sandbox):
    with pytest.raises(errors.InvalidRequest, match="'a-b' and 'a b' would both be called 'a_b'"):
        box.tools.offer([Tool(name="a-b"), Tool(name="a b")])
    with pytest.raises(errors.InvalidRequest, match="can have 100 tools"):
        box.tools.offer([Tool(name=f"t{n}") for n in range(101)])
    with pytest.raises(errors.InvalidRequest, match="shorten their schemas"):
        properties = {f"p{n}" * 20: {} for n in range(30_000)}
        box.tools.offer([Tool(name="t", parameters={"properties": properties})])
