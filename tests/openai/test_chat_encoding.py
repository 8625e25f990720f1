"""Chat completions, whole and in chunks, from what happens in a turn."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk
from tests.openai.schemas import check

from cloche import errors
from cloche.api.openai.chat import as_chunk
from cloche.api.openai.chat_request import decode_chat
from cloche.api.openai.chat_stream import ChatCompletion
from cloche.gateway.events import (
    AnswerFinished,
    CitationAdded,
    CodeStarted,
    ItemClosed,
    ItemDelta,
    ItemOpened,
    PassedThrough,
    TokenUsage,
    TurnEvent,
)
from cloche.gateway.items import output_text_part

CODE = [{"type": "code_interpreter"}]


def completion(**fields: Any) -> ChatCompletion:
    body = {"model": "m", "messages": [{"role": "user", "content": "?"}], "tools": CODE, **fields}
    return ChatCompletion(decode_chat(json.dumps(body).encode()))


def told(made: ChatCompletion, happenings: list[TurnEvent]) -> list[dict[str, Any]]:
    """All chunks, each as OpenAI's schema has it."""
    chunks = made.begin()
    for happening in happenings:
        chunks += made.feed(happening)
    for chunk in chunks:
        check("CreateChatCompletionStreamResponse", chunk)
    check("CreateChatCompletionResponse", made.whole)
    return chunks


