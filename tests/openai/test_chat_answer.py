"""Chunks of Chat Completions as happenings: whatever comes, items open, grow and close in order."""

from __future__ import annotations

import json
from collections import defaultdict

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.openai import upstream_chat
from tests.openai.upstream import Code, Custom, Function, Interleaved, Reasoning, Refusal, Text

from cloche import errors
from cloche.gateway.events import AnswerFinished, ItemClosed, ItemDelta, ItemOpened
from cloche.gateway.upstream import MAX_ITEMS
from cloche.gateway.upstream.chat_stream import ChatStreamParser

WORDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
CHUNKS = st.none() | st.integers(1, 5)
CALLS = st.builds(Code, WORDS, chunks=CHUNKS) | st.builds(Function, st.just("f"), st.dictionaries(WORDS, WORDS))
SPEECH = st.builds(Text, WORDS, chunks=CHUNKS) | st.builds(Refusal, WORDS) | st.builds(Reasoning, WORDS)
PARTS = SPEECH | CALLS | st.builds(Custom, st.just("c"), WORDS)
LEGS = st.lists(PARTS | st.lists(CALLS, min_size=2, max_size=4).map(lambda parts: Interleaved(*parts)), max_size=6)

NAMES = st.sampled_from(
    "choices index delta message content refusal tool_calls function_call function name arguments id finish_reason "
    "usage error code type prompt_tokens logprobs reasoning thinking text custom input completion_tokens model".split()
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.floats(allow_nan=False)
    | st.sampled_from(["", "a", "stop", "{}"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)
CHUNK = st.builds(
    lambda choice, more: {**more, "choices": choice}, st.lists(JSON, max_size=2) | JSON, st.dictionaries(NAMES, JSON)
)


def happenings(chunks, custom=frozenset()):
    answer = ChatStreamParser(custom)
    told = [each for chunk in chunks for each in answer.feed(chunk)]
    return [*told, *answer.end()]


def chunks_of(leg):
    frames = upstream_chat.frames({"model": "m", "stream": True}, leg)
    return [json.loads(frame.removeprefix("data: ")) for frame in frames if "[DONE]" not in frame]


def check(told):
    """Each item opens, grows and closes once, and what it says at the end is what it said piece by piece."""
    growing, items = {}, {}
    for each in told[:-1]:
        match each:
            case ItemOpened():
                assert each.index not in growing and each.index not in items
                growing[each.index] = defaultdict(str)
            case ItemDelta():
                growing[each.index][each.part] += each.text
            case ItemClosed():
                pieces = growing.pop(each.index)
                assert said(each.item) == "".join(pieces[part] for part in sorted(pieces))
                items[each.index] = each.item
    assert isinstance(told[-1], AnswerFinished)
    assert growing == {}
    return [items[index] for index in sorted(items)]


def said(item):
    match item["type"]:
        case "function_call":
            return item["arguments"]
        case "custom_tool_call":
            return item["input"]
        case _:
            return "".join(part.get("text", part.get("refusal")) for part in item["content"])


@settings(max_examples=50, deadline=None)
@given(LEGS)
def test_a_stream_and_the_whole_tell_the_same(leg):
    streamed = check(happenings(chunks_of(leg)))
    whole = check(happenings([upstream_chat.whole({"model": "m"}, leg)]))
    for kind in ("function_call", "custom_tool_call", "message", "reasoning"):
        texts = [[said(item) for item in told if item["type"] == kind] for told in (streamed, whole)]
        # Text, refusals and thoughts come in any order; whole, each is one.
        assert sorted("".join(texts[0])) == sorted("".join(texts[1])) if "call" not in kind else texts[0] == texts[1]


@settings(max_examples=50, deadline=None)
@given(LEGS)
def test_answers_are_encoded_faithfully(leg):
    meant = [part for each in leg for part in (each.parts if isinstance(each, Interleaved) else [each])]
    told = check(happenings(chunks_of(leg)))
    calls = [part for part in meant if isinstance(part, (Code, Function, Custom))]
    assert [said(item) for item in told if "call" in item["type"]] == [
        part.input if isinstance(part, Custom) else part.arguments for part in calls
    ]
    texts = "".join(part.text for part in meant if isinstance(part, Text))
    assert "".join(said_as(item, "output_text") for item in told if item["type"] == "message") == texts


def said_as(item, kind):
    return "".join(part["text"] for part in item["content"] if part["type"] == kind)


@settings(deadline=None)
@given(st.lists(CHUNK, max_size=6))
@pytest.mark.long
def test_nonsense_is_a_failure_of_the_upstream_or_harmless(chunks):
    ending = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    try:
        told = happenings([*chunks, ending])
    except errors.UpstreamFailed as error:
        assert 400 <= error.status < 600
        assert error.reason is None or isinstance(error.reason, str)
    else:
        check(told)
        msgspec.json.encode(told)


def test_a_custom_tool_that_the_model_knows_as_a_function():
    told = happenings(chunks_of([Function("shout", {"input": "hey"})]), custom=frozenset({"shout"}))
    closed = next(each for each in told if isinstance(each, ItemClosed))
    assert (closed.item["type"], closed.item["input"]) == ("custom_tool_call", "hey")


def test_an_answer_has_so_many_items():
    """A server that thinks and speaks in turn could make any number of them."""
    thinks, speaks = ({"choices": [{"delta": {name: "x"}}]} for name in ("reasoning_content", "content"))
    answer = ChatStreamParser()
    with pytest.raises(errors.UpstreamFailed, match=f"over {MAX_ITEMS} items"):
        for _ in range(MAX_ITEMS):
            list(answer.feed(thinks))
            list(answer.feed(speaks))
