"""Models behind Chat Completions, through the whole server and OpenAI's own client."""

from __future__ import annotations

import json
import threading

import openai
import pytest
from tests.conftest import wait_until
from tests.openai.conftest import CODE_INTERPRETER, UPSTREAM_KEY
from tests.openai.upstream import (
    BreakOff,
    ChatDelta,
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
    StreamError,
    Text,
    Usage,
    WaitFor,
)

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
BOTH = [CODE_INTERPRETER, WEATHER]
INCLUDE = ["code_interpreter_call.outputs"]
RED = "from IPython.display import Image; import base64; Image(base64.b64decode({!r}), format='png')"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def kinds(response):
    return [item.type for item in response.output]


def streamed(client, **asked):
    """The events of a stream, and the response that its accumulator made of them."""
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        return events, stream.get_final_response()


# -- what models say


def test_text_comes_word_by_word(client, upstream):
    heard = threading.Event()
    model = upstream.play("chat", [Text("Hello, "), WaitFor(heard), Text("world.")])
    deltas = []
    with client.responses.stream(model=model, input="Hi") as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                deltas.append(event.delta)
                heard.set()
    assert deltas == ["Hello, ", "world."]


def test_an_upstream_that_cannot_stream_gives_the_same(client, upstream):
    legs = ([Reasoning("Hmm."), Text("I will count."), Code("print(6 * 7)")], [Text("It is 42.")])
    outputs = {}
    for style in ("chat", "whole"):
        model = upstream.play(style, *legs)
        events, response = streamed(client, model=model, input="?", tools=[CODE_INTERPRETER], include=INCLUDE)
        assert events[-1].type == "response.completed"
        outputs[style] = [(item.type, getattr(item, "code", None)) for item in response.output]
        assert response.output_text == "I will count.It is 42."
    assert outputs["chat"] == outputs["whole"]


def test_code_runs_and_its_output_goes_back(client, upstream):
    model = upstream.play("chat", [Text("Let me see."), Code("print(6 * 7)")], [Text("It is 42.")])
    response = client.responses.create(model=model, input="?", tools=[CODE_INTERPRETER], include=INCLUDE)
    assert kinds(response) == ["message", "code_interpreter_call", "message"]
    assert response.output[1].outputs[0].logs == "42\n"
    first, second = upstream.asked(model)
    assert first.tools == ["python"]
    user, assistant, tool = second.body["messages"]
    assert assistant["content"] == "Let me see."
    assert json.loads(assistant["tool_calls"][0]["function"]["arguments"]) == {"code": "print(6 * 7)"}
    assert tool == {"role": "tool", "tool_call_id": assistant["tool_calls"][0]["id"], "content": "42\n"}
    assert user == {"role": "user", "content": "?"}


def test_the_key_and_the_request_id_are_sent(client, upstream):
    model = upstream.play("chat", [Text("Hi")])
    raw = client.responses.with_raw_response.create(model=model, input="?")
    headers = upstream.asked(model)[0].headers
    assert headers["authorization"] == f"Bearer {UPSTREAM_KEY}"
    assert headers["x-client-request-id"] == raw.headers["x-request-id"]


