"""Whatever a request holds, it is decoded or refused in OpenAI's words; what is decoded can be said to any upstream."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from tests.openai.nonsense import CHAT, RESPONSE, nonsense

from cloche import errors
from cloche.api.openai import chat_request, responses_request
from cloche.api.openai.context import MAX_INPUT_ITEMS, MAX_INPUT_PARTS, MAX_TOOLS, BadParameter
from cloche.api.openai.response_object import assign_ids, response_object
from cloche.gateway import history
from cloche.gateway.request import TurnRequest
from cloche.gateway.tools import choose_python_name, select_tools
from cloche.gateway.upstream import ModelCall, chat, responses
from cloche.gateway.upstream.chat import ChatRequestStyle
from cloche.gateway.upstream.echo import EchoUpstream

HELLO = {"role": "user", "content": "hello"}
anything = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=300)


def asked_of(wanted: responses_request.ResponseRequest) -> TurnRequest:
    python = choose_python_name(wanted.other_tools)
    return TurnRequest(
        model=wanted.model,
        items=history.to_upstream_items(wanted.input, python, 1000),
        instructions=wanted.instructions,
        code=wanted.code,
        tools=wanted.other_tools,
        tool_choice=wanted.tool_choice,
        options=wanted.options,
    )


def say_to_all(asked: TurnRequest) -> None:
    """Raises nothing but what upstreams refuse in our own words."""
    python = choose_python_name(asked.tools)
    shown: dict[str, Any] = {"has_code": asked.code is not None, "first": True, "may_run": True, "may_host": True}
    tools, choice = select_tools(asked, python, notes=[], **shown)
    call = ModelCall(
        model=asked.model,
        items=history.complete_outputs(asked.items, [], python),
        instructions=asked.instructions,
        tools=tools,
        tool_choice=choice,
        options=asked.options,
    )
    asyncio.run(_echo(call))
    for body_of in (_chat_body, _responses_body):
        try:
            msgspec.json.encode(body_of(call))
        except (errors.UpstreamFailed, errors.InvalidRequest):
            pass  # Chat has no words for some tools
    history.to_stored_transcript(asked.items, asked.tools)


async def _echo(call: ModelCall) -> None:
    async for _ in EchoUpstream().call_model(call):
        pass


def _chat_body(call: ModelCall) -> dict[str, Any]:
    return chat.build_chat_body(call, ChatRequestStyle(limit_name="max_tokens"), model="m", vision=True, stream=True)


def _responses_body(call: ModelCall) -> dict[str, Any]:
    return responses.build_responses_body(call, model="m", stream=True)


@given(body=nonsense(RESPONSE))
@anything
def test_any_request_for_a_response_is_refused_or_understood(body: dict[str, Any]):
    try:
        wanted = responses_request.decode_response(json.dumps(body).encode())
    except errors.InvalidRequest as error:
        assert str(error)
        return
    msgspec.json.encode(response_object("resp_1", wanted, 1, status="completed", output=assign_ids(wanted.input)))
    say_to_all(asked_of(wanted))


@given(body=nonsense(CHAT))
@anything
def test_any_request_for_a_completion_is_refused_or_understood(body: dict[str, Any]):
    try:
        wanted = chat_request.decode_chat(json.dumps(body).encode())
        asked = chat_request.chat_turn_request(wanted, chat_request.request_messages(wanted), {}, 1000)
    except errors.InvalidRequest as error:
        assert str(error)
        return
    chat_request.forwarded_body(wanted)
    say_to_all(asked)


def test_the_unmutated_request_is_valid():
    """Else nothing behind the first check would be tried."""
    say_to_all(asked_of(responses_request.decode_response(json.dumps(RESPONSE).encode())))
    wanted = chat_request.decode_chat(json.dumps(CHAT).encode())
    say_to_all(chat_request.chat_turn_request(wanted, chat_request.request_messages(wanted), {}, 1000))


# -- mistakes that have been made


def refusal(**fields: Any) -> BadParameter:
    with pytest.raises(BadParameter) as caught:
        responses_request.decode_response(json.dumps({"model": "m", **fields}).encode())
    return caught.value


def chat_refusal(**fields: Any) -> BadParameter:
    with pytest.raises(BadParameter) as caught:
        wanted = chat_request.decode_chat(json.dumps({"model": "m", "messages": [HELLO], **fields}).encode())
        chat_request.chat_turn_request(wanted, chat_request.request_messages(wanted), {}, 1000)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"tools": [{"type": "custom", "name": ["a"]}]}, "tools[0].name", "invalid_type"),
        ({"tools": [{"type": "custom"}]}, "tools[0].name", "missing_required_parameter"),
        ({"tools": [{"type": "mcp", "server_label": {}}]}, "tools[0].server_label", "invalid_type"),
        ({"tools": [{"name": "a"}]}, "tools[0].type", "missing_required_parameter"),
        ({"tool_choice": {"type": "function", "name": ["a"]}}, "tool_choice.name", "invalid_type"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c"}]},
            "input[0].output",
            "missing_required_parameter",
        ),
        ({"input": [{"type": "function_call_output", "output": ""}]}, "input[0].call_id", "missing_required_parameter"),
        (
            {"input": [{"type": "custom_tool_call_output", "call_id": "c"}]},
            "input[0].output",
            "missing_required_parameter",
        ),
    ],
)
def test_a_field_that_is_missing_or_of_another_type_is_named(fields: dict[str, Any], param: str, reason: str):
    error = refusal(**fields)
    assert (error.param, error.reason) == (param, reason)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [HELLO] * (MAX_INPUT_ITEMS + 1)}, "input"),
        ({"input": [{"role": "user", "content": [{}] * (MAX_INPUT_PARTS + 1)}]}, "input"),
        ({"input": [{"type": "function_call_output", "output": [{}] * (MAX_INPUT_PARTS // 2)}] * 3}, "input"),
        ({"tools": [{"type": "web_search"}] * (MAX_TOOLS + 1)}, "tools"),
        ({"include": ["x"] * 1000}, "include"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "x"}] * (MAX_TOOLS + 1)}},
            "tool_choice.tools",
        ),
    ],
)
def test_lists_that_are_too_long_are_refused(fields: dict[str, Any], param: str):
    error = refusal(**fields)
    assert (error.param, error.reason) == (param, "array_above_max_length")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [HELLO] * (MAX_INPUT_ITEMS + 1)}, "messages"),
        ({"messages": [{"role": "user", "content": [{}] * (MAX_INPUT_PARTS + 1)}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}] * (MAX_INPUT_PARTS + 1)}]}, "messages"),
        ({"tools": [{"type": "function"}] * (MAX_TOOLS + 1)}, "tools"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [{}] * (MAX_TOOLS + 1)}}},
            "tool_choice.allowed_tools.tools",
        ),
    ],
)
def test_lists_of_a_chat_that_are_too_long_are_refused(fields: dict[str, Any], param: str):
    error = chat_refusal(**fields)
    assert (error.param, error.reason) == (param, "array_above_max_length")


@pytest.mark.parametrize("piece", [b"{},", b"[[]],", b'{"a":{}},', b"1,"])
def test_a_body_of_very_many_values_is_refused_before_it_is_decoded(piece: bytes):
    """64 MiB of them would be gigabytes, and seconds in which nobody else is served."""
    with pytest.raises(BadParameter, match="too complex"):
        responses_request.json_object(b'{"input": [' + piece * 1_000_001 + b"1]")  # it is not even JSON


@pytest.mark.parametrize("refused", [refusal, chat_refusal])
def test_a_models_name_is_short_and_printable(refused: Any):
    assert refused(model="x" * 257).reason == "string_above_max_length"
    assert refused(model="x\0").param == "model"
    assert refused(model="x\ny").param == "model"
    assert "x" * 100 not in str(refused(model="x" * 1000))


def test_allowed_tools_do_not_nest():
    choice: dict[str, Any] = {"type": "allowed_tools", "mode": "auto", "tools": []}
    chat_choice: dict[str, Any] = {"type": "allowed_tools", "allowed_tools": {"tools": []}}
    for _ in range(60):
        choice = {"type": "allowed_tools", "mode": "auto", "tools": [choice]}
        chat_choice = {"type": "allowed_tools", "allowed_tools": {"tools": [chat_choice]}}
    assert refusal(tool_choice=choice).param == "tool_choice.tools[0]"
    assert chat_refusal(tool_choice=chat_choice).param == "tool_choice.allowed_tools.tools"


# -- credentials of tools


MCP = {"type": "mcp", "server_label": "w", "server_url": "https://x.test"}
SECRET = {**MCP, "authorization": "tok-secret", "headers": {"x-key": "hdr-secret"}}


def test_credentials_of_tools_reach_the_upstream_and_are_neither_echoed_nor_kept():
    found = {"type": "tool_search_output", "tools": [{"type": "namespace", "tools": [SECRET]}, SECRET]}
    body = {"model": "m", "input": [found, {"type": "message", **HELLO}], "tools": [SECRET]}
    wanted = responses_request.decode_response(json.dumps(body).encode())
    asked = asked_of(wanted)
    sent = _responses_body(ModelCall(model="m", items=asked.items, tools=asked.tools))
    assert sent["tools"] == [SECRET] and sent["input"][0] == found

    echoed = response_object("resp_1", wanted, 1, status="completed", output=[])
    assert echoed["tools"] == [MCP]
    kept = json.dumps([echoed, assign_ids(wanted.input), history.to_stored_transcript(asked.items, asked.tools)])
    assert "secret" not in kept and kept.count("x.test") == 5
