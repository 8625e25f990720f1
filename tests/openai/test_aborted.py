"""An answer that breaks off: what was streamed of it is what is kept of it, and all that was opened is closed."""

from __future__ import annotations

import pytest

from cloche import errors
from cloche.api.openai.responses_request import decode_response
from cloche.api.openai.responses_stream import ResponseEvents
from cloche.events import Output
from cloche.gateway.events import CitationAdded, ItemDelta, ItemOpened, ProgramEvent, TokenUsage

MESSAGE = {"type": "message", "id": "msg_1", "role": "assistant", "status": "in_progress", "content": []}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "status": "in_progress"}
CUSTOM = {"type": "custom_tool_call", "id": "ctc_1", "call_id": "c", "name": "g", "input": ""}
FUNCTION = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "c",
    "name": "f",
    "arguments": "",
    "status": "in_progress",
}
CODE = {
    "type": "code_interpreter_call",
    "id": "ci_1",
    "status": "in_progress",
    "code": "",
    "container_id": "cntr_1",
    "outputs": [],
}
URL = {"type": "url_citation", "url": "https://example.com", "title": "x", "start_index": 0, "end_index": 1}


def delta(kind, text, part=0):
    return ItemDelta(index=0, kind=kind, text=text, part=part)


def aborted(item, *happenings, how="fail"):
    """The events, and the item that is kept."""
    told = ResponseEvents(decode_response(b'{"model": "m", "input": "x"}'))
    told.begin()
    events = [event for each in (ItemOpened(index=0, item=item), *happenings) for event in told.feed(each)]
    if how == "fail":
        events += told.fail_with(errors.UpstreamFailed("x"), TokenUsage())
    else:
        events += told.cancel(TokenUsage())
    (kept,) = told.output
    return events, kept


@pytest.mark.parametrize("how", ["fail", "cancel"])
@pytest.mark.parametrize(
    ("item", "kind", "field", "event", "said"),
    [
        (CUSTOM, "custom", "input", "response.custom_tool_call_input.done", "input"),
        (FUNCTION, "arguments", "arguments", "response.function_call_arguments.done", "arguments"),
        (CODE, "code", "code", "response.code_interpreter_call_code.done", "code"),
    ],
)
def test_a_call_is_kept_as_far_as_it_came(item, kind, field, event, said, how):
    events, kept = aborted(item, delta(kind, "hel"), delta(kind, "lo"), how=how)
    assert kept[field] == "hello"
    assert [each[said] for each in events if each["type"] == event] == ["hello"]


def test_reasoning_is_kept_and_all_of_its_parts_are_closed():
    summaries = [delta("summary", "first"), delta("summary", "second", 1)]
    events, kept = aborted(REASONING, *summaries, delta("reasoning", "de"), delta("reasoning", "ep"))
    assert [each["text"] for each in kept["summary"]] == ["first", "second"]
    assert kept["content"] == [{"type": "reasoning_text", "text": "deep"}]
    assert opened_and_closed(events) == (3, 3)
    assert [each["text"] for each in events if each["type"] == "response.reasoning_text.done"] == ["deep"]


def test_a_message_is_kept_with_its_citations():
    happenings = [delta("text", "a"), CitationAdded(index=0, annotation=URL), delta("refusal", "no", 1)]
    events, kept = aborted(MESSAGE, *happenings)
    text, refusal = kept["content"]
    assert (text["text"], text["annotations"], refusal["refusal"]) == ("a", [URL], "no")
    assert opened_and_closed(events) == (2, 2)


def test_reasoning_that_said_nothing_has_no_content():
    assert aborted(REASONING)[1] == {**REASONING, "status": "incomplete"}


def test_streamed_output_of_code_is_kept():
    wanted = decode_response(
        b'{"model": "m", "input": "x", "stream": true, "stream_options": {"include_outputs": true}}'
    )
    told = ResponseEvents(wanted)
    told.begin()
    told.feed(ItemOpened(index=0, item=CODE))
    (event,) = told.feed(ProgramEvent(index=0, event=Output(stream="stdout", text="hello\n")))
    told.cancel(TokenUsage())
    assert told.output[0]["outputs"] == [{"type": "logs", "logs": event["delta"]}]


def opened_and_closed(events):
    parts = [each["type"].partition("part.")[2] for each in events if "_part." in each["type"]]
    return parts.count("added"), parts.count("done")


def test_annotations_are_numbered_in_each_part():
    happenings = [CitationAdded(index=0, annotation=URL, part=part) for part in (0, 0, 1, 0, 1)]
    events, _ = aborted(MESSAGE, *happenings)
    cited = [each for each in events if each["type"] == "response.output_text.annotation.added"]
    assert [(each["content_index"], each["annotation_index"]) for each in cited] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (0, 2),
        (1, 1),
    ]