def test_functions_of_the_client_reach_it_with_their_ids(client, upstream):
    model = upstream.play("chat", [Function("weather", {"city": "Oslo"}, call_id="call_7")], [Text("Cold.")])
    events, response = streamed(client, model=model, input="?", tools=[WEATHER])
    call = response.output[0]
    assert (call.name, call.call_id, json.loads(call.arguments)) == ("weather", "call_7", {"city": "Oslo"})
    deltas = [each.delta for each in events if each.type == "response.function_call_arguments.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == call.arguments
    answer = {"type": "function_call_output", "call_id": "call_7", "output": "-3 °C"}
    again = client.responses.create(model=model, input=[{"role": "user", "content": "?"}, call.to_dict(), answer])
    assert again.output_text == "Cold."
    assert upstream.asked(model)[1].outputs == ["-3 °C"]


def test_code_and_a_function_at_once(client, upstream):
    model = upstream.play("chat", [Code("print(1)"), Function("weather", {"city": "Oslo"})])
    response = client.responses.create(model=model, input="?", tools=BOTH)
    assert kinds(response) == ["code_interpreter_call", "function_call"]


def test_calls_whose_pieces_alternate_come_one_after_the_other(client, upstream):
    model = upstream.play(
        "chat", [Interleaved(Code("print('first')"), Code("print('second')"), Function("weather", {"city": "Oslo"}))]
    )
    _, response = streamed(client, model=model, input="?", tools=BOTH, include=INCLUDE)
    assert kinds(response) == ["code_interpreter_call", "code_interpreter_call", "function_call"]
    assert [call.outputs[0].logs for call in response.output[:2]] == ["first\n", "second\n"]
    assert json.loads(response.output[2].arguments) == {"city": "Oslo"}


def test_a_repeated_call_id_is_made_unique(client, upstream):
    calls = [Function("weather", {"city": city}, call_id="call_0") for city in ("Oslo", "Rome")]
    model = upstream.play("chat", [Code("1", call_id="call_0")], calls)
    _, response = streamed(client, model=model, input="?", tools=BOTH)
    ids = [item.call_id for item in response.output if item.type == "function_call"]
    assert len(set(ids)) == 2
    assert "call_0" not in ids  # which is the code's


@pytest.mark.parametrize(
    "deltas",
    [
        pytest.param(
            [{"tool_calls": [{"id": "a", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}]}],
            id="an object, and no index",
        ),
        pytest.param(
            [
                {"tool_calls": [{"index": 0, "function": {"name": "weather", "arguments": ""}}]},
                {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
                {"tool_calls": [{"index": 0, "id": "", "function": {"name": None, "arguments": '"Oslo"}'}}]},
            ],
            id="no id",
        ),
        pytest.param(
            [
                {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "weather", "arguments": '{"city"'}}]},
                {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "weather", "arguments": ': "Oslo"}'}}]},
            ],
            id="id and name every time",
        ),
        pytest.param(
            [
                {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "weather", "arguments": '{"city"'}}]},
                {"tool_calls": [{"index": 0, "id": "b", "function": {"name": "weather", "arguments": ': "Oslo"}'}}]},
            ],
            id="another id every time",
        ),
        pytest.param(
            [
                {"tool_calls": [{"index": 0, "id": "a", "function": {"arguments": '{"city"'}}]},
                {"tool_calls": [{"index": 0, "function": {"name": "weather", "arguments": ': "Oslo"}'}}]},
            ],
            id="the name late",
        ),
        pytest.param(
            [
                {"function_call": {"name": "weather", "arguments": '{"city":'}},
                {"function_call": {"arguments": '"Oslo"}'}},
            ],
            id="as it was in 2023",
        ),
    ],
)
def test_calls_as_other_servers_send_them(client, upstream, deltas):
    model = upstream.play("chat", [ChatDelta(delta) for delta in deltas])
    _, response = streamed(client, model=model, input="?", tools=[WEATHER])
    assert kinds(response) == ["function_call"]
    assert json.loads(response.output[0].arguments) == {"city": "Oslo"}
    assert response.output[0].call_id


def test_whole_calls_with_the_same_index_are_several(client, upstream):
    calls = [
        {"index": 0, "id": "", "function": {"name": "weather", "arguments": json.dumps({"city": city})}}
        for city in ("Oslo", "Rome")
    ]
    model = upstream.play("chat", [ChatDelta({"tool_calls": [calls[0]]}), ChatDelta({"tool_calls": [calls[1]]})])
    response = client.responses.create(model=model, input="?", tools=[WEATHER])
    assert [json.loads(item.arguments)["city"] for item in response.output] == ["Oslo", "Rome"]


