"""Responses are kept: retrieved, listed, gone on from, deleted."""

from __future__ import annotations

import json
from collections.abc import Callable

import openai
import pytest
from tests.openai.conftest import CODE_INTERPRETER
from tests.openai.upstream import Code, Function, HttpError, Reasoning, ScriptedUpstream, Text

OUTPUTS = "code_interpreter_call.outputs"
WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {}},
    "strict": False,
}
Play = Callable[..., str]


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def echo(client: openai.OpenAI, code: str, **options):
    options = {"tools": [CODE_INTERPRETER], "include": [OUTPUTS], **options}
    return client.responses.create(model="cloche/echo", input=fenced(code), **options)


def logs(response) -> list[str]:
    return [out.logs for item in response.output if item.type == "code_interpreter_call" for out in item.outputs or ()]


def test_a_response_is_there_for_the_next_request(client: openai.OpenAI):
    made = echo(client, "print('kept')")
    assert client.responses.retrieve(made.id) == made
    assert client.responses.retrieve(made.id, include=[OUTPUTS]) == made


def test_outputs_can_be_asked_for_later(client: openai.OpenAI):
    made = echo(client, "print('kept')", include=[])
    assert made.output[0].outputs is None
    assert client.responses.retrieve(made.id).output[0].outputs is None
    assert logs(client.responses.retrieve(made.id, include=[OUTPUTS])) == ["kept\n"]


def test_a_streamed_response_is_there_when_its_end_was_told(client: openai.OpenAI):
    for event in client.responses.create(model="cloche/echo", input="hello", stream=True):
        if event.type == "response.completed":
            assert client.responses.retrieve(event.response.id) == event.response


def test_input_items_have_ids_that_last_and_come_in_pages(client: openai.OpenAI):
    given = [{"role": "user", "content": text} for text in ("one", "two", "three")]
    made = client.responses.create(model="cloche/echo", input=given)
    items = list(client.responses.input_items.list(made.id, order="asc", limit=1))
    assert [item.content[0].text for item in items] == ["one", "two", "three"]
    newest_first = client.responses.input_items.list(made.id)
    assert [item.id for item in newest_first] == [item.id for item in reversed(items)]


def test_a_deleted_response_is_gone_with_all_of_it(client: openai.OpenAI):
    made = echo(client, "print(1)")
    client.responses.delete(made.id)
    for gone in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match=f"Response with id '{made.id}' not found."):
            gone(made.id)
    reference = [{"type": "item_reference", "id": made.output[0].id}]
    with pytest.raises(openai.NotFoundError, match="Item with id"):
        client.responses.create(model="cloche/echo", input=reference)


def test_store_false_stores_nothing(client: openai.OpenAI):
    made = client.responses.create(model="cloche/echo", input="hello", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="cloche/echo", input="hello", previous_response_id=made.id)
    assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")


def test_responses_of_another_server_are_unknown_ones(client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError, match="Response with id 'resp_x' not found"):
        client.responses.retrieve("resp_x")


def test_only_a_background_response_can_be_cancelled_or_streamed_again(client: openai.OpenAI):
    made = client.responses.create(model="cloche/echo", input="hello")
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(made.id)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.retrieve(made.id, stream=True)


def test_variables_last_along_a_chain_of_responses(client: openai.OpenAI):
    first = echo(client, "x = 41")
    second = client.responses.create(model="cloche/echo", input="no code", previous_response_id=first.id)
    third = echo(client, "x + 1", previous_response_id=second.id)
    assert logs(third) == ["42\n"]
    assert third.output[0].container_id == first.output[0].container_id


def test_variables_last_when_items_are_sent_back(client: openai.OpenAI):
    first = echo(client, "x = 41", store=False)
    items = [{"role": "user", "content": "go"}, *(item.model_dump() for item in first.output)]
    again = client.responses.create(
        model="cloche/echo",
        input=[*items, {"role": "user", "content": fenced("x + 1")}],
        tools=[CODE_INTERPRETER],
        include=[OUTPUTS],
    )
    assert logs(again) == ["42\n"]


def test_a_chain_that_has_lost_a_link_names_it(client: openai.OpenAI):
    first = client.responses.create(model="cloche/echo", input="one")
    second = client.responses.create(model="cloche/echo", input="two", previous_response_id=first.id)
    client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match=f"Previous response with id '{first.id}' not found."):
        client.responses.create(model="cloche/echo", input="three", previous_response_id=second.id)


def test_instructions_are_not_inherited(client: openai.OpenAI, upstream: ScriptedUpstream, play: Play):
    model = play([Text("one")], [Text("two")])
    first = client.responses.create(model=model, input="1", instructions="SPEAK LATIN")
    client.responses.create(model=model, input="2", previous_response_id=first.id)
    one, two = (json.dumps(asked.body) for asked in upstream.asked(model))
    assert "SPEAK LATIN" in one and "SPEAK LATIN" not in two
    assert '"1"' in two and "one" in two


def test_the_model_sees_code_output_of_an_earlier_response(
    client: openai.OpenAI, upstream: ScriptedUpstream, play: Play
):
    model = play([Reasoning(summary="hm"), Code("print(6 * 7)")], [Text("It is 42.")], [Text("As I said: 42.")])
    first = client.responses.create(model=model, input="?", tools=[CODE_INTERPRETER])
    client.responses.create(model=model, input="What was it?", previous_response_id=first.id)
    assert upstream.asked(model)[-1].outputs == ["42\n"]


