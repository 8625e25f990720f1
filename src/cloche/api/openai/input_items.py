"""Items as clients sent them, in the shape in which they are listed and kept: with an id, content in parts."""

from __future__ import annotations

from collections.abc import Iterable

from cloche.api.openai.decoding import OUTPUTS
from cloche.api.openai.response import without_outputs
from cloche.gateway.items import Item, new_item_id, output_text, without_credentials

MAX_ID = 200  # characters


def with_ids(items: Iterable[Item]) -> list[Item]:
    """The items, each with an id that no other has."""
    seen: set[str] = set()
    listed = []
    for item in items:
        id = item.get("id")
        if not isinstance(id, str) or not 0 < len(id) <= MAX_ID or id in seen:
            id = new_item_id(str(item.get("type")))
        seen.add(id)
        listed.append(_listed({**without_credentials(item), "id": id}))
    return listed


def minted(given: Iterable[Item], listed: Iterable[Item]) -> set[str]:
    """The ids in `listed` that no client has chosen: those that are not among what it gave."""
    return {item["id"] for item in listed} - {item["id"] for item in given if isinstance(item.get("id"), str)}


def seen_by(items: Iterable[Item], include: Iterable[str]) -> list[Item]:
    """The items as a client sees them who asked for that."""
    return list(items) if OUTPUTS in include else [without_outputs(item) for item in items]


def _listed(item: Item) -> Item:
    match item.get("type"):
        case "message":
            content = item.get("content")
            parts = [_text_part(item, content)] if isinstance(content, str) else content
            return {**item, "status": item.get("status") or "completed", "content": parts or []}
        case "function_call" | "function_call_output":
            return {**item, "status": item.get("status") or "completed"}
        case "code_interpreter_call":
            return {"status": "completed", "code": None, "outputs": None, **item}
    return item


def _text_part(item: Item, text: str) -> Item:
    return output_text(text) if item.get("role") == "assistant" else {"type": "input_text", "text": text}
