"""The check itself: what is not OpenAI's is found, and named by its field."""

from __future__ import annotations

import json

import pytest
from tests.openai.schemas import Frames, check

CODE_CALL = {"type": "code_interpreter_call", "id": "ci_1", "status": "completed", "container_id": "c", "code": "1"}


def event(**item: object) -> dict[str, object]:
    return {"type": "response.output_item.done", "output_index": 0, "sequence_number": 1, "item": {**CODE_CALL, **item}}


def test_a_right_event_passes():
    check("ResponseStreamEvent", event(outputs=[{"type": "logs", "logs": "1\n"}]))


@pytest.mark.parametrize(
    ("item", "where"),
    [
        ({}, "'outputs' is a required property"),
        ({"outputs": [{"type": "logs", "logs": 1}]}, "$.item.outputs[0].logs"),
        ({"outputs": [{"type": "log", "logs": "1"}]}, "$.item.outputs"),
        ({"outputs": None, "status": "done"}, "$.item.status"),
    ],
)
def test_schema_violations_are_named(item: dict[str, object], where: str):
    with pytest.raises(AssertionError) as caught:
        check("ResponseStreamEvent", event(**item))
    assert where in str(caught.value)


def test_an_event_of_an_unknown_type_is_refused():
    with pytest.raises(AssertionError):
        check("ResponseStreamEvent", {"type": "response.unheard_of", "sequence_number": 1})


def test_events_are_found_wherever_the_chunks_are_cut():
    sent = b": keep-alive\n\nevent: a\ndata: " + json.dumps({"x": 1}).encode() + b"\n\ndata: [DONE]\n\n"
    frames = Frames()
    assert [each for at in range(len(sent)) for each in frames.feed(sent[at : at + 1])] == [("a", {"x": 1})]