def test_a_mixed_turn_goes_on_by_previous_response_id(client: openai.OpenAI, upstream: ScriptedUpstream, play: Play):
    model = play([Code("print(1)"), Function("weather", {"in": "Rome"}, call_id="call_w")], [Text("Sunny.")])
    tools = [CODE_INTERPRETER, WEATHER]
    first = client.responses.create(model=model, input="?", tools=tools)
    assert [item.type for item in first.output] == ["code_interpreter_call", "function_call"]
    answer = {"type": "function_call_output", "call_id": "call_w", "output": "sun"}
    second = client.responses.create(model=model, input=[answer], tools=tools, previous_response_id=first.id)
    assert second.output_text == "Sunny."
    assert sorted(upstream.asked(model)[-1].outputs) == ["1\n", "sun"]


@pytest.mark.parametrize("store", [False, True])
def test_a_mixed_turn_goes_on_by_sending_its_items_back(
    client: openai.OpenAI, upstream: ScriptedUpstream, play: Play, store: bool
):
    model = play([Code("print(1)"), Function("weather", {"in": "Rome"}, call_id="call_w")], [Text("Sunny.")])
    tools = [CODE_INTERPRETER, WEATHER]
    first = client.responses.create(model=model, input="?", tools=tools, store=store)
    items = [{"role": "user", "content": "?"}, *(item.model_dump(exclude_none=True) for item in first.output)]
    answer = {"type": "function_call_output", "call_id": "call_w", "output": "sun"}
    second = client.responses.create(model=model, input=[*items, answer], tools=tools, store=store)
    assert second.output_text == "Sunny."
    kept = "1\n" if store else "(output not retained)"
    assert upstream.asked(model)[-1].outputs == [kept, "sun"]


def test_items_can_be_named_instead_of_sent(client: openai.OpenAI, upstream: ScriptedUpstream, play: Play):
    model = play([Code("print(6 * 7)")], [Text("It is 42.")], [Text("Yes.")])
    first = client.responses.create(model=model, input="?", tools=[CODE_INTERPRETER])
    named = [{"type": "item_reference", "id": item.id} for item in first.output]
    second = client.responses.create(model=model, input=[*named, {"role": "user", "content": "Sure?"}])
    last = upstream.asked(model)[-1]
    assert last.outputs == ["42\n"] and "It is 42." in json.dumps(last.body)
    assert "item_reference" not in json.dumps(last.body)
    listed = client.responses.input_items.list(second.id, order="asc", include=[OUTPUTS])
    assert [item.type for item in listed] == ["code_interpreter_call", "message", "message"]


def test_a_clients_own_python_tool_added_later_is_harmless(
    client: openai.OpenAI, upstream: ScriptedUpstream, play: Play
):
    model = play([Code("print(1)")], [Text("one")], [Code("print(2)")], [Text("two")])
    first = client.responses.create(model=model, input="?", tools=[CODE_INTERPRETER])
    theirs = {**WEATHER, "name": "python"}
    client.responses.create(model=model, input="again", tools=[theirs, CODE_INTERPRETER], previous_response_id=first.id)
    last = upstream.asked(model)[-1]
    assert last.tools == ["python", "python_interpreter"]
    assert last.outputs == ["1\n", "2\n"]
    assert '"python"' not in json.dumps([last.body.get("messages"), last.body.get("input")])


def test_a_turn_that_failed_in_the_stream_can_be_gone_on_from(
    client: openai.OpenAI, upstream: ScriptedUpstream, play: Play
):
    model = play([Code("x = 5\nprint(x)")], [HttpError(500, {"error": {"message": "down"}})], [Text("five")])
    failed = None
    with pytest.raises(openai.APIError):
        for event in client.responses.create(model=model, input="?", tools=[CODE_INTERPRETER], stream=True):
            failed = getattr(event, "response", failed)
    assert failed is not None
    assert client.responses.retrieve(failed.id).status == "failed"
    client.responses.create(model=model, input="go on", previous_response_id=failed.id)
    assert upstream.asked(model)[-1].outputs == ["5\n"]


def test_input_tokens_are_estimated_and_compaction_is_refused(client: openai.OpenAI):
    few = client.responses.input_tokens.count(model="cloche/echo", input="hello")
    many = client.responses.input_tokens.count(model="cloche/echo", input="hello " * 1000)
    assert 1000 < many.input_tokens - few.input_tokens < 2000
    with pytest.raises(openai.NotFoundError, match="compact"):
        client.responses.compact(model="cloche/echo", input="hello")


def test_stored_responses_are_invisible_to_other_owners(client: openai.OpenAI, stranger: openai.OpenAI):
    made, conversation = client.responses.create(model="cloche/echo", input="hello"), client.conversations.create()
    named = [{"type": "item_reference", "id": made.output[0].id}]
    for refused in (
        lambda: stranger.responses.retrieve(made.id),
        lambda: stranger.responses.delete(made.id),
        lambda: stranger.responses.cancel(made.id),
        lambda: stranger.conversations.retrieve(conversation.id),
        lambda: stranger.conversations.delete(conversation.id),
        lambda: stranger.responses.create(model="cloche/echo", input="x", conversation=conversation.id),
        lambda: stranger.responses.create(model="cloche/echo", input=named),
    ):
        with pytest.raises(openai.NotFoundError, match="not found"):
            refused()
    with pytest.raises(openai.BadRequestError, match="not found"):
        stranger.responses.create(model="cloche/echo", input="x", previous_response_id=made.id)
    assert client.responses.retrieve(made.id) == made
