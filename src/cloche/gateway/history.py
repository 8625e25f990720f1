"""The history before a turn, in the form that upstreams get.

Pure: the caller does all lookups in the store.

A client sees `code_interpreter_call`; an upstream sees a call of our function and its output. The name of
that function depends on the client's own tools, so stored transcripts do not have it: its calls are marked
instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from cloche.gateway.items import PYTHON_FUNCTION, Item, new_item_id, without_credentials
from cloche.gateway.outputs import abridge_text
from cloche.gateway.tools import choose_python_name

NOT_RETAINED = "(output not retained)"
INTERRUPTED = "(interrupted: there is no output)"
NO_OUTPUT = "(no output)"

_OWN_CALL_MARK = "cloche.code"  # on calls of the code tool, in stored items; no upstream ever sees it
_MAX_CALL_ID = 64  # characters; OpenAI takes no more


def referenced_ids(items: Iterable[Item]) -> list[str]:
    """Returns the ids that `item_reference` items name."""
    return [str(item.get("id", "")) for item in items if item.get("type") == "item_reference"]


def calls_without_output(items: Iterable[Item]) -> list[str]:
    """Returns the ids of code calls that a client sends back without their output."""
    return [item["id"] for item in items if _is_code_call(item) and item.get("outputs") is None and _has_id(item)]


def resolve_references(items: Iterable[Item], stored: Mapping[str, Item]) -> list[Item]:
    """Returns the items with references replaced by their items, and missing outputs of code filled in.

    The same call gets its outputs once, however often it is there.
    """
    outputs = {id: item.get("outputs") for id, item in stored.items() if _is_code_call(item)}
    return [_resolve_item(item, stored, outputs) for item in items]


def to_upstream_items(items: Iterable[Item], python: str, max_bytes: int) -> list[Item]:
    """Converts a client's items for an upstream. `max_bytes` limits the output of one code call."""
    return [each for item in items for each in _item_to_upstream(item, python, max_bytes)]


def last_container(items: Iterable[Item]) -> str | None:
    """Returns the container of the last code call."""
    used = [item["container_id"] for item in items if _is_code_call(item) and isinstance(item.get("container_id"), str)]
    return used[-1] if used else None


def to_stored_transcript(transcript: Iterable[Item], tools: Iterable[Item]) -> list[Item]:
    """Converts a turn's transcript for storage. `tools` are the client's tools in that turn."""
    ours = choose_python_name(tools)
    return [
        {**item, "name": PYTHON_FUNCTION, _OWN_CALL_MARK: True}
        if _is_call_of(item, ours)
        else without_credentials(item)
        for item in transcript
    ]


def from_stored_transcript(transcript: Iterable[Item], python: str) -> list[Item]:
    """Restores a stored transcript for a turn in which our function has that name."""
    return [_without_mark({**item, "name": python}) if item.get(_OWN_CALL_MARK) else item for item in transcript]


def complete_outputs(history: list[Item], following: Iterable[Item], python: str) -> list[Item]:
    """Returns the history with an output for each call of our function: an interrupted turn has calls without.

    Calls of the client's own functions are left: the client sends their outputs in the following items.
    """
    answered = {item.get("call_id") for item in (*history, *following) if item.get("type") == "function_call_output"}
    whole: list[Item] = []
    for item in history:
        whole.append(item)
        if _is_call_of(item, python) and item.get("call_id") not in answered:
            whole.append(_output_item(item.get("call_id"), INTERRUPTED))
    return whole


# -- inside


def _is_code_call(item: Item) -> bool:
    return item.get("type") == "code_interpreter_call"


def _has_id(item: Item) -> bool:
    return isinstance(item.get("id"), str)


def _is_call_of(item: Item, name: str) -> bool:
    return item.get("type") == "function_call" and item.get("name") == name


def _resolve_item(item: Item, stored: Mapping[str, Item], outputs: dict[str, Any]) -> Item:
    id = str(item.get("id", ""))
    if item.get("type") == "item_reference":
        return stored.get(id, item)
    if _is_code_call(item) and item.get("outputs") is None and id in outputs:
        return {**item, "outputs": outputs.pop(id)}
    return item


def _item_to_upstream(item: Item, python: str, max_bytes: int) -> list[Item]:
    if not _is_code_call(item):
        return [item]
    call_id = _stable_call_id(item)
    arguments = json.dumps({"code": str(item.get("code") or "")})
    call: Item = {"type": "function_call", "call_id": call_id, "name": python, "arguments": arguments}
    return [call, _output_item(call_id, _outputs_text(item.get("outputs"), max_bytes))]


def _stable_call_id(item: Item) -> str:
    """Returns the same id for the same item, so that an upstream which caches prompts sees the same prompt."""
    known = str(item.get("id") or "").removeprefix("ci_")
    return f"call_{known}"[:_MAX_CALL_ID] if known else new_item_id("call")


def _output_item(call_id: Any, text: str) -> Item:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def _outputs_text(outputs: Any, max_bytes: int) -> str:
    if not isinstance(outputs, list):
        return NOT_RETAINED
    parts = [_output_text(each) for each in outputs if isinstance(each, dict)]
    return abridge_text("".join(parts), max_bytes) or NO_OUTPUT


def _output_text(output: Item) -> str:
    return "[image]\n" if output.get("type") == "image" else str(output.get("logs") or "")


def _without_mark(item: Item) -> Item:
    return {name: value for name, value in item.items() if name != _OWN_CALL_MARK}
