"""What a Responses upstream is asked. Pure: the code interpreter never gets there, whatever is in a call."""

from __future__ import annotations

from typing import Any

import pytest

from cloche import errors
from cloche.gateway.items import new_item_id
from cloche.gateway.upstream import ModelCall
from cloche.gateway.upstream.responses import build_responses_body, convert_item

NATIVE = {"type": "code_interpreter", "container": {"type": "auto"}}


def body(**call: Any) -> dict[str, Any]:
    return build_responses_body(ModelCall(**{"model": "m", "items": [], **call}), model="m", stream=True)


@pytest.mark.parametrize(
    "call",
    [
        {"tools": [NATIVE]},
        {"tools": [{"type": "namespace", "name": "n", "tools": [NATIVE]}]},
        {"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "code_interpreter"}},
        {
            "tools": [{"type": "function", "name": "f"}],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "code_interpreter"}]},
        },
        {"items": [{"type": "additional_tools", "role": "developer", "tools": [NATIVE]}]},
    ],
)
def test_the_native_tool_is_never_sent(call: dict[str, Any]):
    with pytest.raises(errors.InvalidRequest):
        body(**call)


def test_code_that_ran_is_sent_as_a_call_and_its_output():
    call = {"type": "code_interpreter_call", "id": "ci_1", "code": "1", "outputs": [{"type": "logs", "logs": "1\n"}]}
    assert [item["type"] for item in convert_item(call)] == ["function_call", "function_call_output"]
    assert convert_item(call)[1]["output"] == "1\n"
    assert convert_item({**call, "outputs": None})[1]["output"] == "(its output was not kept)"


def test_a_stored_prompt_brings_no_tools_of_its_own():
    assert body(options={"prompt": {"id": "pmpt_1"}})["tools"] == []
    assert "tools" not in body()


def test_only_options_that_are_the_upstreams_are_sent():
    options = {"temperature": 0, "metadata": {"a": "b"}, "store": True, "previous_response_id": "resp_1", "stream": 1}
    sent_body = body(options={**options, "conversation": "conv_1", "background": True})
    assert set(sent_body) == {"model", "input", "store", "stream", "include", "temperature"}
    assert sent_body["store"] is False and sent_body["stream"] is True


def test_reasoning_is_sent_back_to_its_upstream_only():
    theirs = {"type": "reasoning", "id": "rs_theirs", "summary": [], "encrypted_content": "E", "status": None}
    assert convert_item(theirs) == [{"type": "reasoning", "id": "rs_theirs", "summary": [], "encrypted_content": "E"}]
    ours = {**theirs, "id": new_item_id("reasoning")}
    assert convert_item(ours) == [{"type": "reasoning", "summary": [], "encrypted_content": "E"}]
    text = [{"type": "reasoning_text", "text": "t"}]
    plain = {"type": "reasoning", "id": "rs_theirs", "summary": [], "content": text}
    assert convert_item(plain) == [plain]
    assert convert_item({**plain, "id": new_item_id("reasoning")}) == []  # of a chat model, or of nobody knows whom


def test_citations_of_our_containers_are_not_sent():
    ours = {"type": "container_file_citation", "container_id": "cntr_1", "file_id": "cfile_1"}
    theirs = {"type": "url_citation", "url": "https://example.test"}
    part = {"type": "output_text", "text": "x", "annotations": [ours, theirs], "logprobs": None}
    (message,) = convert_item({"type": "message", "role": "assistant", "content": [part], "phase": None})
    assert message["content"] == [{"type": "output_text", "text": "x", "annotations": [theirs]}]
    assert "phase" not in message


def test_no_null_is_sent_but_where_it_says_something():
    output = {"type": "function_call_output", "call_id": "c", "output": "o", "id": None, "status": None}
    assert convert_item(output) == [{"type": "function_call_output", "call_id": "c", "output": "o"}]
    image = {"type": "image_generation_call", "id": "ig_1", "status": "failed", "result": None}
    assert convert_item(image) == [image]


def test_a_limit_below_the_least_is_the_least():
    assert body(max_output_tokens=3)["max_output_tokens"] == 16