@pytest.mark.parametrize("arguments", ["print(6 * 7)", "```python\nprint(6 * 7)\n```", '{"input": "print(6 * 7)"}'])
def test_code_that_is_not_in_json_runs_and_goes_back_as_json(client, upstream, arguments):
    model = upstream.play("chat", [Code("", raw_arguments=arguments)], [Text("42")])
    response = client.responses.create(model=model, input="?", tools=[CODE_INTERPRETER], include=INCLUDE)
    assert response.output[0].code == "print(6 * 7)"
    assert response.output[0].outputs[0].logs == "42\n"
    sent = upstream.asked(model)[1].body["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert isinstance(json.loads(sent), dict)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_reasoning_is_an_item_and_goes_back_while_the_turn_lasts(client, upstream, key):
    model = upstream.play("chat", [Reasoning("I must count.", key=key), Code("1 + 1")], [Text("2")])
    events, response = streamed(client, model=model, input="?", tools=[CODE_INTERPRETER])
    assert kinds(response) == ["reasoning", "code_interpreter_call", "message"]
    assert response.output[0].content[0].text == "I must count."
    assert any(event.type == "response.reasoning_text.delta" for event in events)
    assert upstream.asked(model)[1].body["messages"][1]["reasoning_content"] == "I must count."


def test_mistrals_parts_are_text_and_thought(client, upstream):
    thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}
    model = upstream.play("chat", [ChatDelta({"content": [thinking, {"type": "text", "text": "Yes."}]})])
    response = client.responses.create(model=model, input="?")
    assert kinds(response) == ["reasoning", "message"]
    assert response.output_text == "Yes."


def test_a_refusal_is_one(client, upstream):
    model = upstream.play("chat", [Refusal("I cannot.")])
    _, response = streamed(client, model=model, input="?")
    assert response.output[0].content[0].refusal == "I cannot."


def test_custom_tools_are_functions_to_the_model_only(client, upstream):
    tool = {"type": "custom", "name": "shout", "description": "Shouts."}
    model = upstream.play("chat", [Function("shout", {"input": "hey"}, call_id="call_1")], [Custom("shout", "ho")])
    response = client.responses.create(model=model, input="?", tools=[tool])
    call = response.output[0]
    assert (call.type, call.name, call.input) == ("custom_tool_call", "shout", "hey")
    history = [call.to_dict(), {"type": "custom_tool_call_output", "call_id": "call_1", "output": "HEY"}]
    _, again = streamed(client, model=model, input=[{"role": "user", "content": "?"}, *history], tools=[tool])
    assert again.output[0].input == "ho"
    second = upstream.asked(model)[1]
    assert second.tools == ["shout"]
    assert second.outputs == ["HEY"]


def test_pictures_go_to_models_that_see(client, upstream):
    code = RED.format(PIXEL)
    for style in ("chat", "blind"):
        model = upstream.play(style, [Code(code)], [Text("A pixel.")])
        client.responses.create(model=model, input="?", tools=[CODE_INTERPRETER])
        sent = upstream.asked(model)[1].body["messages"]
        roles = [message["role"] for message in sent]
        assert roles == (["user", "assistant", "tool", "user"] if style == "chat" else ["user", "assistant", "tool"])
        if style == "chat":
            assert sent[3]["content"][1]["image_url"]["url"].startswith("data:image/png;base64,")


def test_options_are_said_in_the_words_of_chat(client, upstream):
    model = upstream.play("chat", [Text("{}")])
    schema = {"type": "object", "properties": {}, "additionalProperties": False, "required": []}
    client.responses.create(
        model=model,
        input=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "?"}],
        instructions="You are a cat.",
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=100,
        reasoning={"effort": "low"},
        text={"format": {"type": "json_schema", "name": "empty", "schema": schema, "strict": True}, "verbosity": "low"},
        tools=[WEATHER, {**WEATHER, "name": "other"}],
        tool_choice={"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
        parallel_tool_calls=False,
        metadata={"secret": "of the client"},
    )
    asked = upstream.asked(model)[0]
    body = asked.body
    assert body["messages"] == [
        {"role": "system", "content": "You are a cat.\n\nBe brief."},
        {"role": "user", "content": "?"},
    ]
    assert (body["temperature"], body["top_p"], body["max_tokens"]) == (0.5, 0.9, 100)
    assert (body["reasoning_effort"], body["verbosity"], body["parallel_tool_calls"]) == ("low", "low", False)
    assert body["response_format"]["json_schema"] == {"name": "empty", "schema": schema, "strict": True}
    assert (asked.tools, body["tool_choice"]) == (["weather"], "required")
    assert "metadata" not in body


