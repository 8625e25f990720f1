"""What went before a turn, in the language of upstreams. Pure: what needs the store is looked up by the caller.

A client sees `code_interpreter_call`; an upstream sees a call of our function and its output. Which name that function
has depends on the client's own tools, so what is kept does not have it: calls of it are marked instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from cloche.gateway.items import PYTHON, Item, new_item_id, without_credentials
from cloche.gateway.outputs import abridged
from cloche.gateway.tools import python_name

NOT_RETAINED = "(output not retained)"
INTERRUPTED = "(interrupted: there is no output)"
NO_OUTPUT = "(no output)"

_MARK = "cloche.code"  # on calls of ours, in what is kept; no upstream ever sees it
_MAX_CALL_ID = 64  # characters; OpenAI takes no more


def referenced(items: Iterable[Item]) -> list[str]:
    """The ids that `item_reference`s name."""
    return [str(item.get("id", "")) for item in items if item.get("type") == "item_reference"]


def without_output(items: Iterable[Item]) -> list[str]:
    """The ids of code calls that a client sends back without what they printed."""
    return [item["id"] for item in items if _is_code(item) and item.get("outputs") is None and _has_id(item)]


def resolved(items: Iterable[Item], stored: Mapping[str, Item]) -> list[Item]:
    """The items, with those in the place of references that they name, and outputs of code where they were left out.

    The same call gets its outputs once, however often it is there.
    """
    outputs = {id: item.get("outputs") for id, item in stored.items() if _is_code(item)}
    return [_resolved(item, stored, outputs) for item in items]


def shown(items: Iterable[Item], python: str, max_bytes: int) -> list[Item]:
    """Items of a client, as an upstream is shown them. `max_bytes` is for the output of one code call."""
    return [each for item in items for each in _shown(item, python, max_bytes)]


def container_of(items: Iterable[Item]) -> str | None:
    """The container of the last code call."""
    used = [item["container_id"] for item in items if _is_code(item) and isinstance(item.get("container_id"), str)]
    return used[-1] if used else None


def kept(transcript: Iterable[Item], tools: Iterable[Item]) -> list[Item]:
    """A turn's transcript, for later. `tools` are those of the client in that turn."""
    ours = python_name(tools)
    return [
        {**item, "name": PYTHON, _MARK: True} if _calls(item, ours) else without_credentials(item)
        for item in transcript
    ]


def recalled(transcript: Iterable[Item], python: str) -> list[Item]:
    """What was kept, for a turn in which our function has that name."""
    return [_without_mark({**item, "name": python}) if item.get(_MARK) else item for item in transcript]


def sealed(history: list[Item], following: Iterable[Item], python: str) -> list[Item]:
    """The history with an output for each call of our function: a turn that broke off has calls without.

    Calls of the client's own functions are left: their outputs are the client's to send, in what follows.
    """
    answered = {item.get("call_id") for item in (*history, *following) if item.get("type") == "function_call_output"}
    whole: list[Item] = []
    for item in history:
        whole.append(item)
        if _calls(item, python) and item.get("call_id") not in answered:
            whole.append(_output(item.get("call_id"), INTERRUPTED))
    return whole


# -- inside


def _is_code(item: Item) -> bool:
    return item.get("type") == "code_interpreter_call"


def _has_id(item: Item) -> bool:
    return isinstance(item.get("id"), str)


def _calls(item: Item, name: str) -> bool:
    return item.get("type") == "function_call" and item.get("name") == name


def _resolved(item: Item, stored: Mapping[str, Item], outputs: dict[str, Any]) -> Item:
    id = str(item.get("id", ""))
    if item.get("type") == "item_reference":
        return stored.get(id, item)
    if _is_code(item) and item.get("outputs") is None and id in outputs:
        return {**item, "outputs": outputs.pop(id)}
    return item


def _shown(item: Item, python: str, max_bytes: int) -> list[Item]:
    if not _is_code(item):
        return [item]
    call_id = _call_id(item)
    arguments = json.dumps({"code": str(item.get("code") or "")})
    call: Item = {"type": "function_call", "call_id": call_id, "name": python, "arguments": arguments}
    return [call, _output(call_id, _text(item.get("outputs"), max_bytes))]


def _call_id(item: Item) -> str:
    """The same at every call, so that an upstream which caches prompts sees the same prompt."""
    known = str(item.get("id") or "").removeprefix("ci_")
    return f"call_{known}"[:_MAX_CALL_ID] if known else new_item_id("call")


def _output(call_id: Any, text: str) -> Item:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def _text(outputs: Any, max_bytes: int) -> str:
    if not isinstance(outputs, list):
        return NOT_RETAINED
    parts = [_part(each) for each in outputs if isinstance(each, dict)]
    return abridged("".join(parts), max_bytes) or NO_OUTPUT


def _part(output: Item) -> str:
    return "[image]\n" if output.get("type") == "image" else str(output.get("logs") or "")


def _without_mark(item: Item) -> Item:
    return {name: value for name, value in item.items() if name != _MARK}
