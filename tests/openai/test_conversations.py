"""Conversations, and the turns in them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import openai
import pytest
from tests.openai.conftest import CODE_INTERPRETER
from tests.openai.test_store import OUTPUTS, WEATHER, echo, logs
from tests.openai.upstream import Code, Function, HttpError, ScriptedUpstream, Text, WaitFor

Play = Callable[..., str]
HELLO = {"type": "message", "role": "user", "content": "hello"}


def test_a_conversation_is_made_described_and_deleted(client: openai.OpenAI):
    made = client.conversations.create(metadata={"topic": "demo"}, items=[HELLO])
    assert client.conversations.retrieve(made.id) == made
    changed = client.conversations.update(made.id, metadata={"topic": "other"})
    assert changed.metadata == {"topic": "other"} and client.conversations.retrieve(made.id) == changed
    assert client.conversations.delete(made.id).deleted
    for gone in (client.conversations.retrieve, client.conversations.delete, client.conversations.items.list):
        with pytest.raises(openai.NotFoundError, match=f"Conversation with id '{made.id}' not found."):
            gone(made.id)


def test_items_are_added_listed_in_pages_and_deleted(client: openai.OpenAI):
    made = client.conversations.create()
    texts = ["one", "two", "three"]
    added = client.conversations.items.create(made.id, items=[{**HELLO, "content": text} for text in texts])
    assert [item.content[0].text for item in added.data] == texts
    listed = list(client.conversations.items.list(made.id, order="asc", limit=2))
    assert listed == added.data
    assert [item.id for item in client.conversations.items.list(made.id)] == [item.id for item in listed[::-1]]
    assert client.conversations.items.retrieve(listed[1].id, conversation_id=made.id) == listed[1]
    assert client.conversations.items.delete(listed[1].id, conversation_id=made.id) == made
    assert [item.id for item in client.conversations.items.list(made.id, order="asc")] == [listed[0].id, listed[2].id]
    with pytest.raises(openai.NotFoundError, match="not found"):
        client.conversations.items.retrieve(listed[1].id, conversation_id=made.id)


def test_turns_add_their_items_and_see_those_before(client: openai.OpenAI, upstream: ScriptedUpstream, play: Play):
    model = play([Code("print(6 * 7)")], [Text("It is 42.")], [Text("I said 42.")])
    made = client.conversations.create(items=[{**HELLO, "content": "My name is Ada."}])
    first = client.responses.create(model=model, input="6 x 7?", conversation=made.id, tools=[CODE_INTERPRETER])
    assert first.conversation is not None and first.conversation.id == made.id
    client.responses.create(model=model, input="What?", conversation={"id": made.id})
    last = upstream.asked(model)[-1]
    assert last.outputs == ["42\n"]
    said = json.dumps(last.body)
    assert all(text in said for text in ("My name is Ada.", "6 x 7?", "It is 42.", "What?"))
    listed = client.conversations.items.list(made.id, order="asc", include=[OUTPUTS])
    kinds = [item.type for item in listed]
    assert kinds == ["message", "message", "code_interpreter_call", "message", "message", "message"]
    assert listed.data[2].outputs[0].logs == "42\n"


def test_the_container_of_a_conversation_lasts(client: openai.OpenAI):
    made = client.conversations.create()
    first = echo(client, "x = 41", conversation=made.id)
    second = echo(client, "x + 1", conversation=made.id)
    assert logs(second) == ["42\n"]
    assert second.output[0].container_id == first.output[0].container_id


def test_a_clients_function_is_answered_in_the_next_turn(client: openai.OpenAI, upstream: ScriptedUpstream, play: Play):
    model = play([Code("print(1)"), Function("weather", {}, call_id="call_w")], [Text("Sunny.")])
    tools = [CODE_INTERPRETER, WEATHER]
    made = client.conversations.create()
    client.responses.create(model=model, input="?", conversation=made.id, tools=tools)
    answer = {"type": "function_call_output", "call_id": "call_w", "output": "sun"}
    client.responses.create(model=model, input=[answer], conversation=made.id, tools=tools)
    assert upstream.asked(model)[-1].outputs == ["1\n", "sun"]


def test_an_item_that_was_deleted_is_not_shown_to_the_model(
    client: openai.OpenAI, upstream: ScriptedUpstream, play: Play
):
    model = play([Text("ok")])
    made = client.conversations.create(items=[{**HELLO, "content": "SECRET"}, {**HELLO, "content": "public"}])
    secret = next(iter(client.conversations.items.list(made.id, order="asc")))
    client.conversations.items.delete(secret.id, conversation_id=made.id)
    client.responses.create(model=model, input="?", conversation=made.id)
    assert "SECRET" not in json.dumps(upstream.asked(model)[0].body)


def test_an_item_can_be_named_that_a_response_has(client: openai.OpenAI):
    said = client.responses.create(model="cloche/echo", input="hello").output[0]
    made = client.conversations.create(items=[{"type": "item_reference", "id": said.id}])
    assert client.conversations.items.retrieve(said.id, conversation_id=made.id).type == "message"
    with pytest.raises(openai.NotFoundError, match="Item with id 'msg_x' not found"):
        client.conversations.create(items=[{"type": "item_reference", "id": "msg_x"}])


def test_two_turns_at_once_in_one_conversation_are_a_conflict(client: openai.OpenAI, play: Play):
    made, go_on = client.conversations.create(), threading.Event()
    model = play([Text("one", chunks=1), WaitFor(go_on), Text("two")])
    with client.responses.create(model=model, input="?", conversation=made.id, stream=True) as stream:
        next(event for event in stream if event.type == "response.output_text.delta")
        with pytest.raises(openai.ConflictError) as refused:
            client.responses.create(model="cloche/echo", input="me too", conversation=made.id)
        assert refused.value.code == "conversation_locked"
        go_on.set()
        for event in stream:
            if event.type == "response.completed":
                client.responses.create(model="cloche/echo", input="now I", conversation=made.id)


def test_a_turn_that_failed_leaves_the_conversation_free_and_as_it_was(client: openai.OpenAI, play: Play):
    made = client.conversations.create(items=[HELLO])
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model=play([HttpError(500, {})]), input="?", conversation=made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="unknown", input="?", conversation=made.id)
    assert len(client.conversations.items.list(made.id).data) == 1
    client.responses.create(model="cloche/echo", input="?", conversation=made.id)


def test_bad_requests_name_the_error(client: openai.OpenAI):
    made = client.conversations.create()
    with pytest.raises(openai.NotFoundError, match="Conversation with id 'conv_x' not found"):
        client.responses.create(model="cloche/echo", input="?", conversation="conv_x")
    with pytest.raises(openai.BadRequestError, match="maximum length 20"):
        client.conversations.items.create(made.id, items=[HELLO] * 21)
    with pytest.raises(openai.BadRequestError, match="Mutually exclusive"):
        client.responses.create(model="cloche/echo", input="?", conversation=made.id, previous_response_id="resp_x")
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="cloche/echo", input="?", conversation={"id": 7})  # type: ignore[typeddict-item]
    assert refused.value.param == "conversation"
    with pytest.raises(openai.BadRequestError) as refused:
        client.conversations.update(made.id, metadata={"x": "y" * 513})
    assert refused.value.param == "metadata"