def test_a_tool_that_chat_does_not_know_is_refused(client, upstream):
    model = upstream.play("chat")
    with pytest.raises(openai.BadRequestError, match="web_search"):
        client.responses.create(model=model, input="?", tools=[{"type": "web_search"}])
    assert upstream.asked(model) == []


def test_tokens_of_all_legs_are_summed(client, upstream):
    model = upstream.play("chat", [Code("1"), Usage(100, 10, 50, 5)], [Text("1"), Usage(200, 20, 100, 7)])
    usage = client.responses.create(model=model, input="?", tools=[CODE_INTERPRETER]).usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (300, 30, 330)
    assert usage.input_tokens_details.cached_tokens == 150
    assert usage.output_tokens_details.reasoning_tokens == 12


@pytest.mark.parametrize(
    ("refused", "other"), [("max_tokens", "max_completion_tokens"), ("stream_options", None)], ids=["limit", "usage"]
)
def test_a_field_that_a_model_refuses_is_not_sent_again(client, upstream, refused, other):
    said = {"error": {"message": f"Unsupported parameter: '{refused}'", "param": refused, "type": "x", "code": None}}

    def picky(body):
        return [HttpError(400, said)] if refused in body else [Text("Hi")]

    model = upstream.play("chat", picky, picky, picky)
    for _ in range(2):
        assert client.responses.create(model=model, input="?", max_output_tokens=100).output_text == "Hi"
    bodies = [asked.body for asked in upstream.asked(model)]
    assert [refused in body for body in bodies] == [True, False, False]
    assert other is None or bodies[1][other] == 100


@pytest.mark.parametrize("message", ["Unsupported parameter: 'max_tokens'", "max_tokens must be under 10"])
def test_a_failed_request_of_one_client_changes_nothing_for_others(client, upstream, message):
    def picky(body):
        limits = [value for name, value in body.items() if name in ("max_tokens", "max_completion_tokens")]
        return [HttpError(400, {"error": {"message": message}})] if limits != [50] else [Text("Hi")]

    model = upstream.play("chat", picky, picky, picky)
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.responses.create(model=model, input="?", max_output_tokens=100)
    assert client.responses.create(model=model, input="?", max_output_tokens=50).output_text == "Hi"
    assert upstream.asked(model)[-1].body["max_tokens"] == 50


# -- what goes wrong


def test_a_length_that_is_reached_makes_the_answer_incomplete(client, upstream):
    model = upstream.play("chat", [Text("Once upon a"), IncompleteLength()])
    response = list(client.responses.create(model=model, input="?", stream=True))[-1].response
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"


def test_code_that_is_cut_off_does_not_run(client, upstream):
    model = upstream.play("chat", [Code("", raw_arguments='{"code": "print(1); pri'), IncompleteLength()])
    response = client.responses.create(model=model, input="?", tools=[CODE_INTERPRETER], include=INCLUDE)
    assert response.status == "incomplete"
    assert (response.output[0].status, response.output[0].outputs) == ("incomplete", [])


def test_a_content_filter_is_named(client, upstream):
    model = upstream.play("chat", [Text("Well"), ContentFilter()])
    response = client.responses.create(model=model, input="?")
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "content_filter")


def test_an_upstream_that_is_down(client):
    with pytest.raises(openai.InternalServerError, match="cannot be reached") as raised:
        client.responses.create(model="gone-1", input="?")
    assert raised.value.status_code == 502


def test_an_upstream_that_is_silent(client, upstream):
    model = upstream.play("impatient", [Text("Well"), Hang()], [Text("Hi")])
    with pytest.raises(openai.InternalServerError, match="too long") as raised:
        client.responses.create(model=model, input="?")
    assert raised.value.status_code == 504
    assert client.responses.create(model=model, input="?").output_text == "Hi"


@pytest.mark.parametrize("status", [401, 403])
def test_an_upstream_that_refuses_our_key_is_the_operators_fault(client, upstream, status):
    said = {"error": {"message": f"Incorrect API key provided: {UPSTREAM_KEY}.", "type": "invalid_request_error"}}
    model = upstream.play("chat", [HttpError(status, said)])
    with pytest.raises(openai.InternalServerError, match=r"operator.*api_key") as raised:
        client.responses.create(model=model, input="?")
    assert raised.value.status_code == 502
    assert UPSTREAM_KEY not in str(raised.value)


