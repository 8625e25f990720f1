"""Upstreams with a Responses API of their own, behind a real gateway, with OpenAI's own client."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel
from tests.openai.conftest import CODE_INTERPRETER, UPSTREAM_KEY, check_no_native_tool
from tests.openai.upstream import (
    BreakOff,
    Code,
    ContentFilter,
    Custom,
    Function,
    Garbage,
    Hang,
    HttpError,
    IncompleteLength,
    Interleaved,
    NoFinish,
    Raw,
    Reasoning,
    Refusal,
    ScriptedUpstream,
    StreamError,
    Text,
    UnknownItem,
    Usage,
    WaitFor,
)

WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
SEARCH = {"type": "web_search"}
OUTPUTS = ["code_interpreter_call.outputs"]
SEARCH_CALL = {"type": "web_search_call", "action": {"type": "search", "query": "cats", "queries": ["cats"]}}
SEARCH_EVENTS = [f"response.web_search_call.{step}" for step in ("in_progress", "searching", "completed")]
URL_CITATION = {"type": "url_citation", "url": "https://cat.test", "title": "Cats", "start_index": 0, "end_index": 4}

Play = Callable[..., str]


@pytest.fixture
def play(upstream: ScriptedUpstream) -> Play:
    return lambda *legs: upstream.play("resp", *legs)


@pytest.fixture(autouse=True)
def _the_native_tool_reaches_no_upstream(upstream: ScriptedUpstream) -> Iterator[None]:
    """In no test of this file, whatever it asks for."""
    yield
    check_no_native_tool(upstream.requests)


def ask(client: OpenAI, model: str, **options: Any) -> Any:
    """A response with the code tool, streamed by the SDK's strict helper."""
    given = {"input": "?", "tools": [CODE_INTERPRETER], "include": OUTPUTS, **options}
    with client.responses.stream(model=model, **given) as stream:
        for _ in stream:
            pass
        return stream.get_final_response()


def raw_events(client: OpenAI, model: str, **options: Any) -> list[Any]:
    given = {"input": "?", "tools": [CODE_INTERPRETER], **options}
    return list(client.responses.create(model=model, stream=True, **given))


def kinds(response: Any) -> list[str]:
    return [item.type for item in response.output]


# -- what an upstream is asked


def test_an_upstream_keeps_nothing_and_is_sent_the_whole_transcript(client: OpenAI, play: Play, upstream):
    model = play([Reasoning(summary="hm", encrypted="ENC-1"), Code("print(6 * 7)")], [Text("It is 42.")])
    response = ask(client, model, instructions="Be brief.", temperature=0.5, metadata={"secret": "mine"})
    assert response.output_text == "It is 42."
    first, second = upstream.asked(model)
    for asked in (first, second):
        body = asked.body
        assert asked.headers["authorization"] == f"Bearer {UPSTREAM_KEY}"
        assert (body["store"], body["stream"], body["instructions"]) == (False, True, "Be brief.")
        assert body["include"] == ["reasoning.encrypted_content"] and body["temperature"] == 0.5
        assert not {"previous_response_id", "conversation", "background", "metadata"} & set(body)
    assert [item["type"] for item in second.body["input"]] == [
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
    ]
    assert second.body["input"][1]["encrypted_content"] == "ENC-1"
    assert second.body["input"][1]["id"].startswith("rs_up_")  # its own id: what is encrypted is bound to it
    assert second.outputs == ["42\n"]


def test_reasoning_stays_before_the_call_that_it_led_to_over_many_legs(client: OpenAI, play: Play, upstream):
    legs = [[Reasoning(summary=f"s{n}", encrypted=f"ENC-{n}"), Code(f"print({n})")] for n in range(3)]
    response = ask(client, play(*legs, [Reasoning(encrypted="ENC-3"), Text("done")]))
    assert kinds(response) == ["reasoning", "code_interpreter_call"] * 3 + ["reasoning", "message"]
    last = upstream.asked(response.model)[-1].body["input"]
    sent = [item.get("encrypted_content") or item["type"] for item in last[1:]]
    step = ["function_call", "function_call_output"]
    assert sent == ["ENC-0", *step, "ENC-1", *step, "ENC-2", *step]