def put_together(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The choice as the SDK makes it of the chunks."""
    state: Any = ChatCompletionStreamState()
    for chunk in chunks:
        list(state.handle_chunk(ChatCompletionChunk.model_validate(chunk)))
    choice: dict[str, Any] = state.current_completion_snapshot.choices[0].to_dict()
    return choice


# -- items, as turns say them


def message(index: int, text: str, *, pieces: int = 3, cited: dict[str, Any] | None = None) -> list[TurnEvent]:
    item = {"id": f"msg_{index}", "type": "message", "role": "assistant", "content": []}
    size = max(len(text) // max(pieces, 1), 1)
    deltas = [text[at : at + size] for at in range(0, len(text), size)] if pieces else []
    said: list[TurnEvent] = [ItemDelta(index=index, kind="text", text=each) for each in deltas]
    if cited is not None:
        said.append(CitationAdded(index=index, annotation=cited))
    return [
        ItemOpened(index=index, item=item),
        *said,
        ItemClosed(index=index, item={**item, "content": [output_text_part(text)]}),
    ]


def code(index: int, source: str, outputs: list[Any] | None = None) -> list[TurnEvent]:
    item = {"id": f"ci_{index}", "type": "code_interpreter_call", "code": "", "container_id": "cntr_1", "outputs": []}
    whole = {**item, "code": source, "status": "completed", "outputs": outputs or []}
    return [
        ItemOpened(index=index, item=item),
        ItemDelta(index=index, kind="code", text=source),
        CodeStarted(index=index, code=source),
        ItemClosed(index=index, item=whole),
    ]


def call(index: int, arguments: str, *, pieces: bool = True, custom: bool = False) -> list[TurnEvent]:
    kind, field = ("custom_tool_call", "input") if custom else ("function_call", "arguments")
    item = {"id": f"fc_{index}", "type": kind, "name": "f", "call_id": f"theirs_{index}", field: ""}
    said = [ItemDelta(index=index, kind="custom" if custom else "arguments", text=each) for each in arguments]
    whole = ItemClosed(index=index, item={**item, field: arguments})
    return [ItemOpened(index=index, item=item), *(said if pieces else []), whole]


def reasoning(index: int, *summaries: str, text: str = "") -> list[TurnEvent]:
    item = {"id": f"rs_{index}", "type": "reasoning", "summary": []}
    said: list[TurnEvent] = [
        ItemDelta(index=index, kind="summary", text=each, part=part) for part, each in enumerate(summaries)
    ]
    whole = {
        **item,
        "summary": [{"type": "summary_text", "text": each} for each in summaries],
        "content": [{"type": "reasoning_text", "text": text}] if text else [],
    }
    return [ItemOpened(index=index, item=item), *said, ItemClosed(index=index, item=whole)]


# -- claims


def test_random_turns_are_the_same_whole_and_put_together_by_the_sdk():
    rng = random.Random(4)
    for _ in range(300):
        happenings: list[TurnEvent] = []
        for index in range(rng.randrange(1, 7)):
            happenings += rng.choice(
                [
                    lambda i: message(i, "text " * rng.randrange(1, 4), pieces=rng.randrange(4)),
                    lambda i: code(i, "print(1)", [{"type": "logs", "logs": "1\n"}]),
                    lambda i: call(i, '{"a": 1}', pieces=rng.random() < 0.5),
                    lambda i: reasoning(i, *["hm"] * rng.randrange(3), text=rng.choice(["", "so"])),
                ]
            )(index)
        happenings.append(AnswerFinished(tokens=TokenUsage(input=3, output=4)))
        fields = {"response_format": {"type": "json_object"}} if rng.random() < 0.5 else {}
        made = completion(**fields)
        streamed, whole = put_together(told(made, happenings)), made.whole["choices"][0]
        for calls in (streamed["message"].get("tool_calls") or [], whole["message"].get("tool_calls") or []):
            for each in calls:
                each.pop("index", None)
                each.get("function", {}).pop("parsed_arguments", None)
        for key in ("reasoning_content", "tool_calls", "code_interpreter_calls"):
            assert streamed["message"].get(key) == whole["message"].get(key), key
        assert (streamed["message"].get("content") or None) == (whole["message"]["content"] or None)
        assert streamed["finish_reason"] == whole["finish_reason"]


def test_messages_are_one_text_with_room_between_them():
    made = completion()
    told(
        made,
        [*message(0, "One."), *code(1, "1"), *message(2, "Two.\n"), *code(3, "2"), *message(4, "Three.", pieces=0)],
    )
    assert made.whole["choices"][0]["message"]["content"] == "One.\n\nTwo.\nThree."


def test_citations_are_where_they_are_in_the_whole_text():
    cited = {"type": "container_file_citation", "container_id": "c", "file_id": "f", "filename": "n"}
    made = completion()
    text = "see sandbox:/x"
    told(
        made,
        [*message(0, "One."), *code(1, "1"), *message(2, text, cited={**cited, "start_index": 4, "end_index": 14})],
    )
    whole = made.whole["choices"][0]["message"]
    (citation,) = whole["container_file_citations"]
    assert whole["content"][citation["start_index"] : citation["end_index"]] == "sandbox:/x"
    assert whole["annotations"] == []


def test_citations_of_pages_are_annotations_in_chats_own_shape():
    made = completion()
    cited = {"type": "url_citation", "url": "http://x", "title": "t", "start_index": 0, "end_index": 3}
    told(made, message(0, "see", cited=cited))
    about = {name: value for name, value in cited.items() if name != "type"}
    expected = [{"type": "url_citation", "url_citation": about}]
    assert made.whole["choices"][0]["message"]["annotations"] == expected


def test_calls_of_the_client_have_ids_of_ours_that_lead_to_the_upstreams():
    made = completion()
    chunks = told(made, [*call(0, "{}"), *code(1, "1"), *call(2, "[]"), AnswerFinished()])
    first, second = made.whole["choices"][0]["message"]["tool_calls"]
    assert made.calls == {first["id"]: "theirs_0", second["id"]: "theirs_2"}
    assert second["function"] == {"name": "f", "arguments": "[]"}
    assert all(each.startswith(made.turn_key) for each in made.calls)
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert "theirs" not in json.dumps(chunks)


def test_calls_of_custom_tools_have_their_input():
    """OpenAI's schema of chunks does not have them, its server does."""
    made = completion()
    chunks = [chunk for each in call(0, "hey", custom=True) for chunk in made.feed(each)]
    (first, *rest) = [chunk["choices"][0]["delta"]["tool_calls"][0] for chunk in chunks]
    assert (first["type"], first["custom"]) == ("custom", {"name": "f", "input": ""})
    assert "".join(each["custom"]["input"] for each in rest) == "hey"
    check("CreateChatCompletionResponse", made.whole)


@pytest.mark.parametrize(
    ("finished", "reason"),
    [
        (AnswerFinished(), "stop"),
        (AnswerFinished(status="incomplete", reason="max_output_tokens"), "length"),
        (AnswerFinished(status="incomplete", reason="content_filter"), "content_filter"),
        (AnswerFinished(status="incomplete", reason="something new"), "length"),
    ],
)
def test_the_end_is_said_in_chats_words(finished: AnswerFinished, reason: str):
    made = completion()
    assert told(made, [*message(0, "One."), finished])[-1]["choices"][0]["finish_reason"] == reason


def test_probabilities_of_tokens_have_all_keys_that_chat_has():
    token = {"token": "One", "logprob": -0.1, "top_logprobs": [{"token": "Two", "logprob": -2.0}]}
    item = {"id": "msg_0", "type": "message", "role": "assistant", "content": []}
    made = completion()
    chunks = told(
        made,
        [
            ItemOpened(index=0, item=item),
            ItemDelta(index=0, kind="text", text="One", logprobs=[token]),
            ItemClosed(index=0, item={**item, "content": [output_text_part("One")]}),
            AnswerFinished(),
        ],
    )
    expected = [{**token, "bytes": None, "top_logprobs": [{"token": "Two", "logprob": -2.0, "bytes": None}]}]
    assert chunks[1]["choices"][0]["logprobs"] == {"content": expected, "refusal": None}
    assert made.whole["choices"][0]["logprobs"] == {"content": expected, "refusal": None}


def test_usage_is_told_in_a_chunk_of_its_own_if_it_is_asked_for():
    tokens = TokenUsage(input=10, cached=4, output=5, reasoning=2)
    made = completion(stream_options={"include_usage": True})
    *others, last = told(made, [*message(0, "One."), AnswerFinished(tokens=tokens)])
    assert last["choices"] == [] and last["usage"] == made.whole["usage"]
    assert all(chunk["usage"] is None for chunk in others)
    assert last["usage"]["total_tokens"] == 15
    assert all("usage" not in chunk for chunk in told(completion(), [*message(0, "One."), AnswerFinished()]))


def test_client_specific_extras_are_left_out_for_others():
    made = completion()
    item = {"id": "ws_0", "type": "web_search_call", "status": "in_progress"}
    searching = {"type": "response.web_search_call.searching"}
    told(
        made,
        [
            ItemOpened(index=0, item=item),
            PassedThrough(index=0, event=searching),
            ItemClosed(index=0, item=item),
            AnswerFinished(),
        ],
    )
    assert made.whole["choices"][0]["message"] == {
        "role": "assistant",
        "content": "",
        "refusal": None,
        "annotations": [],
    }


def test_an_answer_that_came_whole_is_told_in_one_chunk():
    made = completion()
    told(made, [*message(0, "One."), *call(1, "{}"), AnswerFinished()])
    whole = {**made.whole, "odd": 1}
    chunk = as_chunk(whole)
    check("CreateChatCompletionStreamResponse", chunk)
    choice = put_together([chunk])
    assert choice["message"]["content"] == "One." and choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == "{}"
    assert chunk["odd"] == 1 and as_chunk({"choices": "none"})["choices"] == []


def test_a_failure_is_the_last_that_is_told():
    (last,) = completion().fail_with(errors.UpstreamFailed("it broke", reason="odd"))
    assert last == {"error": {"message": "it broke", "type": "server_error", "param": None, "code": "odd"}}
