"""The events of a response's stream, as they are kept: what its body has is not kept again.

Pure. An event that shows the response has only what changes while it is made; one that shows an item with large
outputs has none of them. Both are put together again from the body when they are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cloche.model import KIB
from cloche.store.lengths import is_longer

Json = dict[str, Any]

LARGE_BYTES = 16 * KIB  # of an item's outputs
_CHANGING = ("status", "completed_at", "error", "incomplete_details", "service_tier", "usage")
_LEFT_OUT = "cloche.left_out"  # in an event that is kept: "response" or "outputs"; no client ever sees it


def slim(event: Json) -> Json:
    """The event as it is kept."""
    if isinstance(event.get("response"), dict):
        response = event["response"]
        changing = {name: response[name] for name in _CHANGING if name in response}
        return {**event, "response": {**changing, "output": len(response["output"])}, _LEFT_OUT: "response"}
    item = event.get("item")
    if isinstance(item, dict) and is_longer(item.get("outputs"), LARGE_BYTES):
        return {**event, "item": {**item, "outputs": None}, _LEFT_OUT: "outputs"}
    return event


def is_slim(event: Json) -> bool:
    return _LEFT_OUT in event


def whole(events: Iterable[Json], body: Json, *, ended: bool) -> list[Json]:
    """The events as they were. Of one that has not ended, those before the first that the body cannot complete yet."""
    outputs = {item.get("id"): item.get("outputs") for item in body["output"]}
    told = []
    for event in events:
        if not ended and event.get(_LEFT_OUT) == "outputs" and event["item"]["id"] not in outputs:
            break
        told.append(_whole(event, body, outputs))
    return told


def _whole(event: Json, body: Json, outputs: Mapping[Any, Any]) -> Json:
    match event.pop(_LEFT_OUT, None):
        case "response":
            changing = event["response"]
            event["response"] = {**body, **changing, "output": body["output"][: changing["output"]]}
        case "outputs":
            event["item"]["outputs"] = outputs.get(event["item"]["id"])
    return event