def test_earlier_items_are_sent_with_the_upstreams_own_ids(client: OpenAI, play: Play, upstream):
    model = play([Reasoning(encrypted="ENC"), Code("x = 1")], [Text("first")], [Text("second")])
    first = client.responses.create(model=model, input="?", tools=[CODE_INTERPRETER])
    client.responses.create(model=model, input="and?", tools=[CODE_INTERPRETER], previous_response_id=first.id)
    items = upstream.asked(model)[-1].body["input"]
    assert [item["type"] for item in items] == [
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
        "message",
        "message",
    ]
    assert items[1]["id"].startswith("rs_up_") and items[4]["id"].startswith("msg_up_")


def test_items_that_a_client_sends_back_are_accepted_there(client: OpenAI, play: Play, upstream):
    model = play([Reasoning(summary="s", encrypted="ENC"), Code("1 + 1")], [Text("two")], [Text("three")])
    first = ask(client, model, store=False)
    replayed = [{"role": "user", "content": "?"}, *(item.to_dict() for item in first.output)]
    again = client.responses.create(
        model=model, input=[*replayed, {"role": "user", "content": "and?"}], tools=[CODE_INTERPRETER], store=False
    )
    assert again.output_text == "three"
    items = upstream.asked(model)[-1].body["input"]
    reasoning = next(item for item in items if item["type"] == "reasoning")
    assert reasoning["encrypted_content"] == "ENC" and "id" not in reasoning  # ours would not match what is encrypted
    assert None not in [value for item in items for value in item.values()]
    assert upstream.asked(model)[-1].outputs == ["2\n"]


def test_reasoning_that_says_nothing_is_not_sent_back(client: OpenAI, play: Play, upstream):
    model = play([Text("fine")])
    items = [
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "s"}]},
        {"role": "user", "content": "?"},
    ]
    client.responses.create(model=model, input=items)
    assert [item["type"] for item in upstream.asked(model)[0].body["input"]] == ["message"]


def test_a_model_that_does_not_reason_is_asked_again_without(client: OpenAI, play: Play, upstream):
    refusal = {"error": {"message": "Encrypted content is not supported with this model.", "param": "include"}}
    model = play([HttpError(400, refusal)], [Text("one")], [Text("two")])
    assert client.responses.create(model=model, input="?").output_text == "one"
    assert client.responses.create(model=model, input="?").output_text == "two"
    includes = [asked.body["include"] for asked in upstream.asked(model)]
    assert includes == [["reasoning.encrypted_content"], [], []]


def test_includes_of_one_client_change_nothing_for_others(client: OpenAI, play: Play, upstream):
    refusal = {"error": {"message": "Not supported with this model.", "param": "include"}}
    model = play([HttpError(400, refusal)], [Text("one")], [Text("two")])
    given = ["web_search_call.action.sources"]
    assert client.responses.create(model=model, input="?", include=given).output_text == "one"
    assert client.responses.create(model=model, input="?").output_text == "two"
    includes = [asked.body["include"] for asked in upstream.asked(model)]
    assert includes == [[*given, "reasoning.encrypted_content"], given, ["reasoning.encrypted_content"]]


def test_unhelpful_fallbacks_are_not_remembered(client: OpenAI, play: Play, upstream):
    refusal = HttpError(400, {"error": {"message": "Encrypted content is not supported.", "param": "include"}})
    model = play([refusal], [refusal], [Text("fine")])
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model=model, input="?")
    assert client.responses.create(model=model, input="?").output_text == "fine"
    assert upstream.asked(model)[-1].body["include"] == ["reasoning.encrypted_content"]


