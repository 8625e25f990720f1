"""History is rebuilt from what clients send back, from the store, and from turns that broke off."""

from __future__ import annotations

import json

from cloche.gateway import history
from cloche.gateway.items import PYTHON_FUNCTION

USER = {"type": "message", "role": "user", "content": "go"}
WEATHER = {"type": "function", "name": "weather"}
CLIENTS_PYTHON = {"type": "function", "name": PYTHON_FUNCTION}
CLIENT_CALL = {"type": "function_call", "call_id": "call_w", "name": "weather", "arguments": "{}"}


def code_item(id: str = "ci_1", **fields: object) -> dict[str, object]:
    return {
        "id": id,
        "type": "code_interpreter_call",
        "status": "completed",
        "code": "print(1)",
        "container_id": "cntr_1",
        "outputs": None,
        **fields,
    }


def call_and_output(
    item: dict[str, object], python: str = PYTHON_FUNCTION
) -> tuple[dict[str, object], dict[str, object]]:
    call, output = history.to_upstream_items([item], python, 1024)
    assert call["call_id"] == output["call_id"]
    return call, output


def test_a_replayed_code_call_becomes_a_call_of_our_function_and_its_output():
    call, output = call_and_output(code_item(outputs=[{"type": "logs", "logs": "1\n"}, {"type": "image", "url": "x"}]))
    assert (call["type"], call["name"], json.loads(str(call["arguments"]))) == (
        "function_call",
        PYTHON_FUNCTION,
        {"code": "print(1)"},
    )
    assert output["output"] == "1\n[image]\n"


def test_the_same_item_is_shown_the_same_way_every_time():
    assert history.to_upstream_items([code_item()], PYTHON_FUNCTION, 1024) == history.to_upstream_items(
        [code_item()], PYTHON_FUNCTION, 1024
    )


def test_missing_outputs_are_reported_lost_and_empty_ones_empty():
    assert call_and_output(code_item())[1]["output"] == history.NOT_RETAINED
    assert call_and_output(code_item(outputs=[]))[1]["output"] == history.NO_OUTPUT


def test_outputs_that_a_client_left_out_come_from_the_store():
    assert history.calls_without_output([USER, code_item(), code_item("ci_2", outputs=[])]) == ["ci_1"]
    stored = {"ci_1": code_item(outputs=[{"type": "logs", "logs": "kept"}])}
    (item,) = history.resolve_references([code_item()], stored)
    assert call_and_output(item)[1]["output"] == "kept"


def test_a_long_output_is_abridged_for_the_model():
    item = code_item(outputs=[{"type": "logs", "logs": "x" * 100_000}])
    assert len(str(call_and_output(item)[1]["output"])) < 1200


def test_a_reference_is_replaced_by_its_item():
    reference = {"type": "item_reference", "id": "msg_1"}
    said = {"id": "msg_1", "type": "message", "role": "assistant", "content": "hello"}
    assert history.referenced_ids([USER, reference]) == ["msg_1"]
    assert history.resolve_references([USER, reference], {"msg_1": said}) == [USER, said]


def test_a_strange_item_never_breaks_the_rest():
    strange = code_item(id=7, code=None, outputs=["?", {"type": "logs", "logs": None}])  # type: ignore[arg-type]
    shown = history.to_upstream_items([strange, {"type": "made_up"}], PYTHON_FUNCTION, 1024)
    assert [item["type"] for item in shown] == ["function_call", "function_call_output", "made_up"]


def test_the_last_container_is_known():
    assert history.last_container([USER, code_item(), code_item("ci_2", container_id="cntr_2")]) == "cntr_2"
    assert history.last_container([USER]) is None


def test_our_function_keeps_its_identity_when_a_client_brings_a_tool_of_its_name():
    ours, output = call_and_output(code_item())
    kept = history.to_stored_transcript([USER, ours, output], [WEATHER])
    recalled = history.from_stored_transcript(kept, history.choose_python_name([CLIENTS_PYTHON]))
    assert recalled[1]["name"] == "python_interpreter"
    assert set(recalled[1]) == set(ours)


def test_a_call_of_the_clients_own_python_stays_the_clients():
    theirs = {"type": "function_call", "call_id": "c", "name": PYTHON_FUNCTION, "arguments": "{}"}
    kept = history.to_stored_transcript([theirs], [CLIENTS_PYTHON])
    assert history.from_stored_transcript(kept, "python_interpreter") == [theirs]


def test_a_turn_that_broke_off_is_sealed_so_that_an_upstream_takes_it():
    ours, _ = call_and_output(code_item())
    sealed = history.complete_outputs([USER, ours, CLIENT_CALL], [], PYTHON_FUNCTION)
    assert [item["type"] for item in sealed] == ["message", "function_call", "function_call_output", "function_call"]
    assert sealed[2]["output"] == history.INTERRUPTED


def test_a_whole_turn_is_left_as_it_is():
    ours, output = call_and_output(code_item())
    whole = [USER, ours, CLIENT_CALL, output]
    assert history.complete_outputs(whole, [], PYTHON_FUNCTION) == whole
