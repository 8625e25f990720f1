"""Items as a Responses upstream sends them: checked, and with every field that readers count on.

What an upstream says is hostile input. What is missing and can be made up is made up; what makes no sense raises.
"""

from __future__ import annotations

from typing import Any

from cloche import errors
from cloche.gateway.items import Item, new_item_id, output_text

CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
"""Types of items that carry one text, and the field that it is in."""


def out_of_grammar(what: str) -> errors.UpstreamFailed:
    """Something that no Responses server says."""
    return errors.UpstreamFailed(f"The model's server sent a stream that makes no sense: {what}", reason="server_error")


def checked(item: Any) -> Item:
    """Raises UpstreamFailed unless it is an item that may come from here."""
    if not isinstance(item, dict) or not isinstance(item.get("type"), str):
        raise out_of_grammar("an item without a type")
    if item["type"] == "code_interpreter_call":
        # Nobody asked for that: code runs in our sandboxes, and what ran elsewhere is not passed off as ours.
        raise errors.UpstreamFailed(
            "The model's server ran code in a container of its own, which it was not asked to do",
            reason="server_error",
        )
    return item


def emptied(item: Item) -> Item:
    """An item as it is announced: what will come is not there yet."""
    match item["type"]:
        case "message":
            return {**item, "role": "assistant", "status": "in_progress", "content": []}
        case "reasoning":
            return {**_without(item, "content", "encrypted_content"), "summary": []}
        case "function_call" | "custom_tool_call" as kind:
            return {**_call(item), CALLS[kind]: "", **({"status": "in_progress"} if kind == "function_call" else {})}
        case _:
            return {**item, "status": "in_progress"} if item.get("status") == "completed" else item


def completed(item: Item, opened: Item, texts: Texts, status: str) -> Item:
    """An item as it is when it is whole: what its last event says, and where that is silent, what its deltas said."""
    if item["type"] != opened["type"]:
        raise out_of_grammar("an item that changed its type")
    match item["type"]:
        case "message":
            content = _parts(item.get("content"), texts.parts)
            return {**item, "role": "assistant", "status": _ended(item, status), "content": content}
        case "reasoning":
            return _reasoning(item, texts)
        case "function_call" | "custom_tool_call" as kind:
            return _whole_call(item, opened, CALLS[kind], texts, status)
        case _:
            return {**item, "status": status} if item.get("status") == "in_progress" else item


class Texts:
    """What the deltas of one item said."""

    def __init__(self) -> None:
        self.whole: list[str] = []  # of a call
        self.parts: list[tuple[str, list[str]]] = []  # type and text
        self.summaries: list[list[str]] = []


def text_field(kind: str) -> str:
    """Where the text of a part is."""
    return "refusal" if kind == "refusal" else "text"


def _call(item: Item) -> Item:
    call_id = item.get("call_id")
    return {**item, "call_id": call_id if isinstance(call_id, str) and call_id else new_item_id("call")}


def _whole_call(item: Item, opened: Item, field: str, texts: Texts, status: str) -> Item:
    """Who calls what does not change any more once it was said, and what was said of it is not taken back."""
    text, said = item.get(field), "".join(texts.whole)
    whole = {
        **item,
        "call_id": opened["call_id"],
        "name": opened["name"],
        field: text if isinstance(text, str) and text.startswith(said) else said,
    }
    return {**whole, "status": _ended(item, status)} if item["type"] == "function_call" else whole


def _reasoning(item: Item, texts: Texts) -> Item:
    summary = [each for each in _dicts(item.get("summary")) if isinstance(each.get("text"), str)]
    said = [{"type": "summary_text", "text": "".join(each)} for each in texts.summaries[len(summary) :]]
    whole = {**item, "summary": [*({**each, "type": "summary_text"} for each in summary), *said]}
    if item.get("content") or texts.parts:
        whole["content"] = _parts(item.get("content"), texts.parts)
    if not isinstance(item.get("encrypted_content"), str):
        whole.pop("encrypted_content", None)
    return whole


def _parts(content: Any, said: list[tuple[str, list[str]]]) -> list[Item]:
    """At least as many as were begun, each of the type with which it was begun."""
    parts = [_part(each) for each in _dicts(content)]
    for number, (kind, pieces) in enumerate(said):
        if number >= len(parts):
            parts.append(_part({"type": kind, text_field(kind): "".join(pieces)}))
        elif parts[number]["type"] != kind:
            raise out_of_grammar("a part that changed its type")
    return parts


def _part(part: Item) -> Item:
    kind = str(part.get("type"))
    text = part.get(text_field(kind))
    text = text if isinstance(text, str) else ""
    if kind != "output_text":
        return {**part, "type": kind, text_field(kind): text}
    annotations, logprobs = _dicts(part.get("annotations")), part.get("logprobs")
    return {**part, **output_text(text, annotations), "logprobs": logprobs if isinstance(logprobs, list) else []}


def _dicts(value: Any) -> list[Item]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _ended(item: Item, status: str) -> str:
    return "incomplete" if item.get("status") == "incomplete" else status


def _without(item: Item, *names: str) -> Item:
    return {name: value for name, value in item.items() if name not in names}
