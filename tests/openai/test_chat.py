"""Chat completions with the code interpreter, through OpenAI's own client, on both kinds of upstreams."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import pydantic
import pytest
from tests import javascript
from tests.conftest import RunningServer
from tests.openai.conftest import UPSTREAM_KEY
from tests.openai.upstream import (
    Code,
    ContentFilter,
    Custom,
    Function,
    IncompleteLength,
    Reasoning,
    Refusal,
    ScriptedUpstream,
    StreamError,
    Text,
    Usage,
    WaitFor,
)

TOOLS: list[Any] = [{"type": "code_interpreter"}]
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL: Any = {"id": True, "type": True, "function": {"name": True, "arguments": True}}  # what a client gives back
ASKED: list[Any] = [{"role": "user", "content": "go"}]

Play = Callable[..., str]


def whole_and_streamed(client: openai.OpenAI, script: Callable[[], str], **fields: Any) -> list[Any]:
    """The choice of the same script, answered whole, then put together from a stream by the SDK."""
    fields = {"messages": ASKED, "tools": TOOLS, **fields}
    whole = client.chat.completions.create(model=script(), **fields)
    with client.chat.completions.stream(model=script(), **fields) as stream:
        streamed = stream.get_final_completion()
    return [whole.choices[0], streamed.choices[0]]


# -- one turn


def test_code_runs_between_texts_and_nothing_is_lost(client: openai.OpenAI, play: Play):
    def script() -> str:
        return play([Text("Let me see."), Code("print(6 * 7)")], [Text("It is 42.")])

    for choice in whole_and_streamed(client, script):
        message = choice.message
        assert choice.finish_reason == "stop" and not message.tool_calls
        assert message.content == "Let me see.\n\nIt is 42."
        (call,) = message.code_interpreter_calls
        assert call["code"] == "print(6 * 7)" and call["outputs"] == [{"type": "logs", "logs": "42\n"}]
        assert call["container_id"].startswith("cntr_") and call["id"].startswith("ci_")


def test_chunks_come_in_openais_order(client: openai.OpenAI, play: Play):
    model = play([Text("One."), Code("1"), Usage(10, 5, cached=4, reasoning=2)], [Text("Two."), Usage(20, 6)])
    with client.chat.completions.create(
        model=model, messages=ASKED, tools=TOOLS, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    assert len({chunk.id for chunk in chunks}) == 1 and chunks[0].id.startswith("chatcmpl-")
    assert {chunk.model for chunk in chunks} == {model}
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    *said, extras, end, usage = chunks[1:]
    assert "".join(chunk.choices[0].delta.content for chunk in said) == "One.\n\nTwo."
    assert len(extras.choices[0].delta.code_interpreter_calls) == 1
    assert end.choices[0].finish_reason == "stop" and end.usage is None
    assert usage.choices == [] and (usage.usage.prompt_tokens, usage.usage.completion_tokens) == (30, 11)
    assert usage.usage.prompt_tokens_details.cached_tokens == 4
    assert usage.usage.completion_tokens_details.reasoning_tokens == 2


def test_usage_is_summed_over_legs(client: openai.OpenAI, play: Play):
    model = play([Code("1"), Usage(10, 5)], [Code("2"), Usage(20, 6)], [Text("Done."), Usage(30, 7)])
    usage = client.chat.completions.create(model=model, messages=ASKED, tools=TOOLS).usage
    assert usage is not None and (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (60, 18, 78)


def test_text_is_forwarded_before_the_rest(client: openai.OpenAI, play: Play):
    more = threading.Event()
    model = play([Text("First."), WaitFor(more), Code("print(1)")], [Text("Last.")])
    with client.chat.completions.create(model=model, messages=ASKED, tools=TOOLS, stream=True) as stream:
        said = ""
        while said != "First.":
            said += next(stream).choices[0].delta.content or ""
        more.set()
        said += "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert said == "First.\n\nLast."


def test_a_stream_begins_with_the_models_first_word_also_if_that_is_code(client: openai.OpenAI, play: Play):
    more = threading.Event()
    model = play([Code("print(1)"), WaitFor(more)], [Text("Done.")])
    with client.chat.completions.create(model=model, messages=ASKED, tools=TOOLS, stream=True) as stream:
        assert stream.response.headers["x-container-id"].startswith("cntr_")
        assert next(stream).choices[0].delta.role == "assistant"
        more.set()
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "Done."


def test_an_async_client_is_told_the_same(gateway_server: RunningServer, play: Play):
    async def told() -> tuple[str, str]:
        async with openai.AsyncOpenAI(
            api_key=gateway_server.key, base_url=f"{gateway_server.url}/v1", max_retries=0
        ) as client:
            fields: Any = {"messages": ASKED, "tools": TOOLS}
            whole = await client.chat.completions.create(model=play([Code("1")], [Text("Done.")]), **fields)
            async with client.chat.completions.stream(model=play([Code("1")], [Text("Done.")]), **fields) as stream:
                final = await stream.get_final_completion()
            return whole.choices[0].message.content or "", final.choices[0].message.content or ""

    assert asyncio.run(told()) == ("Done.", "Done.")


def test_the_javascript_client_puts_every_kind_of_stream_together(gateway_server: RunningServer, play: Play):
    javascript.install()
    custom = {"type": "custom", "custom": {"name": "shout"}}
    legs: list[list[Any]] = [
        [Reasoning("Hm."), Text("Two.")],
        [Function("weather", {"city": "Oslo"}), Custom("shout", "hey")],
        [Refusal("I must not.")],
        [Text("I was"), StreamError("it broke")],
    ]
    requests = [
        {"model": play([Text("One."), Code("print(1)")], leg), "messages": ASKED, "tools": [*TOOLS, WEATHER, custom]}
        for leg in legs
    ]
    environment = {"OPENAI_API_KEY": gateway_server.key, "OPENAI_BASE_URL": f"{gateway_server.url}/v1"}
    said = javascript.run(["node", "openai/chats.mjs"], input=json.dumps(requests), **environment)
    text, calls, refusal, failed = (json.loads(line) for line in said.splitlines())
    assert text["choice"]["message"]["content"] == "One.\n\nTwo." and text["choice"]["finish_reason"] == "stop"
    assert text["choice"]["message"]["code_interpreter_calls"][0]["outputs"] == [{"type": "logs", "logs": "1\n"}]
    weather, shout = calls["choice"]["message"]["tool_calls"]
    assert weather["function"]["arguments"] == '{"city": "Oslo"}' and shout["custom"]["input"] == "hey"
    assert refusal["choice"]["message"]["refusal"] == "I must not."
    assert failed["error"].startswith("APIError") and "it broke" in failed["error"]


def test_thoughts_are_told_beside_the_content_and_shown_to_the_model_again(
    client: openai.OpenAI, upstream: ScriptedUpstream, play: Play
):
    models: list[str] = []

    def script() -> str:
        model = play([Reasoning("I must count.", encrypted="xyz"), Code("1")], [Reasoning("Aha."), Text("One.")])
        models.append(model)
        return model

    for choice in whole_and_streamed(client, script):
        assert choice.message.reasoning_content == "I must count.\n\nAha." and choice.message.content == "One."
    _, second = upstream.asked(models[0])
    assert "I must count." in json.dumps(second.body) or "xyz" in json.dumps(second.body)


@pytest.mark.parametrize(("end", "reason"), [(IncompleteLength(), "length"), (ContentFilter(), "content_filter")])
def test_how_a_turn_ends_is_said_in_openais_words(client: openai.OpenAI, play: Play, end: Any, reason: str):
    fields: Any = {"messages": ASKED, "tools": TOOLS}
    whole = client.chat.completions.create(model=play([Text("I was"), end]), **fields).choices[0]
    assert (whole.finish_reason, whole.message.content) == (reason, "I was")
    with client.chat.completions.create(model=play([Text("I was"), end]), stream=True, **fields) as stream:
        assert list(stream)[-1].choices[0].finish_reason == reason


def test_a_refusal_is_no_content(client: openai.OpenAI, play: Play):
    for choice in whole_and_streamed(client, lambda: play([Refusal("I must not.")])):
        assert choice.message.refusal == "I must not." and not choice.message.content


def test_a_json_answer_is_the_whole_content_despite_earlier_text(client: openai.OpenAI, play: Play):
    class Sum(pydantic.BaseModel):
        value: int

    def script() -> str:
        return play([Text("I add."), Code("print(2)")], [Text('{"value": 2}')])

    fields: Any = {"messages": ASKED, "response_format": Sum, "tools": TOOLS}
    with client.chat.completions.stream(model=script(), **fields) as stream:
        streamed = stream.get_final_completion().choices[0].message
    assert streamed.parsed == Sum(value=2) and streamed.reasoning_content == "I add."
    whole = client.chat.completions.create(
        model=script(), messages=ASKED, tools=TOOLS, response_format={"type": "json_object"}
    )
    assert json.loads(whole.choices[0].message.content or "") == {"value": 2}


def test_parse_works_where_there_is_no_code(client: openai.OpenAI, play: Play):
    class Sum(pydantic.BaseModel):
        value: int

    made = client.chat.completions.parse(model=play([Text('{"value": 2}')]), messages=ASKED, response_format=Sum)
    assert made.choices[0].message.parsed == Sum(value=2)


def test_files_that_the_model_links_are_cited_and_can_be_downloaded(client: openai.OpenAI, play: Play):
    def script() -> str:
        return play(
            [Text("I write."), Code("open('/mnt/data/a.txt', 'w').write('hello')")],
            [Text("Here: [a.txt](sandbox:/mnt/data/a.txt)")],
        )

    for choice in whole_and_streamed(client, script):
        (cited,) = choice.message.container_file_citations
        assert choice.message.content[cited["start_index"] : cited["end_index"]] == "sandbox:/mnt/data/a.txt"
        assert not choice.message.annotations
        content = client.containers.files.content.retrieve(cited["file_id"], container_id=cited["container_id"])
        assert content.read() == b"hello"


# -- the client's own functions


def test_only_the_clients_calls_are_told_and_the_turn_goes_on_where_it_was(
    client: openai.OpenAI, upstream: ScriptedUpstream, play: Play
):
    for stream in (False, True):
        model = play(
            [
                Reasoning("Hm.", encrypted="xyz"),
                Text("I look."),
                Code("x = 20 + 1"),
                Function("weather", {"city": "Oslo"}),
            ],
            [Code("print(x * 2)")],
            [Text("42 degrees.")],
        )
        fields: Any = {"model": model, "tools": [*TOOLS, WEATHER]}
        if stream:
            with client.chat.completions.stream(messages=ASKED, **fields) as told:
                choice: Any = told.get_final_completion().choices[0]
        else:
            choice = client.chat.completions.create(messages=ASKED, **fields).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})

        bare = {"role": "assistant", "content": "I look.", "tool_calls": [call.model_dump(include=CALL)]}
        result = {"role": "tool", "tool_call_id": call.id, "content": "21"}
        final = client.chat.completions.create(messages=[*ASKED, bare, result], **fields).choices[0].message
        assert final.content == "42 degrees."
        (ran,) = final.code_interpreter_calls
        assert ran["outputs"] == [{"type": "logs", "logs": "42\n"}], "the container is the same: x is known"
        assert ran["container_id"] == choice.message.code_interpreter_calls[0]["container_id"]

        first, second, _ = upstream.asked(model)
        assert len(second.outputs) == 2 and "21" in second.outputs, "the model knows what its code did"
        assert "x = 20 + 1" in json.dumps(second.body)
        assert first.tools == second.tools == ["weather", "python"]


def test_forgotten_calls_do_not_stop_the_conversation(client: openai.OpenAI, play: Play):
    call = {"id": "call_0123456789abcdef01234000", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: list[Any] = [
        *ASKED,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "1"},
    ]
    made = client.chat.completions.create(model=play([Text("Fine.")]), messages=messages, tools=TOOLS)
    assert made.choices[0].message.content == "Fine."


def test_several_calls_have_distinct_ids_despite_upstream_ids(client: openai.OpenAI, play: Play):
    def script() -> str:
        return play([Function("weather", {"city": "A"}, call_id="0"), Function("weather", {"city": "B"}, call_id="1")])

    for choice in whole_and_streamed(client, script, tools=[*TOOLS, WEATHER]):
        first, second = choice.message.tool_calls
        assert first.id != second.id and first.id.startswith("call_") and second.id.startswith("call_")
        assert [json.loads(call.function.arguments)["city"] for call in (first, second)] == ["A", "B"]


def test_custom_tools_are_called_by_their_own_name(client: openai.OpenAI, play: Play):
    tools = [*TOOLS, {"type": "custom", "custom": {"name": "shout"}}]
    made = client.chat.completions.create(model=play([Custom("shout", "hey")]), messages=ASKED, tools=tools)
    (call,) = made.choices[0].message.tool_calls or []
    assert call.type == "custom" and (call.custom.name, call.custom.input) == ("shout", "hey")


# -- where code runs


def test_a_session_keeps_its_container_across_requests_and_streams(client: openai.OpenAI, play: Play):
    def run(code: str, session: str | None, *, stream: bool = False) -> Any:
        fields: Any = {"model": play([Code(code)], [Text("Done.")]), "messages": ASKED, "tools": TOOLS}
        if session:
            fields["metadata"] = {"session_id": session}
        if stream:
            with client.chat.completions.stream(**fields) as told:
                return told.get_final_completion().choices[0].message.code_interpreter_calls[0]
        return client.chat.completions.create(**fields).choices[0].message.code_interpreter_calls[0]

    name = f"sticky-{id(play)}"
    first = run("x = 41", name)
    assert run("print(x + 1)", name, stream=True)["outputs"][0]["logs"] == "42\n"
    assert run("x", name)["container_id"] == first["container_id"]
    assert "NameError" in run("x", name + "-other")["outputs"][0]["logs"]
    assert "NameError" in run("x", None)["outputs"][0]["logs"]


def test_two_first_requests_of_a_session_get_one_container(client: openai.OpenAI, play: Play):
    models = [play([Code("1")], [Text("Done.")]) for _ in range(4)]
    metadata = {"session_id": f"race-{models[0]}-{id(models)}"}

    def run(model: str) -> str:
        made: Any = client.chat.completions.create(model=model, messages=ASKED, tools=TOOLS, metadata=metadata)
        return str(made.choices[0].message.code_interpreter_calls[0]["container_id"])

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(run, models))) == 1


def test_a_session_whose_container_has_expired_goes_on_and_the_model_is_told(
    client: openai.OpenAI, gateway_server: RunningServer, upstream: ScriptedUpstream, play: Play
):
    def run(code: str) -> tuple[str, Any]:
        model = play([Code(code)], [Text("Done.")])
        made: Any = client.chat.completions.create(model=model, messages=ASKED, tools=TOOLS, metadata=metadata)
        return model, made.choices[0].message.code_interpreter_calls[0]

    metadata = {"session_id": f"gone-{id(play)}"}
    first = run("x = 1")[1]["container_id"]
    _expire(gateway_server, first)
    model, second = run("x")
    assert second["container_id"] != first and "NameError" in second["outputs"][0]["logs"]
    before, after = upstream.asked(model)
    assert "expired and was replaced" in json.dumps(before.body["tools"])
    assert "expired and was replaced" in after.outputs[0]
    assert "expired" not in json.dumps(upstream.asked(run("1")[0])[0].body), "that is said once"


def _expire(server: RunningServer, container: str) -> None:
    """A container is a sandbox: another protocol can end its time."""
    sandbox = f"{server.url}/e2b/sandboxes/{container.removeprefix('cntr_')}"
    headers = {"x-api-key": server.key}
    httpx2.post(f"{sandbox}/timeout", headers=headers, json={"timeout": 0}).raise_for_status()
    while httpx2.get(sandbox, headers=headers).status_code == 200:
        time.sleep(0.02)


def test_a_named_container_is_used_and_said_in_a_header(client: openai.OpenAI, play: Play):
    container = client.containers.create(name="mine").id
    for tool in (
        {"type": "code_interpreter", "container": container},
        {"type": "code_interpreter", "code_interpreter": {"container": container}},
    ):
        fields: Any = {"messages": ASKED, "tools": [tool]}
        raw = client.chat.completions.with_raw_response.create(model=play([Code("1")], [Text("Done.")]), **fields)
        assert raw.headers["x-container-id"] == container
        streamed = client.chat.completions.with_raw_response.create(
            model=play([Code("1")], [Text("Done.")]), stream=True, **fields
        )
        assert streamed.headers["x-container-id"] == container
        streamed.http_response.close()
    with pytest.raises(openai.NotFoundError):
        tools: Any = [{"type": "code_interpreter", "container": "cntr_nobodys"}]
        client.chat.completions.create(model=play([Text("?")]), messages=ASKED, tools=tools)


def test_an_answer_that_is_given_back_as_it_was_goes_on_in_its_container(
    client: openai.OpenAI, upstream: ScriptedUpstream, play: Play
):
    first = client.chat.completions.create(
        model=play([Code("x = 42")], [Text("Set.")]), messages=ASKED, tools=TOOLS
    ).choices[0]
    model = play([Code("print(x)")], [Text("Done.")])
    messages: list[Any] = [*ASKED, first.message, {"role": "user", "content": "and now?"}]
    second: Any = client.chat.completions.create(model=model, messages=messages, tools=TOOLS).choices[0]
    assert second.message.code_interpreter_calls[0]["outputs"][0]["logs"] == "42\n"
    assert "x = 42" in json.dumps(upstream.asked(model)[0].body)


def test_the_native_tool_never_reaches_an_upstream(client: openai.OpenAI, upstream: ScriptedUpstream, play: Play):
    model = play([Code("1")], [Text("Done.")])
    choice: Any = {"type": "code_interpreter"}
    client.chat.completions.create(model=model, messages=ASKED, tools=TOOLS, tool_choice=choice)
    first, second = upstream.asked(model)
    assert "code_interpreter" not in json.dumps([first.body, second.body])
    assert first.body["tool_choice"]["type"] == "function" and second.body.get("tool_choice", "auto") == "auto"


# -- without code


def test_a_chat_upstream_gets_the_request_as_it_came_and_the_client_the_answer(
    client: openai.OpenAI, upstream: ScriptedUpstream
):
    for stream in (False, True):
        model = upstream.play("chat", [Text("Hello."), Function("weather", {"city": "Oslo"}, call_id="call_theirs")])
        fields: Any = {"model": model, "messages": ASKED, "tools": [WEATHER], "seed": 7, "extra_body": {"top_k": 3}}
        if stream:
            with client.chat.completions.stream(**fields) as told:
                choice: Any = told.get_final_completion().choices[0]
        else:
            choice = client.chat.completions.create(**fields).choices[0]
        assert choice.message.content == "Hello." and choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls[0].id == "call_theirs"
        (asked,) = upstream.asked(model)
        sent = {"model": model, "messages": ASKED, "tools": [WEATHER], "seed": 7, "top_k": 3}
        assert asked.body == ({**sent, "stream": True} if stream else sent)
        assert asked.headers["authorization"] == f"Bearer {UPSTREAM_KEY}"


def test_a_responses_upstream_is_asked_in_its_own_words(client: openai.OpenAI, upstream: ScriptedUpstream):
    def script() -> str:
        return upstream.play("resp", [Text("Hello."), Function("weather", {"city": "Oslo"})])

    for choice in whole_and_streamed(client, script, tools=[WEATHER], max_tokens=50, reasoning_effort="low"):
        assert choice.message.content == "Hello." and choice.finish_reason == "tool_calls"
    body = upstream.requests[-1].body
    assert body["max_output_tokens"] == 50 and body["reasoning"]["effort"] == "low"
    assert body["tools"][0]["name"] == "weather"


def test_an_upstream_that_cannot_stream_is_streamed_to_the_client(client: openai.OpenAI, upstream: ScriptedUpstream):
    with client.chat.completions.stream(model=upstream.play("whole", [Text("Hello.")]), messages=ASKED) as told:
        assert told.get_final_completion().choices[0].message.content == "Hello."


def test_echo_answers_chats_too(client: openai.OpenAI):
    asked: list[Any] = [{"role": "user", "content": "```python\nprint(6 * 7)\n```"}]

    for choice in whole_and_streamed(client, lambda: "cloche/echo", messages=asked):
        assert choice.message.content == "42"
