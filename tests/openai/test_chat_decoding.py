"""Requests for chat completions, from JSON to what a turn is asked."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cloche.api.openai import chat_request
from cloche.api.openai.chat_messages import decode_messages, message_items
from cloche.api.openai.context import BadParameter
from cloche.gateway.request import CodeTool, TurnRequest
from cloche.store.gateway import StoredChatTurn

HELLO = [{"role": "user", "content": "hello"}]
MISSING = "missing_required_parameter"
CODE = [{"type": "code_interpreter"}]


def wanted(**fields: Any) -> chat_request.ChatRequest:
    return chat_request.decode_chat(msgspec.json.encode({"model": "m", "messages": HELLO, **fields}))


def asked(**fields: Any) -> TurnRequest:
    made = wanted(**fields)
    return chat_request.chat_turn_request(made, chat_request.request_messages(made), {}, 1000)


def refusal(**fields: Any) -> BadParameter:
    with pytest.raises(BadParameter) as caught:
        asked(**fields)
    return caught.value


# -- messages


def test_every_role_and_part_becomes_an_item():
    items = message_items(
        decode_messages(
            [
                {"role": "system", "content": "be brief"},
                {"role": "developer", "content": [{"type": "text", "text": "be kind"}]},
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "look"},
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}},
                        {"type": "file", "file": {"file_id": "file-1"}},
                        {"type": "file", "file": {"filename": "a.txt", "file_data": "data:text/plain;base64,AA=="}},
                        {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
                    ],
                },
                {"role": "assistant", "content": "I see.", "refusal": None},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            ]
        ),
        {},
        "python",
    )
    assert items == [
        {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "be brief"}]},
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "be kind"}]},
        {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_text", "text": "look"},
                {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "low"},
                {"type": "input_file", "file_id": "file-1"},
                {"type": "input_file", "file_data": "data:text/plain;base64,AA==", "filename": "a.txt"},
                {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
            ],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I see."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]


def test_calls_and_their_results_become_items():
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        {"id": "c2", "type": "custom", "custom": {"name": "g", "input": "x"}},
    ]
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "two"}]},
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
    ]
    assert asked(messages=messages).items[1:] == [
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "g", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
    ]


def test_a_function_call_of_the_old_kind_is_answered_by_its_name():
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "one"},
    ]
    call, output = asked(messages=messages).items[1:]
    assert call["name"] == "f" and call["call_id"] == output["call_id"] and output["output"] == "one"


def test_our_own_keys_returned_by_a_client_describe_earlier_code():
    code = {"id": "ci_1", "code": "1+1", "container_id": "cntr_1", "outputs": [{"type": "logs", "logs": "2\n"}]}
    messages = [*HELLO, {"role": "assistant", "content": "2", "code_interpreter_calls": [code]}, *HELLO]
    made = asked(messages=messages)
    kinds = ["message", "function_call", "function_call_output", "message", "message"]
    assert [item["type"] for item in made.items] == kinds
    assert made.items[1]["arguments"] == '{"code": "1+1"}' and made.items[2]["output"] == "2\n"
    assert made.known_container == "cntr_1"


@pytest.mark.parametrize(
    ("messages", "param", "code"),
    [
        (None, "messages", MISSING),
        ([], "messages", "empty_array"),
        (["hello"], "messages[0]", "invalid_type"),
        ([{"content": "hello"}], "messages[0].role", MISSING),
        ([{"role": "robot", "content": "hello"}], "messages[0].role", "invalid_value"),
        ([{"role": "user"}], "messages[0].content", MISSING),
        ([{"role": "user", "content": 1}], "messages[0].content", "invalid_type"),
        ([{"role": "user", "content": [{"type": "smell"}]}], "messages[0].content[0].type", "invalid_value"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]", "invalid_type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", MISSING),
        ([{"role": "tool", "content": "1"}], "messages[0].tool_call_id", MISSING),
        ([{"role": "tool", "tool_call_id": "c", "content": "1"}], "messages[0].tool_call_id", "invalid_value"),
        ([{"role": "function", "name": "f", "content": "1"}], "messages[0].name", "invalid_value"),
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls", "invalid_type"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].id", MISSING),
    ],
)
def test_messages_that_make_no_sense_are_named(messages, param, code):
    error = refusal(messages=messages)
    assert (error.param, error.reason) == (param, code)


def test_a_call_without_a_result_is_refused_in_openais_words():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for rest in ([], HELLO):
        error = refusal(messages=[*HELLO, {"role": "assistant", "tool_calls": [call]}, *rest])
        assert "must be followed by tool messages" in str(error) and "c1" in str(error)


# -- what is remembered of a turn


def test_a_remembered_turn_takes_the_place_of_the_message_that_ended_it():
    call = {"id": "ours", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turn = StoredChatTurn(
        items=[
            {"type": "reasoning", "summary": []},
            {"type": "function_call", "call_id": "p", "name": "python", "arguments": "{}", "cloche.code": True},
            {"type": "function_call", "call_id": "theirs", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "dropped", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "p", "output": "2"},
        ],
        calls={"ours": "theirs", "ours2": "dropped"},
    )
    messages = [
        {"role": "assistant", "content": "I add.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "ours", "content": "one"},
    ]
    items = message_items(decode_messages(messages), {"ours": turn, "ours2": turn}, "python_2")
    assert items == [
        turn.items[0],
        {"type": "function_call", "call_id": "p", "name": "python_2", "arguments": "{}"},
        turn.items[2],
        turn.items[4],
        {"type": "function_call_output", "call_id": "theirs", "output": "one"},
    ]


# -- the code tool


@pytest.mark.parametrize(
    ("tool", "expected"),
    [
        ({}, CodeTool()),
        ({"container": "cntr_1"}, CodeTool(container="cntr_1")),
        ({"container": {"type": "auto"}}, CodeTool()),
        (
            {"container": {"type": "auto", "file_ids": ["a", "a", "b"], "memory_limit": "4g"}},
            CodeTool(file_ids=("a", "b"), memory="4g"),
        ),
        ({"code_interpreter": {}}, CodeTool()),
        ({"code_interpreter": {"container": "cntr_1"}}, CodeTool(container="cntr_1")),
        ({"code_interpreter": {"container": {"type": "auto", "memory_limit": "1g"}}}, CodeTool(memory="1g")),
    ],
)
def test_the_code_tool_has_two_shapes_and_needs_no_container(tool, expected):
    made = asked(tools=[{"type": "code_interpreter", **tool}])
    assert made.code == expected and made.tools == []


def test_a_session_belongs_to_a_container_that_is_not_named():
    metadata = {"session_id": "s", "tag": "t"}
    made = asked(tools=CODE, metadata=metadata)
    assert made.code == CodeTool(session="s")
    assert asked(tools=[{**CODE[0], "container": "cntr_1"}], metadata=metadata).code == CodeTool(container="cntr_1")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": CODE * 2}, "tools[1]"),
        ({"tools": [{**CODE[0], "container": 7}]}, "tools[0].container"),
        (
            {"tools": [{**CODE[0], "container": {"type": "auto", "memory_limit": "2g"}}]},
            "tools[0].container.memory_limit",
        ),
        (
            {"tools": [{**CODE[0], "container": {"type": "auto", "file_ids": ["f"] * 51}}]},
            "tools[0].container.file_ids",
        ),
        ({"tools": CODE, "n": 2}, "n"),
        ({"tools": CODE, "metadata": {"session_id": 7}}, "metadata.session_id"),
        ({"tools": CODE, "metadata": {"session_id": "s" * 513}}, "metadata.session_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools.tools"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": "many"}, "max_completion_tokens"),
        ({"functions": []}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"model": None}, "model"),
        ({"model": 7}, "model"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_unsupported_parameters_are_named(fields, param):
    assert refusal(**fields).param == param


def test_a_body_that_is_no_object_is_refused():
    for body in (b"", b"[]", b"{", b"\xff"):
        with pytest.raises(BadParameter) as caught:
            chat_request.decode_chat(body)
        assert caught.value.reason == "invalid_json"


# -- tools and options, in the words of the Responses API


def test_tools_become_flat():
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "d"}}
    made = asked(
        tools=[
            {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}},
            {"type": "function", "function": {"name": "g", "description": "d"}},
            {"type": "custom", "custom": {"name": "h", "format": grammar}},
        ]
    )
    assert made.tools == [
        {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True},
        {"type": "function", "name": "g", "description": "d", "parameters": None, "strict": False},
        {"type": "custom", "name": "h", "format": {"type": "grammar", "syntax": "lark", "definition": "d"}},
    ]


def test_the_choice_of_a_tool_becomes_flat():
    def chosen(choice: Any) -> Any:
        return asked(tool_choice=choice, tools=CODE).tool_choice

    assert [chosen(each) for each in (None, "none", "auto", "required")] == ["auto", "none", "auto", "required"]
    assert chosen({"type": "function", "function": {"name": "f"}}) == {"type": "function", "name": "f"}
    assert chosen({"type": "custom", "custom": {"name": "f"}}) == {"type": "custom", "name": "f"}
    assert chosen({"type": "code_interpreter"}) == {"type": "code_interpreter"}
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "f"}}, CODE[0]]}
    assert chosen({"type": "allowed_tools", "allowed_tools": allowed}) == {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "f"}, {"type": "code_interpreter"}],
    }


def test_options_are_said_in_the_other_apis_words_and_the_rest_is_kept_for_chats():
    schema = {"name": "s", "schema": {"type": "object"}, "strict": True}
    made = asked(
        max_tokens=5,
        reasoning_effort="low",
        verbosity="high",
        response_format={"type": "json_schema", "json_schema": schema},
        temperature=0.5,
        top_p=0.9,
        logprobs=True,
        top_logprobs=2,
        parallel_tool_calls=False,
        stop=["x"],
        seed=7,
        top_k=40,
        store=True,
        user="u",
    )
    assert made.max_output_tokens == 5
    assert made.options == {
        "temperature": 0.5,
        "top_p": 0.9,
        "parallel_tool_calls": False,
        "top_logprobs": 2,
        "user": "u",
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_schema", **schema}, "verbosity": "high"},
        "include": ["message.output_text.logprobs"],
        "chat": {"stop": ["x"], "seed": 7, "top_k": 40},
    }
    assert asked(max_tokens=5, max_completion_tokens=6).max_output_tokens == 6


def test_forwarded_requests_are_unchanged_except_our_own_keys():
    message = {"role": "assistant", "content": "hi", "code_interpreter_calls": [], "odd": 1}
    made = wanted(messages=[message], odd=2, metadata={"nested": {"as": "litellm likes it"}})
    passed = chat_request.forwarded_body(made)
    assert passed == {**made.raw, "messages": [{"role": "assistant", "content": "hi", "odd": 1}]}