def test_reasoning_of_another_server_is_left_out_where_it_is_refused(client: OpenAI, play: Play, upstream):
    refusal = {"error": {"message": "could not be verified", "code": "invalid_encrypted_content"}}
    model = play([HttpError(400, refusal)], [Text("fine")])
    items = [{"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "of another"}]
    answer = client.responses.create(model=model, input=[*items, {"role": "user", "content": "?"}])
    assert answer.output_text == "fine"
    assert [len(asked.body["input"]) for asked in upstream.asked(model)] == [2, 1]


def test_includes_of_the_client_reach_the_upstream_but_not_those_about_code(client: OpenAI, play: Play, upstream):
    model = play([Text("fine")])
    ask(client, model, include=[*OUTPUTS, "web_search_call.action.sources", "reasoning.encrypted_content"])
    asked = upstream.asked(model)[0].body["include"]
    assert asked == ["web_search_call.action.sources", "reasoning.encrypted_content"]


def test_an_upstream_that_does_not_stream_says_the_same(client: OpenAI, upstream: ScriptedUpstream):
    legs = [[Reasoning(summary="hm", encrypted="E"), Code("print(1)")], [Text("one", annotations=[URL_CITATION])]]
    still = ask(client, upstream.play("still", *legs))
    streamed = ask(client, upstream.play("resp", *legs))
    assert kinds(still) == kinds(streamed) == ["reasoning", "code_interpreter_call", "message"]
    assert still.output[1].outputs[0].logs == "1\n"
    assert still.output[2].content[0].annotations == streamed.output[2].content[0].annotations
    assert [asked.body["stream"] for asked in upstream.asked(still.model)] == [False, False]


# -- what a client sees


def test_text_is_passed_on_before_the_rest_is_said(client: OpenAI, play: Play):
    heard = threading.Event()
    model = play([Text("first"), WaitFor(heard), Text("second")])
    for event in client.responses.create(model=model, input="?", stream=True):
        if event.type == "response.output_text.delta":
            heard.set()
    assert event.type == "response.completed" and event.response.output_text == "firstsecond"


def test_no_id_of_the_upstream_reaches_the_client_but_those_of_calls(client: OpenAI, play: Play):
    leg = [
        Reasoning("deep", summary="s", encrypted="E"),
        UnknownItem(SEARCH_CALL, events=SEARCH_EVENTS),
        Text("text", annotations=[URL_CITATION]),
        Refusal("no"),
        Custom("grep", "x", call_id="call_of_custom"),
        Function("weather", {}, call_id="call_of_function"),
    ]
    tools = [CODE_INTERPRETER, WEATHER, SEARCH, {"type": "custom", "name": "grep"}]
    for event in raw_events(client, play([Code("1"), UnknownItem(SEARCH_CALL)], leg), tools=tools):
        assert "up_" not in event.to_json()
    final = event.response
    assert [item.call_id for item in final.output[-2:]] == ["call_of_custom", "call_of_function"]


def test_hosted_tools_of_the_upstream_work_beside_code(client: OpenAI, play: Play, upstream):
    model = play(
        [UnknownItem(SEARCH_CALL, events=SEARCH_EVENTS), Code("print('ran')")],
        [Text("Cats.", annotations=[URL_CITATION])],
    )
    events = raw_events(client, model, tools=[SEARCH, CODE_INTERPRETER])
    assert [event.type for event in events if "web_search" in event.type] == SEARCH_EVENTS
    response = events[-1].response
    assert kinds(response) == ["web_search_call", "code_interpreter_call", "message"]
    searching = next(event for event in events if event.type == SEARCH_EVENTS[0])
    assert searching.item_id == response.output[0].id
    assert response.output[2].content[0].annotations[0].title == "Cats"
    second = upstream.asked(model)[1].body["input"]
    assert second[1]["type"] == "web_search_call" and second[1]["id"].startswith("ws_up_")


def test_events_that_clients_do_not_know_are_not_passed_on(client: OpenAI, play: Play):
    model = play([UnknownItem({"type": "web_search_call", **SEARCH_CALL}, events=["response.from.the_future"])])
    assert "future" not in " ".join(event.type for event in raw_events(client, model, tools=[SEARCH]))


def test_an_approval_keeps_the_id_by_which_it_is_answered(client: OpenAI, play: Play, upstream):
    request = {"type": "mcp_approval_request", "id": "mcpr_7", "name": "f", "arguments": "{}", "server_label": "wiki"}
    mcp = {"type": "mcp", "server_label": "wiki", "server_url": "https://wiki.test", "require_approval": "always"}
    model = play([Code("1"), UnknownItem(request)], [Text("done")])
    first = ask(client, model, tools=[CODE_INTERPRETER, mcp])
    assert kinds(first) == ["code_interpreter_call", "mcp_approval_request"]  # it waits for the client
    assert first.output[1].id == "mcpr_7"
    yes = {"type": "mcp_approval_response", "approval_request_id": "mcpr_7", "approve": True}
    answer = client.responses.create(model=model, input=[yes], tools=[mcp], previous_response_id=first.id)
    assert answer.output_text == "done"
    assert "mcpr_7" in [item.get("id") for item in upstream.asked(model)[1].body["input"]]


def test_a_clients_function_ends_the_turn_after_the_code_has_run(client: OpenAI, play: Play, upstream):
    model = play([Interleaved(Code("print(1)"), Function("weather", {"city": "Oslo"}, call_id="w"))], [Text("Rain.")])
    first = ask(client, model, tools=[CODE_INTERPRETER, WEATHER])
    assert kinds(first) == ["code_interpreter_call", "function_call"]
    assert json.loads(first.output[1].arguments) == {"city": "Oslo"}
    answer = {"type": "function_call_output", "call_id": "w", "output": "rain"}
    second = client.responses.create(
        model=model, input=[answer], tools=[CODE_INTERPRETER, WEATHER], previous_response_id=first.id
    )
    assert second.output_text == "Rain." and upstream.asked(model)[1].outputs == ["1\n", "rain"]


def test_requests_without_the_code_tool_pass_through(client: OpenAI, play: Play, upstream):
    model = play([Reasoning(summary="s"), Function("weather", {"city": "Oslo"})])
    choice = {"type": "function", "name": "weather"}
    response = ask(client, model, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False, include=[])
    assert kinds(response) == ["reasoning", "function_call"]
    body = upstream.asked(model)[0].body
    assert body["tools"] == [WEATHER] and body["tool_choice"] == choice and body["parallel_tool_calls"] is False


def test_a_function_of_the_clients_called_python_is_the_clients(client: OpenAI, play: Play, upstream):
    theirs = {**WEATHER, "name": "python"}
    model = play([Function("python", {"city": "x"}, call_id="theirs")])
    response = ask(client, model, tools=[theirs, CODE_INTERPRETER])
    assert kinds(response) == ["function_call"] and response.output[0].call_id == "theirs"
    assert upstream.asked(model)[0].tools == ["python", "python_interpreter"]


class Answer(BaseModel):
    value: int


def test_structured_answers_are_parsed(client: OpenAI, play: Play, upstream):
    model = play([Code("print(6 * 7)")], [Text('{"value": 42}')])
    response = client.responses.parse(model=model, input="?", tools=[CODE_INTERPRETER], text_format=Answer)
    assert response.output_parsed == Answer(value=42)
    assert [asked.body["text"]["format"]["type"] for asked in upstream.asked(model)] == ["json_schema"] * 2


def test_logprobs_are_passed_on(client: OpenAI, play: Play, upstream):
    probability = {"token": "Hi", "logprob": -0.5, "bytes": [72, 105], "top_logprobs": []}
    added = {"id": "msg_up_x", "type": "message", "role": "assistant", "status": "in_progress", "content": []}
    part = {"type": "output_text", "text": "Hi", "annotations": [], "logprobs": [probability]}
    place = {"output_index": 0, "item_id": "msg_up_x", "content_index": 0}
    events = [
        {"type": "response.output_item.added", "output_index": 0, "item": added},
        {"type": "response.output_text.delta", "delta": "Hi", "logprobs": [probability], **place},
        {"type": "response.output_item.done", "output_index": 0, "item": {**added, "content": [part]}},
    ]
    model = play([Raw("".join(f"data: {json.dumps(event)}\n\n" for event in events))])
    include = ["message.output_text.logprobs"]
    heard = raw_events(client, model, include=include, top_logprobs=2)
    delta = next(event for event in heard if event.type == "response.output_text.delta")
    assert delta.logprobs[0].token == "Hi"
    assert heard[-1].response.output[0].content[0].logprobs[0].logprob == -0.5
    body = upstream.asked(model)[0].body
    assert body["include"][0] == include[0] and body["top_logprobs"] == 2


def test_a_refusal_is_a_refusal(client: OpenAI, play: Play):
    response = ask(client, play([Refusal("I will not.")]))
    assert response.output[0].content[0].refusal == "I will not."


def test_tokens_of_all_legs_are_summed(client: OpenAI, play: Play):
    legs = [[Code("1"), Usage(10, 5, cached=4, reasoning=2)], [Text("x"), Usage(30, 7, cached=8, reasoning=1)]]
    usage = ask(client, play(*legs)).usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (40, 12, 52)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (12, 3)


# -- how much, and what must be chosen


def test_code_is_forced_in_the_first_leg_only(client: OpenAI, play: Play, upstream):
    model = play([Code("1")], [Text("x")])
    response = ask(client, model, tool_choice={"type": "code_interpreter"})
    first, second = (asked.body["tool_choice"] for asked in upstream.asked(model))
    assert (first, second) == ({"type": "function", "name": "python"}, "auto")
    assert response.tool_choice.type == "code_interpreter"  # the client's own words


def test_after_the_last_tool_call_the_model_must_answer(client: OpenAI, play: Play, upstream):
    model = play([Code("print(1)")], [Code("print(2)")], [Text("enough")])
    response = ask(client, model, max_tool_calls=2)
    assert response.output_text == "enough" and kinds(response).count("code_interpreter_call") == 2
    assert [asked.body["tool_choice"] for asked in upstream.asked(model)] == ["auto", "auto", "none"]


def test_calls_of_the_upstreams_own_tools_count_too(client: OpenAI, play: Play, upstream):
    model = play([UnknownItem(SEARCH_CALL), Code("print(1)")], [Text("enough")])
    ask(client, model, tools=[SEARCH, CODE_INTERPRETER], max_tool_calls=2)
    first, second = (asked.body for asked in upstream.asked(model))
    assert first["max_tool_calls"] == 2
    assert [tool["type"] for tool in second["tools"]] == ["function"] and second["tool_choice"] == "none"


@pytest.mark.parametrize("tools", [[CODE_INTERPRETER], [CODE_INTERPRETER, WEATHER]])
def test_a_model_that_never_stops_calling_code_is_stopped(client: OpenAI, upstream, tools: list[Any]):
    model = upstream.play("resp")
    upstream.script(model, lambda body: [Code("print(1)")])
    response = ask(client, model, max_tool_calls=1, tools=tools)
    assert response.status == "completed" and kinds(response) == ["code_interpreter_call"]
    assert len(upstream.asked(model)) <= 4
    assert upstream.asked(model)[-1].outputs[0] == "1\n"
    assert all("Not run" in output for output in upstream.asked(model)[-1].outputs[1:])


def test_of_parallel_calls_only_as_many_run_as_may(client: OpenAI, play: Play, upstream):
    model = play([Code("print(1)"), Code("print(2)"), Code("print(3)")], [Text("x")])
    response = ask(client, model, max_tool_calls=2)
    assert kinds(response) == ["code_interpreter_call", "code_interpreter_call", "message"]
    outputs = upstream.asked(model)[1].outputs
    assert outputs[:2] == ["1\n", "2\n"] and "Not run" in outputs[2]


def test_the_limit_of_tokens_is_for_all_legs(client: OpenAI, play: Play, upstream):
    model = play([Code("1"), Usage(10, 60)], [Text("x"), Usage(10, 20)])
    ask(client, model, max_output_tokens=100)
    assert [asked.body["max_output_tokens"] for asked in upstream.asked(model)] == [100, 40]


def test_a_turn_without_tokens_left_is_incomplete(client: OpenAI, play: Play, upstream):
    model = play([Code("print(1)"), Usage(10, 95)])
    response = client.responses.create(model=model, input="?", tools=[CODE_INTERPRETER], max_output_tokens=100)
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    assert kinds(response) == ["code_interpreter_call"] and len(upstream.asked(model)) == 1


@pytest.mark.parametrize(
    ("part", "reason"), [(IncompleteLength, "max_output_tokens"), (ContentFilter, "content_filter")]
)
def test_an_incomplete_answer_is_incomplete(client: OpenAI, play: Play, part: Any, reason: str):
    events = raw_events(client, play([Text("Once upon"), part()]))
    assert events[-1].type == "response.incomplete"
    response = events[-1].response
    assert response.incomplete_details.reason == reason and response.output[0].status == "incomplete"


def test_code_that_was_cut_off_does_not_run(client: OpenAI, play: Play):
    model = play([Code("", raw_arguments="{\"code\": \"open('/mnt/data/x', 'w"), IncompleteLength()])
    response = client.responses.create(model=model, input="?", tools=[CODE_INTERPRETER], include=OUTPUTS)
    assert response.status == "incomplete" and response.output[0].status == "incomplete"
    assert response.output[0].outputs == []


# -- what goes wrong

BROKEN = [
    pytest.param([Text("Hel"), BreakOff()], id="breaks off"),
    pytest.param([Text("Hel"), NoFinish()], id="no end"),
    pytest.param([Text("Hel"), Garbage()], id="garbage"),
    pytest.param([Text("Hel"), StreamError("It broke", code="server_error")], id="error"),
    pytest.param([Text("Hel"), Raw('data: {"type": "error", "message": "It broke"}\n\n')], id="flat error"),
    pytest.param([Raw('data: {"type": "response.output_text.delta", "delta": "x"}\n\n')], id="delta of nothing"),
    pytest.param([Raw("data: [1, 2]\n\n")], id="no object"),
    pytest.param([Raw('event: error\ndata: {"error": {"message": "It broke"}}\n\n')], id="an error without a type"),
    pytest.param([UnknownItem({"type": "code_interpreter_call", "id": "ci_x"})], id="its own interpreter"),
]


@pytest.mark.parametrize("leg", BROKEN)
def test_a_broken_stream_is_a_failed_response(client: OpenAI, play: Play, leg: list[Any]):
    seen = []
    with pytest.raises(openai.APIError):
        for event in client.responses.create(model=play(leg), input="?", stream=True):
            seen.append(event.type)
    assert "response.completed" not in seen


@pytest.mark.parametrize("leg", BROKEN)
def test_a_broken_answer_after_code_has_run_is_not_tried_again(client: OpenAI, play: Play, leg: list[Any]):
    with pytest.raises(openai.APIStatusError) as caught:
        client.responses.create(model=play([Code("1")], leg), input="?", tools=[CODE_INTERPRETER])
    assert caught.value.status_code >= 500
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert UPSTREAM_KEY not in caught.value.response.text


def test_a_client_that_leaves_hangs_up_on_the_upstream(client: OpenAI, play: Play, upstream):
    model = play([Text("Once"), Hang()])
    with client.responses.create(model=model, input="?", stream=True) as stream:
        assert any(event.type == "response.output_text.delta" for event in stream)
    assert upstream.asked(model)[0].abandoned.wait(60)


def test_a_limit_of_the_upstream_is_told_as_one(client: OpenAI, play: Play):
    with pytest.raises(openai.RateLimitError):
        client.responses.create(model=play([StreamError("slow down", code="rate_limit_exceeded")]), input="?")


def test_a_refused_request_is_told_in_the_upstreams_words(client: OpenAI, play: Play):
    error = {"message": "Too many images", "type": "invalid_request_error", "param": "input", "code": "too_many"}
    with pytest.raises(openai.BadRequestError, match="Too many images") as caught:
        client.responses.create(model=play([HttpError(400, {"error": error})]), input="?")
    assert (caught.value.param, caught.value.code) == ("input", "too_many")


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tool_choice": {"type": "code_interpreter"}, "tools": [WEATHER]}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": "all"}}, "tool_choice.tools"),
        ({"tools": [{"type": "shell", "environment": {"type": "container_auto"}}]}, "tools[0].environment"),
        ({"tools": [{"name": "typeless"}]}, "tools[0].type"),
        (
            {"input": [{"type": "additional_tools", "role": "developer", "tools": [CODE_INTERPRETER]}]},
            "input[0].tools[0]",
        ),
    ],
)
def test_unsupported_requests_are_refused_before_any_upstream_call(
    client: OpenAI, play: Play, upstream, options: dict[str, Any], param: str
):
    model = play([Text("never")])
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": model, "input": "?", **options})
    assert caught.value.param == param and not upstream.asked(model)
