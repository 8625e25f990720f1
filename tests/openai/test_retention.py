"""What is kept is bounded, is its own owner's, and is gone when it was deleted."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.openai.conftest import CODE_INTERPRETER
from tests.openai.test_conversations import HELLO
from tests.openai.test_store import echo

from cloche import errors
from cloche.gateway.items import new_item_id
from cloche.store import conversations, responses
from cloche.store.gateway import GatewayStore
from cloche.store.responses import StoredResponse

Json = dict[str, Any]
LARGE = "x" * 100_000


@pytest.fixture
async def gateway_store(tmp_path: Path) -> AsyncGenerator[GatewayStore, None]:
    async with GatewayStore(tmp_path, 30) as opened:
        yield opened


def said(text: str, id: str = "") -> Json:
    content = [{"type": "output_text", "text": text}]
    return {"id": id or new_item_id("message"), "type": "message", "role": "assistant", "content": content}


def ran(printed: str) -> Json:
    outputs = [{"type": "logs", "logs": printed}]
    return {"id": new_item_id("code_interpreter_call"), "type": "code_interpreter_call", "outputs": outputs}


def stored(id: str, output: list[Json], **fields: Any) -> StoredResponse:
    status = "in_progress" if fields.get("instance") else "completed"
    body = {"id": id, "status": status, "output": output, "instructions": LARGE, "usage": None}
    given = {"owner": "me", "created_at": time.time(), **fields}
    return StoredResponse(id=id, status=status, body=body, **given)


def texts(items: list[Json]) -> list[str]:
    return [item["content"][0]["text"] for item in items]


async def test_one_that_ended_too_large_is_not_kept(gateway_store: GatewayStore, monkeypatch: pytest.MonkeyPatch):
    gateway_store.responses.put(stored("resp_1", [], instance="host"))
    monkeypatch.setattr(responses, "MAX_RESPONSE_BYTES", 1000)
    gateway_store.responses.change(stored("resp_1", [said("done")]))
    assert await gateway_store.responses.get("me", "resp_1") is None  # it would look as if it went on


async def test_old_conversations_go_some_at_a_time(gateway_store: GatewayStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(conversations, "REMOVED_AT_ONCE", 1)
    old = [await gateway_store.conversations.create("me", {}, [said("old")]) for _ in range(3)]
    before = time.time()
    new = await gateway_store.conversations.create("me", {}, [said("new")])
    gateway_store.conversations.prune_old(before)
    for _ in range(4):
        await gateway_store.conversations.get("me", new.id)
    assert [await gateway_store.conversations.get("me", each.id) for each in old] == [None] * 3
    assert texts(await gateway_store.conversations.items(new.id)) == ["new"]


async def test_one_that_ended_between_two_looks_at_it_has_not_failed(gateway_store: GatewayStore):
    gateway_store.responses.put(stored("resp_1", [], instance="host"))
    gateway_store.responses.change(stored("resp_1", [said("done")]))
    await gateway_store.responses.lose("resp_1", "host")  # by somebody who saw it before its end
    kept = await gateway_store.responses.get("me", "resp_1")
    assert kept is not None and (kept.status, texts(kept.output)) == ("completed", ["done"])


async def test_one_whose_process_died_has_failed_and_says_so_in_its_stream(gateway_store: GatewayStore):
    gateway_store.responses.put(stored("resp_1", [], instance="host"))
    assert await gateway_store.responses.mark_lost(lambda name: False) == 1
    kept = await gateway_store.responses.get("me", "resp_1")
    assert kept is not None and (kept.status, kept.instance) == ("failed", None)
    assert [event["response"] for event in await gateway_store.responses.events("resp_1", -1)] == [kept.body]


async def test_one_that_was_deleted_does_not_come_back(gateway_store: GatewayStore):
    gateway_store.responses.put(stored("resp_1", [], instance="host"))
    assert await gateway_store.responses.delete("me", "resp_1")
    gateway_store.responses.change(stored("resp_1", [said("late")]), ["msg_late"])
    gateway_store.responses.add_events("resp_1", [{"type": "response.late", "sequence_number": 0}])
    await gateway_store.responses.lose("resp_1", "host")
    assert await gateway_store.responses.get("me", "resp_1") is None
    assert await gateway_store.responses.events("resp_1", -1) == []
    assert await gateway_store.responses.items("me", ["msg_late"]) == {}


async def test_events_are_stored_without_the_responses_fields(gateway_store: GatewayStore, tmp_path: Path):
    begun, ended = stored("resp_1", [], instance="host"), stored("resp_1", [ran(LARGE), ran("little"), said("done")])
    told: list[Json] = [
        {"type": "response.created", "response": begun.body},
        *({"type": "response.output_item.done", "item": item} for item in ended.output),
        {"type": "response.completed", "response": ended.body},
    ]
    events = [{**event, "sequence_number": at} for at, event in enumerate(told)]
    gateway_store.responses.put(begun)
    gateway_store.responses.add_events("resp_1", events[:3])
    assert await gateway_store.responses.events("resp_1", -1) == events[:1]  # the rest needs what is not there yet
    gateway_store.responses.change(ended)
    gateway_store.responses.add_events("resp_1", events[3:])
    assert await gateway_store.responses.events("resp_1", -1) == events
    assert await gateway_store.responses.events("resp_1", 3) == events[4:]
    with sqlite3.connect(tmp_path / "store.sqlite3") as db:
        assert db.execute("SELECT SUM(LENGTH(body)) FROM response_events").fetchone()[0] < 2000
        own, size, of_events = db.execute("SELECT LENGTH(body), bytes, event_bytes FROM responses").fetchone()
        assert size > own + of_events > own


async def test_outputs_that_are_too_large_are_not_kept_and_that_is_said(
    gateway_store: GatewayStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(responses, "MAX_BODY_BYTES", 150_000)
    gateway_store.responses.put(stored("resp_1", [ran(LARGE), said("done")]))
    kept = await gateway_store.responses.get("me", "resp_1")
    assert kept is not None and "not kept" in kept.output[0]["outputs"][0]["logs"]
    assert texts(kept.output[1:]) == ["done"]


def test_small_owners_lose_nothing_to_large_ones(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(responses, "RESPONSES_MAX_BYTES", 100)
    monkeypatch.setattr(responses, "MAX_BYTES_OF_OWNER", 60)
    assert responses.owner_share([10, 20]) == 60
    assert responses.owner_share([10, 70]) == 60
    assert responses.owner_share([10, 55, 58]) == 45
    assert responses.owner_share([]) == 60


async def test_the_oldest_of_an_owner_go_when_they_are_too_many(
    gateway_store: GatewayStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(responses, "MAX_BYTES_OF_OWNER", 250_000)
    for at in range(4):
        gateway_store.responses.put(stored(f"resp_{at}", [], created_at=1000.0))  # in the same second
    gateway_store.responses.put(stored("resp_other", [], owner="you"))
    gateway_store.responses.flush()
    gateway_store.responses.prune_old(0.0)
    assert [await gateway_store.responses.get("me", f"resp_{at}") is not None for at in range(4)] == [
        False,
        False,
        True,
        True,
    ]
    assert await gateway_store.responses.get("you", "resp_other") is not None


async def test_an_id_that_a_client_chose_stands_for_nothing_elsewhere(gateway_store: GatewayStore):
    ours, theirs = said("ours"), said("theirs", "msg_mine")
    gateway_store.responses.put(stored("resp_1", [ours]), [ours["id"]])
    gateway_store.responses.put(stored("resp_2", [], input=[{**theirs, "id": ours["id"]}, theirs]))
    await gateway_store.conversations.create("me", {}, [{**theirs, "id": ours["id"]}, theirs])
    assert await gateway_store.responses.items("me", [ours["id"], "msg_mine"]) == {ours["id"]: ours}


async def test_items_that_are_too_large_together_are_refused(
    gateway_store: GatewayStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(responses, "MAX_FOUND_BYTES", 150_000)
    items = [said(LARGE), said(LARGE)]
    ids = [item["id"] for item in items]
    gateway_store.responses.put(stored("resp_1", items), ids)
    assert await gateway_store.responses.items("me", ids[:1]) == {ids[0]: items[0]}
    with pytest.raises(errors.InvalidRequest, match="name fewer"):
        await gateway_store.responses.items("me", ids)
    assert list(await gateway_store.responses.items("me", ids, strict=False)) == ids[:1]


async def test_conversations_of_an_owner_are_bounded(gateway_store: GatewayStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(conversations, "MAX_CONVERSATIONS", 2)
    monkeypatch.setattr(conversations, "MAX_BYTES_OF_OWNER", 150_000)
    first = await gateway_store.conversations.create("me", {}, [said(LARGE)])
    with pytest.raises(errors.InvalidRequest, match="150000 bytes"):
        await gateway_store.conversations.create("me", {}, [said(LARGE)])
    await gateway_store.conversations.create("me", {}, [])  # the one that was refused is not there
    with pytest.raises(errors.InvalidRequest, match="2 conversations"):
        await gateway_store.conversations.create("me", {}, [])
    await gateway_store.conversations.delete(first.id)
    await gateway_store.conversations.create("me", {}, [said(LARGE)])
    await gateway_store.conversations.create("you", {}, [said(LARGE)])


async def test_a_full_conversation_says_so_before_a_turn_and_loses_none(
    gateway_store: GatewayStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(conversations, "MAX_ITEMS", 3)
    made = await gateway_store.conversations.create("me", {}, [said("one")])
    await gateway_store.conversations.check_room(made.id, [said("two")])
    gateway_store.conversations.add_turn(made.id, [said("two"), said("three"), said("four")], (), new_item_id, None)
    assert texts(await gateway_store.conversations.items(made.id)) == ["one", "two", "three", "four"]
    with pytest.raises(errors.InvalidRequest, match="full"):
        await gateway_store.conversations.check_room(made.id, [said("five")])


async def test_deleted_text_is_in_no_file(gateway_store: GatewayStore, tmp_path: Path):
    secret = "a-secret-that-is-nowhere-else"
    gateway_store.responses.put(stored("resp_1", [said(secret * 1000)]))
    conversation = await gateway_store.conversations.create("me", {}, [said(secret)])
    await gateway_store.responses.delete("me", "resp_1")
    await gateway_store.conversations.delete(conversation.id)
    gateway_store._database.scrub_log()
    await gateway_store.responses.get("me", "resp_1")  # after that
    for file in tmp_path.glob("store.sqlite3*"):
        assert secret.encode() not in file.read_bytes(), file.name


def test_an_item_is_referred_to_once(client: openai.OpenAI):
    made = echo(client, "print(1)")
    named = {"type": "item_reference", "id": made.output[0].id}
    with pytest.raises(openai.BadRequestError, match="more than once"):
        client.responses.create(model="cloche/echo", input=[named, named])


def test_an_item_of_a_conversation_can_be_referred_to(client: openai.OpenAI, stranger: openai.OpenAI):
    made = client.conversations.create(items=[HELLO])
    item = next(iter(client.conversations.items.list(made.id)))
    named = [{"type": "item_reference", "id": item.id}]
    answer = client.responses.create(model="cloche/echo", input=named)
    assert [each.content[0].text for each in client.responses.input_items.list(answer.id)] == ["hello"]
    with pytest.raises(openai.NotFoundError):
        stranger.responses.create(model="cloche/echo", input=named)
    client.conversations.items.delete(item.id, conversation_id=made.id)
    client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="cloche/echo", input=named)


def test_items_can_be_deleted_while_they_are_listed(client: openai.OpenAI):
    made = client.conversations.create(items=[{**HELLO, "content": str(at)} for at in range(5)])
    for item in client.conversations.items.list(made.id, limit=2):
        client.conversations.items.delete(item.id, conversation_id=made.id)
    assert client.conversations.items.list(made.id).data == []
    with pytest.raises(openai.BadRequestError, match="Invalid 'after'"):
        client.conversations.items.list(made.id, after="msg_never")


def test_an_id_that_is_taken_becomes_another(client: openai.OpenAI):
    made = client.conversations.create(items=[{**HELLO, "id": "msg_1", "content": "first"}])
    added = client.conversations.items.create(made.id, items=[{**HELLO, "id": "msg_1", "content": "second"}])
    assert added.data[0].id != "msg_1"
    client.responses.create(model="cloche/echo", input=[{**HELLO, "id": "msg_1", "content": "x"}], conversation=made.id)
    listed = list(client.conversations.items.list(made.id, order="asc"))
    assert [item.content[0].text for item in listed[:3]] == ["first", "second", "x"]
    assert [item.id for item in listed[:2]] == ["msg_1", added.data[0].id]


def test_the_same_code_call_gets_its_outputs_once(client: openai.OpenAI):
    made = echo(client, "print('kept')", include=[])
    sent = [made.output[0].model_dump(exclude_none=True)] * 3
    again = client.responses.create(model="cloche/echo", input=sent, tools=[CODE_INTERPRETER])
    listed = client.responses.input_items.list(again.id, include=["code_interpreter_call.outputs"], order="asc")
    assert [bool(item.outputs) for item in listed] == [True, False, False]


def test_text_that_is_not_unicode_is_called_so(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match="not valid Unicode"):
        client.post("/responses", content=b'{"model": "cloche/echo", "input": "\\ud800"}', cast_to=object)