def test_a_rate_limit_is_passed_on(client, upstream):
    said = {"error": {"message": "Slow down", "type": "requests", "code": "rate_limit_exceeded", "param": None}}
    model = upstream.play("chat", [HttpError(429, said, {"retry-after": "7"})])
    with pytest.raises(openai.RateLimitError, match="Slow down") as raised:
        client.responses.create(model=model, input="?")
    assert raised.value.response.headers["retry-after"] == "7"
    assert (raised.value.type, raised.value.code) == ("requests", "rate_limit_exceeded")


def test_a_refused_request_is_told_in_the_upstreams_words(client, upstream):
    said = {"error": {"message": "Too hot", "type": "invalid_request_error", "param": "temperature", "code": "range"}}
    model = upstream.play("chat", [HttpError(400, said)])
    with pytest.raises(openai.BadRequestError, match="Too hot") as raised:
        client.responses.create(model=model, input="?", temperature=1.5)
    assert (raised.value.param, raised.value.code) == ("temperature", "range")


def test_an_error_is_told_without_the_key_and_not_at_length(client, upstream):
    model = upstream.play("chat", [HttpError(500, f"<h1>{UPSTREAM_KEY}</h1>" + "x" * 10_000)])
    with pytest.raises(openai.InternalServerError) as raised:
        client.responses.create(model=model, input="?")
    assert raised.value.status_code == 502
    assert UPSTREAM_KEY not in raised.value.message
    assert len(raised.value.message) < 700


def test_a_redirect_is_not_followed(client, upstream):
    model = upstream.play("chat", [HttpError(307, "", {"location": f"{upstream.url}/elsewhere"})])
    with pytest.raises(openai.InternalServerError, match="redirect"):
        client.responses.create(model=model, input="?")
    assert [asked.path for asked in upstream.asked(model)] == ["/v1/chat/completions"]


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (BreakOff(), "broke"),
        (NoFinish(), "broke off"),
        (Garbage(), "no JSON"),
        (Garbage("[1, 2]"), "no JSON object"),
        (StreamError("The GPU is on fire"), "on fire"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_answer_that_breaks_is_a_failure_streamed_and_whole(client, upstream, broken, said):
    model = upstream.play("chat", [Text("Once upon a time"), broken], [Text("Once upon a time"), broken], [Text("Hi")])
    with pytest.raises(openai.InternalServerError, match=said):
        client.responses.create(model=model, input="?")
    with pytest.raises(openai.APIError, match=said):
        list(client.responses.create(model=model, input="?", stream=True))
    assert client.responses.create(model=model, input="?").output_text == "Hi"


def test_nonsense_in_the_right_shape_does_no_harm(client, upstream):
    chunks = [
        {"choices": []},
        {"choices": "none"},
        {"choices": [{"index": 0, "delta": None}]},
        {"choices": [{"index": 1, "delta": {"content": "another choice"}}]},
        {"choices": [{"index": 0, "delta": {"content": 7, "tool_calls": [None, 3, {"index": [], "function": "x"}]}}]},
        {"choices": [{"index": 0, "delta": {"content": "Hi"}}], "usage": {"prompt_tokens": "many"}, "extra": {}},
    ]
    frames = "".join(f": comment\n\ndata: {json.dumps(chunk)}\r\n\r\n" for chunk in chunks)
    model = upstream.play("chat", [Raw(frames)])
    response = client.responses.create(model=model, input="?")
    assert response.output_text == "Hi"
    assert kinds(response) == ["message"]


def test_a_client_that_leaves_ends_the_call_of_the_upstream(client, upstream):
    model = upstream.play("chat", [Text("Once upon a time"), Hang()])
    with client.responses.create(model=model, input="?", stream=True) as stream:
        next(event for event in stream if event.type == "response.output_text.delta")
    wait_until(upstream.asked(model)[0].abandoned.is_set)


def test_connections_are_used_again(client, upstream):
    model = upstream.play("chat", *[[Text("Hi")]] * 5)
    before = upstream.connections
    for _ in range(5):
        client.responses.create(model=model, input="?")
    assert upstream.connections - before <= 1
