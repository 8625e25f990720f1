"""The 22 defects of LiteLLM's interceptor (protocols/openai.md, section 1.9): for each a test that shows us right."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from tests.conftest import RunningServer, serving, with_template
from tests.openai.conftest import CODE_INTERPRETER, UPSTREAM_KEY, client_of
from tests.openai.scripts import PNG
from tests.openai.upstream import Code, Function, Reasoning, ScriptedUpstream, Text, Usage, WaitFor
from tests.server.test_health import kill_nurseries

Play = Callable[..., str]
OUTPUTS: list[Any] = ["code_interpreter_call.outputs"]
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": False}


def ask(client: openai.OpenAI, model: str, **options: Any) -> Any:
    given: dict[str, Any] = {"input": "Go", "tools": [CODE_INTERPRETER], "include": OUTPUTS}
    return client.responses.create(model=model, **{**given, **options})


def logs(answer: Any) -> list[str]:
    """What each code call printed."""
    calls = [item for item in answer.output if item.type == "code_interpreter_call"]
    return ["".join(each.logs for each in item.outputs if each.type == "logs") for item in calls]


def choice_of(asked: Any) -> Any:
    """The choice in one form for both protocols."""
    choice = asked.body.get("tool_choice", "auto")
    return choice if isinstance(choice, str) else choice.get("function", choice)["name"]


def test_defect_01_code_calls_are_in_the_order_in_which_they_ran(client: openai.OpenAI, play: Play):
    answer = ask(client, play([Code("'A'")], [Code("'B'"), Code("'C'")], [Text("Done.")]))
    assert logs(answer) == ["'A'\n", "'B'\n", "'C'\n"]
    assert answer.output[-1].type == "message"


def test_defect_02_a_forced_tool_is_forced_once(client: openai.OpenAI, play: Play, upstream: ScriptedUpstream):
    model = play([Code("1")], [Text("Done.")])
    ask(client, model, tool_choice={"type": "code_interpreter"})
    assert [choice_of(asked) for asked in upstream.asked(model)] == ["python", "auto"]


def test_defect_03_many_rounds_run_and_a_budget_ends_them_without_a_leak(
    client: openai.OpenAI, play: Play, upstream: ScriptedUpstream
):
    assert len(logs(ask(client, play(*[[Code("1")]] * 8, [Text("Done.")])))) == 8
    model = play([Code("1")], [Code("2")], [Text("Out of calls.")])
    answer = ask(client, model, max_tool_calls=2)
    assert logs(answer) == ["1\n", "2\n"] and answer.status == "completed"
    last = upstream.asked(model)[-1]
    assert last.body.get("tool_choice") == "none" or "python" not in last.tools
    assert "function_call" not in [item.type for item in answer.output]


def test_defect_03_calls_over_the_budget_are_not_run_and_not_leaked(client: openai.OpenAI, play: Play):
    answer = ask(client, play([Code("1"), Code("2"), Code("3")], [Text("Done.")]), max_tool_calls=2)
    assert logs(answer) == ["1\n", "2\n"]
    assert [item.type for item in answer.output] == ["code_interpreter_call"] * 2 + ["message"]


def test_defect_04_the_same_call_twice_runs_twice(client: openai.OpenAI, play: Play):
    again = [Code("n = globals().get('n', 0) + 1; n", call_id="call_same")]
    assert logs(ask(client, play(again, again, again, [Text("Done.")]))) == ["1\n", "2\n", "3\n"]


@pytest.mark.parametrize("code_first", [True, False])
def test_defect_05_a_function_beside_code_reaches_the_client(client: openai.OpenAI, play: Play, code_first: bool):
    calls = [Code("print('ran')"), Function("weather", {"city": "Bern"}, call_id="call_1")]
    model = play(calls if code_first else calls[::-1], [Text("Sunny.")])
    answer = ask(client, model, tools=[CODE_INTERPRETER, WEATHER])
    kinds = ["code_interpreter_call", "function_call"]
    assert [item.type for item in answer.output] == (kinds if code_first else kinds[::-1])
    assert logs(answer) == ["ran\n"]
    result = [{"type": "function_call_output", "call_id": "call_1", "output": "sun"}]
    following = ask(client, model, input=result, previous_response_id=answer.id, tools=[CODE_INTERPRETER, WEATHER])
    assert following.output_text == "Sunny."


def test_defect_05_the_model_is_told_both_results(client: openai.OpenAI, play: Play, upstream: ScriptedUpstream):
    model = play([Code("print('ran')"), Function("weather", {}, call_id="call_1")], [Text("Sunny.")])
    answer = ask(client, model, tools=[CODE_INTERPRETER, WEATHER])
    result = [{"type": "function_call_output", "call_id": "call_1", "output": "sun"}]
    ask(client, model, input=result, previous_response_id=answer.id, tools=[CODE_INTERPRETER, WEATHER])
    assert sorted(upstream.asked(model)[-1].outputs) == ["ran\n", "sun"]


def test_defect_06_reasoning_is_kept_for_the_client_and_for_the_next_leg(
    client: openai.OpenAI, upstream: ScriptedUpstream
):
    model = upstream.play("resp", [Reasoning(summary="Count.", encrypted="sealed"), Code("1")], [Text("Done.")])
    answer = ask(client, model, include=[*OUTPUTS, "reasoning.encrypted_content"], store=False)
    assert [item.type for item in answer.output] == ["reasoning", "code_interpreter_call", "message"]
    assert answer.output[0].summary[0].text == "Count." and answer.output[0].encrypted_content == "sealed"
    sent = [item for item in upstream.asked(model)[1].body["input"] if item.get("type") == "reasoning"]
    assert [item["encrypted_content"] for item in sent] == ["sealed"]


def test_defect_06_thoughts_of_a_chat_model_too(client: openai.OpenAI, upstream: ScriptedUpstream):
    model = upstream.play("chat", [Reasoning("Count."), Code("1")], [Text("Done.")])
    answer = ask(client, model)
    assert answer.output[0].type == "reasoning" and answer.output[0].content[0].text == "Count."
    assert "Count." in json.dumps(upstream.asked(model)[1].body["messages"])


def test_defect_07_the_value_of_the_last_expression_is_an_output(
    client: openai.OpenAI, play: Play, upstream: ScriptedUpstream
):
    model = play([Code("1 + 1")], [Text("2")])
    assert logs(ask(client, model)) == ["2\n"]
    assert upstream.asked(model)[1].outputs == ["2\n"]


def test_defect_08_an_exception_keeps_printed_output_and_its_traceback(
    client: openai.OpenAI, play: Play, upstream: ScriptedUpstream
):
    model = play([Code("print('so far')\n1 / 0")], [Text("Oh.")])
    answer = ask(client, model)
    for seen in (logs(answer)[0], upstream.asked(model)[1].outputs[0]):
        assert "so far" in seen and "Traceback" in seen and "ZeroDivisionError: division by zero" in seen
    assert answer.output[0].status == "completed"


def test_defect_09_stderr_pictures_files_and_citations_are_there(
    client: openai.OpenAI, play: Play, upstream: ScriptedUpstream
):
    shows = f"import base64; from IPython.display import Image, display; display(Image(data=base64.b64decode('{PNG}')))"
    model = play(
        [Code("import sys; print('careful', file=sys.stderr)\nopen('/mnt/data/a.csv', 'w').write('1,2')\n" + shows)],
        [Text("Here: [a.csv](sandbox:/mnt/data/a.csv)")],
    )
    answer = ask(client, model)
    call, message = answer.output
    assert call.outputs[0].logs == "careful\n" and call.outputs[1].url == f"data:image/png;base64,{PNG}"
    said = upstream.asked(model)[1]
    assert "careful" in said.outputs[0] and PNG in json.dumps(said.body), "the model was not shown all"
    picture, link = message.content[0].annotations
    assert message.content[0].text[link.start_index : link.end_index] == "sandbox:/mnt/data/a.csv"
    content = client.containers.files.content
    assert content.retrieve(link.file_id, container_id=link.container_id).read() == b"1,2"
    assert content.retrieve(picture.file_id, container_id=picture.container_id).read().startswith(b"\x89PNG")


def test_defect_10_the_container_that_was_named_is_used(client: openai.OpenAI, play: Play):
    container = client.containers.create(name="mine").id
    tool = {"type": "code_interpreter", "container": container}
    for code in ("x = 7", "x"):
        answer = ask(client, play([Code(code)], [Text("Done.")]), tools=[tool])
        assert answer.output[0].container_id == container
    assert logs(answer) == ["7\n"]


def test_defect_11_files_memory_and_network_of_the_tool_count(
    client: openai.OpenAI, play: Play, upstream: ScriptedUpstream
):
    file = client.files.create(file=("data.csv", b"1,2\n"), purpose="user_data")
    wishes = {"file_ids": [file.id], "memory_limit": "1g", "network_policy": {"type": "disabled"}}
    model = play([Code("print(open('/mnt/data/data.csv').read())")], [Text("Done.")])
    answer = ask(client, model, tools=[{"type": "code_interpreter", "container": {"type": "auto", **wishes}}])
    assert "1,2" in logs(answer)[0]
    assert "/mnt/data/data.csv" in json.dumps(upstream.asked(model)[0].body), "the model does not know of the file"
    container = client.containers.retrieve(answer.output[0].container_id)
    assert container.memory_limit == "1g" and container.network_policy.type == "disabled"


def test_defect_12_the_tools_are_those_of_the_request(client: openai.OpenAI, play: Play):
    tools = [WEATHER, {"type": "code_interpreter", "container": {"type": "auto", "memory_limit": "1g"}}]
    answer = ask(client, play([Text("Hi.")]), tools=tools)
    assert [tool.type for tool in answer.tools] == ["function", "code_interpreter"]
    assert answer.tools[1].container.memory_limit == "1g"


@pytest.mark.parametrize("stream", [False, True])
def test_defect_13_usage_is_of_all_legs(client: openai.OpenAI, play: Play, stream: bool):
    first, second = [Code("1"), Usage(100, 10, cached=5)], [Code("2"), Usage(200, 20, reasoning=7)]
    answer = ask(client, play(first, second, [Text("."), Usage(300, 30)]), stream=stream)
    usage = (list(answer)[-1].response if stream else answer).usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (600, 60, 660)
    assert usage.input_tokens_details.cached_tokens == 5 and usage.output_tokens_details.reasoning_tokens == 7


def test_defect_14_model_text_is_streamed_as_it_comes(client: openai.OpenAI, play: Play):
    more, rest = threading.Event(), threading.Event()
    model = play([Code("print(1)", chunks=['{"code": "pr', 'int(1)"}']), WaitFor(more)], [Text("One."), WaitFor(rest)])
    events = []
    for event in ask(client, model, stream=True):
        events.append(event)
        if event.type == "response.code_interpreter_call_code.delta":
            more.set()
        if event.type == "response.output_text.delta":
            rest.set()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    code = [kind for kind in kinds if "code_interpreter_call" in kind and not kind.endswith("delta")]
    prefix = "response.code_interpreter_call"
    assert code == [f"{prefix}.in_progress", f"{prefix}_code.done", f"{prefix}.interpreting", f"{prefix}.completed"]


@pytest.fixture(scope="module")
def without_sandboxes(
    tmp_path_factory: pytest.TempPathFactory, template: Any, gateway_config: Path
) -> Iterator[RunningServer]:
    """A server that can make no sandbox any more."""
    place = with_template(tmp_path_factory.mktemp("none") / "data", template)
    env = {"CLOCHE_CONFIG": str(gateway_config), "TEST_UPSTREAM_KEY": UPSTREAM_KEY, "CLOCHE_POOL_READY": "0"}
    with serving(place, env=env) as running:
        (packages,) = place.glob("templates/python/*/env")
        packages.unlink()
        kill_nurseries(running.process.pid)
        yield running


def test_defect_15_without_a_sandbox_the_request_fails(
    without_sandboxes: RunningServer, play: Play, upstream: ScriptedUpstream
):
    model = play([Code("print(1)")], [Text("Never.")])
    with client_of(without_sandboxes) as client, pytest.raises(openai.InternalServerError) as caught:
        ask(client, model)
    assert caught.value.status_code == 503 and caught.value.response.headers["x-should-retry"] == "true"
    assert len(upstream.asked(model)) == 1
    nothing_native(upstream, model)


def test_defect_15_in_a_stream_it_fails_after_closing_open_items(
    without_sandboxes: RunningServer, play: Play, upstream: ScriptedUpstream
):
    model = play([Text("Let me see."), Code("print(1)")], [Text("Never.")])
    kinds = []
    with client_of(without_sandboxes) as client, pytest.raises(openai.APIError) as caught:
        for event in ask(client, model, stream=True):
            kinds.append(event.type)
    assert caught.value.message
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done")
    nothing_native(upstream, model)


def nothing_native(upstream: ScriptedUpstream, model: str) -> None:
    """The tool that an upstream would run itself never reaches it."""
    for asked in upstream.asked(model):
        assert "code_interpreter" not in json.dumps(asked.body.get("tools"))


def test_defect_16_models_that_only_chat_run_code_too(client: openai.OpenAI, upstream: ScriptedUpstream):
    model = upstream.play("chat", [Code("print(6 * 7)")], [Text("42")])
    answer = ask(client, model)
    assert logs(answer) == ["42\n"] and answer.output_text == "42"
    assert [asked.path for asked in upstream.asked(model)] == ["/v1/chat/completions"] * 2


def test_defect_17_a_response_can_be_had_again_whole(client: openai.OpenAI, play: Play):
    answer = ask(client, play([Code("1")], [Code("2")], [Text("Done.")]))
    again = client.responses.retrieve(answer.id, include=OUTPUTS)
    assert again.to_dict() == answer.to_dict()


def test_defect_18_the_container_of_a_call_is_a_container(client: openai.OpenAI, play: Play):
    answer = ask(client, play([Code("open('/mnt/data/a.txt', 'w').write('a')")], [Text("Done.")]))
    id = answer.output[0].container_id
    assert client.containers.retrieve(id).status == "running"
    assert [file.path for file in client.containers.files.list(id)] == ["/mnt/data/a.txt"]


def test_defect_19_a_session_has_one_container_however_many_begin_it(
    client: openai.OpenAI, play: Play, upstream: ScriptedUpstream
):
    models = [play([Code("import os; os.getpid()")], [Text("Done.")]) for _ in range(4)]
    before = {container.id for container in client.containers.list(limit=100)}

    def one(model: str) -> None:
        client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Go"}],
            tools=[{"type": "code_interpreter"}],  # type: ignore[list-item]
            metadata={"session_id": f"defect-19-{models[0]}"},
        )

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, models))
    assert len({container.id for container in client.containers.list(limit=100)} - before) == 1
    assert len({upstream.asked(model)[1].outputs[0] for model in models}) == 1, "they have not shared a kernel"


def test_defect_20_records_of_a_request_share_its_id_and_count_each_leg_once(
    client: openai.OpenAI, play: Play, gateway_server: RunningServer
):
    model = play([Code("print('secret')"), Usage(100, 1)], [Text("Done."), Usage(200, 2)])
    raw = client.responses.with_raw_response.create(model=model, input="Go", tools=[CODE_INTERPRETER])
    id = raw.headers["x-request-id"]
    url = f"{gateway_server.url}/admin/requests/{id}"
    record = httpx2.get(url, headers={"x-api-key": gateway_server.key}).json()
    text = json.dumps(record)
    assert [text.count(f'"kind": "{kind}"') for kind in ("model_call", "container", "execution")] == [2, 1, 1]
    assert "secret" not in text
    assert '"input_tokens": 100' in text and '"input_tokens": 200' in text


def test_defect_21_a_chat_keeps_text_before_code(client: openai.OpenAI, play: Play):
    model = play([Text("Let me count. "), Code("1")], [Text("One.")])
    tools: Any = [{"type": "code_interpreter"}]
    answer = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Go"}], tools=tools)
    content = answer.choices[0].message.content or ""
    assert "Let me count." in content and "One." in content
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Go"}], tools=tools, n=2)
    assert caught.value.param == "n"


def test_defect_22_code_has_no_network(client: openai.OpenAI, play: Play, upstream: ScriptedUpstream):
    port = httpx2.URL(upstream.url).port
    code = f"""\
import socket
for place in (("127.0.0.1", {port}), ("1.1.1.1", 53), ("169.254.169.254", 80)):
    try:
        socket.create_connection(place, timeout=2)
        print("connected", place)
    except OSError:
        print("refused")
"""
    assert logs(ask(client, play([Code(code)], [Text("Done.")]))) == ["refused\n" * 3]


def test_arguments_that_are_no_json_are_code(client: openai.OpenAI, play: Play):
    assert logs(ask(client, play([Code("", raw_arguments="print('raw')")], [Text("Done.")]))) == ["raw\n"]


def test_the_tool_of_the_upstream_itself_is_never_offered(
    client: openai.OpenAI, play: Play, upstream: ScriptedUpstream
):
    model = play([Code("1")], [Text("Done.")])
    with contextlib.closing(ask(client, model, stream=True)) as stream:
        list(stream)
    nothing_native(upstream, model)
