"""Events of a Responses upstream, good and bad: happenings in order, or a failure that says so. Never a crash."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.openai.upstream import Code, Custom, Function, Interleaved, Reasoning, Refusal, Text, UnknownItem
from tests.openai.upstream_responses import frames, whole

from cloche import errors
from cloche.api.openai.responses_request import ResponseRequest
from cloche.api.openai.responses_stream import ResponseEvents
from cloche.gateway.events import (
    AnswerFinished,
    CitationAdded,
    ItemClosed,
    ItemDelta,
    ItemOpened,
    PassedThrough,
    TurnEvent,
)
from cloche.gateway.upstream import responses_stream
from cloche.gateway.upstream.responses_stream import ResponsesStreamParser

CITATION = {"type": "url_citation", "url": "https://example.test", "title": "T", "start_index": 0, "end_index": 2}
MESSAGE = {"id": "m1", "type": "message", "role": "assistant", "status": "in_progress", "content": []}
CALL = {"id": "f1", "type": "function_call", "call_id": "c1", "name": "python", "arguments": ""}
END = {"type": "response.completed", "response": {"status": "completed", "output": []}}
SEARCHING = ["response.web_search_call.in_progress", "response.web_search_call.searching"]

EVERYTHING = [
    Reasoning("thinking", summary="thought", encrypted="ENC"),
    Text("Hello, world.", annotations=[CITATION]),
    UnknownItem({"type": "web_search_call", "action": {"type": "search", "query": "q"}}, events=SEARCHING),
    Interleaved(Code("print(1)"), Function("weather", {"city": "Paris"})),
    Custom("grep", "needle"),
    Refusal("No."),
]


def said(*leg: Any) -> list[dict[str, Any]]:
    """The events of a leg."""
    body = {"model": "m", "include": ["reasoning.encrypted_content"]}
    return [json.loads(frame.partition("data: ")[2]) for frame in frames(body, list(leg)) if isinstance(frame, str)]


def heard(events: list[Any]) -> list[TurnEvent]:
    leg = ResponsesStreamParser()
    found = [happening for event in events if not leg.finished for happening in leg.feed(event)]
    if not leg.finished:
        raise errors.UpstreamFailed("no end")
    return found


def added(item: dict[str, Any], index: int = 0) -> dict[str, Any]:
    return {"type": "response.output_item.added", "output_index": index, "item": item}


def done(item: dict[str, Any], index: int = 0) -> dict[str, Any]:
    return {"type": "response.output_item.done", "output_index": index, "item": item}


def text(delta: Any, index: int = 0, **fields: Any) -> dict[str, Any]:
    return {"type": "response.output_text.delta", "output_index": index, "delta": delta, **fields}


def closed(happenings: list[TurnEvent]) -> list[dict[str, Any]]:
    return [each.item for each in happenings if isinstance(each, ItemClosed)]


def check_grammar(happenings: list[TurnEvent]) -> None:
    """What readers count on: see `happenings.py`."""
    opened: dict[int, dict[str, Any]] = {}
    known = set()
    for happening in happenings[:-1]:
        match happening:
            case ItemOpened():
                assert happening.index not in known
                known.add(happening.index)
                opened[happening.index] = happening.item
            case ItemClosed():
                begun = opened.pop(happening.index)
                assert begun["type"] == happening.item["type"]
                if begun["type"] in ("function_call", "custom_tool_call"):
                    assert begun["call_id"] == happening.item["call_id"]
                    assert begun["name"] == happening.item["name"]
            case _:
                assert happening.index in opened
    assert isinstance(happenings[-1], AnswerFinished) and not opened


# -- what a good upstream says


def test_everything_that_an_upstream_says_is_heard_in_order():
    happenings = heard(said(*EVERYTHING))
    check_grammar(happenings)
    items = closed(happenings)
    kinds = ["reasoning", "message", "web_search_call", "function_call", "function_call", "custom_tool_call", "message"]
    assert [item["type"] for item in items] == kinds
    assert items[0]["encrypted_content"] == "ENC"
    texts: dict[str, str] = {}
    for each in happenings:
        if isinstance(each, ItemDelta):
            texts[each.kind] = texts.get(each.kind, "") + each.text
    assert texts["text"] == "Hello, world." and texts["summary"] == "thought" and texts["reasoning"] == "thinking"
    assert texts["refusal"] == "No." and texts["custom"] == "needle"
    assert [each.annotation for each in happenings if isinstance(each, CitationAdded)] == [CITATION]
    assert [each.event["type"] for each in happenings if isinstance(each, PassedThrough)] == SEARCHING


def test_an_answer_that_is_not_streamed_is_heard_as_the_same_items():
    streamed, at_once = heard(said(*EVERYTHING)), list(ResponsesStreamParser().end(whole({"model": "m"}, EVERYTHING)))
    check_grammar(at_once)

    def plain(happenings: list[TurnEvent]) -> list[Any]:
        ids = ("id", "call_id", "encrypted_content")
        return [{name: value for name, value in item.items() if name not in ids} for item in closed(happenings)]

    assert plain(at_once) == plain(streamed)
    assert (
        "".join(each.text for each in at_once if isinstance(each, ItemDelta) and each.kind == "text") == "Hello, world."
    )
    assert [each.annotation for each in at_once if isinstance(each, CitationAdded)] == [CITATION]


def test_no_upstream_id_is_forwarded():
    passed = [each for each in heard(said(*EVERYTHING)) if isinstance(each, PassedThrough)]
    assert passed and not any("up_" in json.dumps(each.event) for each in passed)


def test_tokens_are_counted_with_their_details():
    usage = {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 2},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 3},
    }
    end = {"status": "completed", "usage": usage, "model": "m-2026", "service_tier": "flex", "output": []}
    (finished,) = heard([{"type": "response.completed", "response": end}])
    assert isinstance(finished, AnswerFinished)
    tokens = finished.tokens
    assert (tokens.input, tokens.cached, tokens.cache_written, tokens.output, tokens.reasoning) == (10, 4, 2, 7, 3)
    assert (finished.model, finished.service_tier) == ("m-2026", "flex")


@pytest.mark.parametrize(
    ("details", "reason"),
    [
        ({"reason": "max_output_tokens"}, "max_output_tokens"),
        ({"reason": "content_filter"}, "content_filter"),
        ({"reason": "the moon"}, "max_output_tokens"),
        (None, "max_output_tokens"),
    ],
)
def test_an_incomplete_answer_has_a_reason_that_clients_know(details: Any, reason: str):
    response = {"status": "incomplete", "incomplete_details": details, "output": []}
    (finished,) = heard([{"type": "response.incomplete", "response": response}])
    assert isinstance(finished, AnswerFinished) and (finished.status, finished.reason) == ("incomplete", reason)


# -- what is mended


def test_items_open_at_the_end_are_closed_with_their_text():
    happenings = heard([added(MESSAGE), text("Hel"), text("lo"), END])
    check_grammar(happenings)
    assert closed(happenings)[0]["content"][0]["text"] == "Hello"


def test_a_call_that_is_open_at_an_incomplete_end_is_incomplete():
    arguments = {"type": "response.function_call_arguments.delta", "output_index": 0, "delta": '{"code": "pr'}
    end = {"type": "response.incomplete", "response": {"status": "incomplete", "output": []}}
    (call,) = closed(heard([added(CALL), arguments, end]))
    assert call["status"] == "incomplete" and call["arguments"] == '{"code": "pr'


def test_an_item_that_only_ends_is_heard():
    whole_message = {**MESSAGE, "content": [{"type": "output_text", "text": "Hi"}]}
    happenings = heard([done(whole_message), END])
    check_grammar(happenings)
    assert closed(happenings)[0]["content"] == [
        {"type": "output_text", "text": "Hi", "annotations": [], "logprobs": []},
    ]


def test_items_that_only_the_end_mentions_are_heard():
    output = [{**MESSAGE, "content": [{"type": "output_text", "text": "Hi"}]}]
    happenings = heard([{"type": "response.completed", "response": {"status": "completed", "output": output}}])
    check_grammar(happenings)
    assert len(closed(happenings)) == 1


def test_items_that_were_heard_are_not_heard_again_at_the_end():
    events = said(Text("a"), Text("b"))
    for event in events:  # an upstream that numbers all its items 0, and changes their ids
        event["output_index"] = 0
    assert len(closed(heard(events))) == 2


def test_a_call_whose_name_comes_late_is_announced_when_it_is_known():
    nameless = {**CALL, "name": "", "call_id": ""}
    happenings = heard([added(nameless), done({**CALL, "arguments": "{}"}), END])
    check_grammar(happenings)
    (opened,) = [each for each in happenings if isinstance(each, ItemOpened)]
    assert opened.item["name"] == "python" and opened.item["call_id"] == "c1"
    assert [each.text for each in happenings if isinstance(each, ItemDelta)] == ["{}"]


@pytest.mark.parametrize("at_the_end", ["", '{"code": "rm"}', '{"code": "1"}'])
def test_announced_calls_are_not_changed(at_the_end: str):
    """What runs is what the client was shown, and what the model is shown later."""
    begun = {"type": "response.function_call_arguments.delta", "output_index": 0, "delta": '{"code": "1'}
    happenings = heard([added(CALL), begun, done({**CALL, "arguments": at_the_end}), END])
    streamed = "".join(each.text for each in happenings if isinstance(each, ItemDelta))
    assert closed(happenings)[0]["arguments"] == streamed


def test_a_call_without_an_id_gets_one():
    happenings = heard([added({**CALL, "call_id": None}), done({**CALL, "call_id": None}), END])
    check_grammar(happenings)
    assert closed(happenings)[0]["call_id"]


def test_unknown_events_are_not_forwarded():
    event = {"type": "response.reasoning_part.added", "output_index": 0, "item_id": "m1"}
    happenings = heard([{"type": "response.created"}, {"type": "keepalive"}, added(MESSAGE), event, END])
    assert not [each for each in happenings if isinstance(each, PassedThrough)]


# -- what is refused


@pytest.mark.parametrize(
    "events",
    [
        [text("no item")],
        [added(MESSAGE), text("another", index=5, item_id="m2")],
        [added(MESSAGE), text(None)],
        [added(MESSAGE), text("x", content_index=3)],
        [added(MESSAGE), added(MESSAGE)],
        [added(MESSAGE), done(MESSAGE), done(MESSAGE)],
        [added(MESSAGE), done({**MESSAGE, "type": "reasoning"})],
        [added(CALL), text("text of a call")],
        [added({"id": "x"})],
        [added("no item")],  # type: ignore[arg-type]
        [added({**CALL, "name": ""}), done({**CALL, "name": None})],
        [{"type": "response.completed"}],
        [{"type": "response.completed", "response": {"status": "failed"}}],
        [{"type": "response.completed", "response": {"status": "completed", "output": [5]}}],
        [{"no": "type"}],
        [["no object"]],
        [{"type": "response.output_text.annotation.added", "output_index": 0, "annotation": {}}],
        [{"type": "response.web_search_call.searching", "output_index": 0}],
        [added(MESSAGE), {"type": "response.web_search_call.searching", "output_index": 0}],
    ],
)
def test_invalid_events_are_a_failure_of_the_upstream(events: list[Any]):
    with pytest.raises(errors.UpstreamFailed):
        heard([*events, END])


def test_an_upstream_that_ran_code_itself_has_failed():
    with pytest.raises(errors.UpstreamFailed, match="container of its own"):
        heard([added({"id": "ci", "type": "code_interpreter_call", "code": "1"}), END])


@pytest.mark.parametrize("status", ["failed", "cancelled", "queued", "in_progress", None, 5, {}])
def test_an_answer_that_is_not_over_is_a_failure(status: Any):
    with pytest.raises(errors.UpstreamFailed):
        list(ResponsesStreamParser().end({"status": status, "output": []}))


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        ({"code": "rate_limit_exceeded", "message": "slow down"}, 429, "rate_limit_exceeded"),
        ({"code": "server_error", "message": "oh"}, 502, "server_error"),
        ({"code": None, "message": None}, 502, "server_error"),
        ("just text", 502, "server_error"),
    ],
)
def test_failures_are_told_in_the_upstreams_words(error: Any, status: int, reason: str):
    for event in ({"type": "response.failed", "response": {"status": "failed", "error": error}},):
        with pytest.raises(errors.UpstreamFailed) as caught:
            heard([event])
        assert (caught.value.status, caught.value.reason) == (status, reason)


@pytest.mark.parametrize("nested", [True, False])
def test_an_error_event_of_either_shape_is_a_failure(nested: bool):
    error = {"code": "boom", "message": "It broke: sk-secret", "param": None}
    event = {"type": "error", "error": error} if nested else {"type": "error", **error}
    with pytest.raises(errors.UpstreamFailed, match="It broke") as caught:
        list(ResponsesStreamParser("sk-secret").feed(event))
    assert caught.value.reason == "boom" and caught.value.kind == "server_error"
    assert "sk-secret" not in str(caught.value)


def test_an_upstream_cannot_fill_the_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(responses_stream, "MAX_CHARACTERS", 100)
    monkeypatch.setattr(responses_stream, "MAX_ITEMS", 3)
    with pytest.raises(errors.UpstreamFailed):
        heard([added(MESSAGE), *[text("x" * 30)] * 4, END])
    with pytest.raises(errors.UpstreamFailed):
        heard([*[added({**MESSAGE, "id": f"m{index}"}, index) for index in range(4)], END])


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_upstream_stream_is_ordered_or_a_failure(data: st.DataObject):
    """Good events, with some left out, doubled, moved, or with fields that are junk."""
    events: list[Any] = said(*EVERYTHING)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(events) - 1))
        match data.draw(st.sampled_from(["drop", "double", "move", "junk", "junk below"])):
            case "drop" if len(events) > 1:
                events.pop(at)
            case "double":
                events.insert(at, events[at])
            case "move":
                events.insert(data.draw(st.integers(0, len(events) - 1)), events.pop(at))
            case "junk":
                _spoil(data, events[at])
            case "junk below":
                _spoil(data, events[at].get("item") or events[at].get("response") or events[at])
    try:
        happenings = heard(events)
    except errors.UpstreamFailed:
        return
    check_grammar(happenings)
    check_can_be_told(happenings)


def check_can_be_told(happenings: list[TurnEvent]) -> None:
    """A client gets them as events, with ids of ours."""
    telling = ResponseEvents(ResponseRequest(model="m"))
    told = telling.begin()
    for each in happenings:
        if isinstance(each, (ItemOpened, ItemClosed)):
            each = type(each)(index=each.index, item={**each.item, "id": f"ours_{each.index}"})
        told += telling.feed(each)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert msgspec.json.decode(msgspec.json.encode(told))[-1]["type"] == told[-1]["type"]


def _spoil(data: st.DataObject, value: Any) -> None:
    if isinstance(value, dict) and value:
        value[data.draw(st.sampled_from(sorted(value)))] = data.draw(JUNK)
