"""Parses the events of a Responses upstream into turn events. Pure: feed it events in the order of arrival.

Upstreams number their items in many ways, some of them wrong. Here an item is found by its id, else by its
index, and gets a number of its own; incomprehensible events raise UpstreamFailed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cloche import errors
from cloche.gateway.events import (
    AnswerFinished,
    CitationAdded,
    DeltaKind,
    ItemClosed,
    ItemDelta,
    ItemOpened,
    PassedThrough,
    TokenUsage,
    TurnEvent,
)
from cloche.gateway.items import Item, new_item_id, output_text_part
from cloche.gateway.upstream import MAX_ITEMS
from cloche.gateway.upstream.http import to_upstream_failure

# Items as a Responses upstream sends them: checked, and completed with every required field.
#
# An upstream's data is hostile input. Missing fields with a default are filled in; invalid items raise.

CALL_TEXT_FIELDS = {"function_call": "arguments", "custom_tool_call": "input"}
"""Types of items that carry one text, and the field that it is in."""


def invalid_stream_error(what: str) -> errors.UpstreamFailed:
    """Returns the error for an event that no valid Responses server sends."""
    return errors.UpstreamFailed(f"The model's server sent an invalid stream: {what}", reason="server_error")


def check_item(item: Any) -> Item:
    """Returns the item. Raises UpstreamFailed unless it is an item that may come from an upstream."""
    if not isinstance(item, dict) or not isinstance(item.get("type"), str):
        raise invalid_stream_error("an item without a type")
    if item["type"] == "code_interpreter_call":
        # Not requested: code runs in Cloche's sandboxes, and code that ran elsewhere must not look as if it did.
        raise errors.UpstreamFailed(
            "The model's server ran code in a container of its own, which was not requested",
            reason="server_error",
        )
    return item


def empty_item(item: Item) -> Item:
    """Returns an item as it is announced, without the contents that follow."""
    match item["type"]:
        case "message":
            return {**item, "role": "assistant", "status": "in_progress", "content": []}
        case "reasoning":
            return {**_without_fields(item, "content", "encrypted_content"), "summary": []}
        case "function_call" | "custom_tool_call" as kind:
            return {
                **_ensure_call_id(item),
                CALL_TEXT_FIELDS[kind]: "",
                **({"status": "in_progress"} if kind == "function_call" else {}),
            }
        case _:
            return {**item, "status": "in_progress"} if item.get("status") == "completed" else item


def complete_item(item: Item, opened: Item, texts: DeltaTexts, status: str) -> Item:
    """Returns the complete item: the contents of its last event or, where missing, those of its deltas."""
    if item["type"] != opened["type"]:
        raise invalid_stream_error("an item that changed its type")
    match item["type"]:
        case "message":
            content = _complete_parts(item.get("content"), texts.parts)
            return {**item, "role": "assistant", "status": _final_status(item, status), "content": content}
        case "reasoning":
            return _complete_reasoning(item, texts)
        case "function_call" | "custom_tool_call" as kind:
            return _complete_call(item, opened, CALL_TEXT_FIELDS[kind], texts, status)
        case _:
            return {**item, "status": status} if item.get("status") == "in_progress" else item


class DeltaTexts:
    """The texts of the deltas of one item."""

    def __init__(self) -> None:
        self.whole: list[str] = []  # of a call
        self.parts: list[tuple[str, list[str]]] = []  # type and text
        self.summaries: list[list[str]] = []


def text_field(kind: str) -> str:
    """Returns the field that holds the text of a part."""
    return "refusal" if kind == "refusal" else "text"


def _ensure_call_id(item: Item) -> Item:
    call_id = item.get("call_id")
    return {**item, "call_id": call_id if isinstance(call_id, str) and call_id else new_item_id("call")}


def _complete_call(item: Item, opened: Item, field: str, texts: DeltaTexts, status: str) -> Item:
    """Completes a call. The function's name, its call id and the text sent so far do not change any more."""
    text, said = item.get(field), "".join(texts.whole)
    whole = {
        **item,
        "call_id": opened["call_id"],
        "name": opened["name"],
        field: text if isinstance(text, str) and text.startswith(said) else said,
    }
    return {**whole, "status": _final_status(item, status)} if item["type"] == "function_call" else whole


def _complete_reasoning(item: Item, texts: DeltaTexts) -> Item:
    summary = [each for each in _only_dicts(item.get("summary")) if isinstance(each.get("text"), str)]
    said = [{"type": "summary_text", "text": "".join(each)} for each in texts.summaries[len(summary) :]]
    whole = {**item, "summary": [*({**each, "type": "summary_text"} for each in summary), *said]}
    if item.get("content") or texts.parts:
        whole["content"] = _complete_parts(item.get("content"), texts.parts)
    if not isinstance(item.get("encrypted_content"), str):
        whole.pop("encrypted_content", None)
    return whole


def _complete_parts(content: Any, said: list[tuple[str, list[str]]]) -> list[Item]:
    """Returns at least as many parts as were begun, each of the type with which it was begun."""
    parts = [_complete_part(each) for each in _only_dicts(content)]
    for number, (kind, pieces) in enumerate(said):
        if number >= len(parts):
            parts.append(_complete_part({"type": kind, text_field(kind): "".join(pieces)}))
        elif parts[number]["type"] != kind:
            raise invalid_stream_error("a part that changed its type")
    return parts


def _complete_part(part: Item) -> Item:
    kind = str(part.get("type"))
    text = part.get(text_field(kind))
    text = text if isinstance(text, str) else ""
    if kind != "output_text":
        return {**part, "type": kind, text_field(kind): text}
    annotations, logprobs = _only_dicts(part.get("annotations")), part.get("logprobs")
    return {**part, **output_text_part(text, annotations), "logprobs": logprobs if isinstance(logprobs, list) else []}


def _only_dicts(value: Any) -> list[Item]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _final_status(item: Item, status: str) -> str:
    return "incomplete" if item.get("status") == "incomplete" else status


def _without_fields(item: Item, *names: str) -> Item:
    return {name: value for name, value in item.items() if name not in names}


ResponsesEvent = dict[str, Any]

MAX_ITEM_PARTS = 1000  # of one item
MAX_CHARACTERS = 64 << 20  # of one leg's deltas
MAX_TOKEN_COUNT = 1 << 53

_DELTA_EVENTS: dict[str, tuple[DeltaKind, str, str]] = {  # event -> kind, type of its item, type of its part
    "response.output_text.delta": ("text", "message", "output_text"),
    "response.refusal.delta": ("refusal", "message", "refusal"),
    "response.reasoning_text.delta": ("reasoning", "reasoning", "reasoning_text"),
    "response.reasoning_summary_text.delta": ("summary", "reasoning", ""),
    "response.function_call_arguments.delta": ("arguments", "function_call", ""),
    "response.custom_tool_call_input.delta": ("custom", "custom_tool_call", ""),
}

_PASSED_EVENTS: dict[str, tuple[str, ...]] = {  # type of an item -> the events about it that clients know
    "web_search_call": ("web_search_call.in_progress", "web_search_call.searching", "web_search_call.completed"),
    "file_search_call": ("file_search_call.in_progress", "file_search_call.searching", "file_search_call.completed"),
    "image_generation_call": (
        "image_generation_call.in_progress",
        "image_generation_call.generating",
        "image_generation_call.partial_image",
        "image_generation_call.completed",
    ),
    "mcp_call": (
        "mcp_call.in_progress",
        "mcp_call.completed",
        "mcp_call.failed",
        "mcp_call_arguments.delta",
        "mcp_call_arguments.done",
    ),
    "mcp_list_tools": ("mcp_list_tools.in_progress", "mcp_list_tools.completed", "mcp_list_tools.failed"),
    "shell_call": ("shell_call_command.added", "shell_call_command.delta", "shell_call_command.done"),
    "shell_call_output": ("shell_call_output_content.delta", "shell_call_output_content.done"),
    "compaction": ("compaction.compacting",),
}
_ITEM_OF_PASSED = {f"response.{event}": kind for kind, events in _PASSED_EVENTS.items() for event in events}
# Strict clients refuse a stream with events that they do not know. Their content is in the complete item too.

_NOT_PASSED = frozenset({"sequence_number", "obfuscation", "response_id", "item_id", "output_index"})

_INCOMPLETE_REASONS = ("max_output_tokens", "content_filter")
_STATUS_OF_CODE = {"rate_limit_exceeded": 429, "invalid_prompt": 400}


class ResponsesStreamParser:
    """Parser: `finished` after the upstream's last event.

    `secret` is removed from the upstream's error messages.
    """

    def __init__(self, secret: str = "") -> None:
        self._secret = secret
        self._open: list[_GrowingItem] = []
        self._indices: set[int] = set()  # the upstream's own, of all items that were begun
        self._ids: set[str | None] = set()
        self._count = 0
        self._characters = 0
        self.finished = False

    def feed(self, event: Any) -> Iterator[TurnEvent]:
        """Raises UpstreamFailed if the upstream failed, or the event is invalid."""
        kind = event.get("type") if isinstance(event, dict) else None
        if not isinstance(kind, str):
            if isinstance(event, dict) and event.get("error"):
                raise _stream_failure(event["error"], self._secret)
            raise invalid_stream_error("an event without a type")
        if kind in _DELTA_EVENTS:
            yield from self._on_delta(event, *_DELTA_EVENTS[kind])
        elif kind in _ITEM_OF_PASSED:
            yield from self._pass_through(event, _ITEM_OF_PASSED[kind])
        elif kind == "response.output_item.added":
            yield from self._on_item_added(event)
        elif kind == "response.output_item.done":
            yield from self._on_item_done(event)
        elif kind == "response.output_text.annotation.added":
            yield from self._on_annotation(event)
        elif kind in ("response.completed", "response.incomplete", "response.failed"):
            yield from self.end(event.get("response"), kind.removeprefix("response."))
        elif kind == "error":
            raise _stream_failure(event.get("error") if isinstance(event.get("error"), dict) else event, self._secret)

    def end(self, response: Any, status: str | None = None) -> Iterator[TurnEvent]:
        """Yields the events for the parts of a whole response that were not sent yet, and the end."""
        if not isinstance(response, dict):
            raise invalid_stream_error("an end without a response")
        said = response.get("status")
        status = said if said in ("incomplete", "failed", "cancelled") else status or said
        if status not in ("completed", "incomplete"):
            raise _stream_failure(
                response.get("error") or {"message": f"its answer is '{str(status)[:40]}'"}, self._secret
            )
        yield from self._close_open_items("completed" if status == "completed" else "incomplete")
        yield from self._add_unannounced_items(response.get("output"))
        self.finished = True
        yield _finished_event(response, complete=status == "completed")

    # -- the beginning and the end of items

    def _on_item_added(self, event: ResponsesEvent) -> Iterator[TurnEvent]:
        item, index = check_item(event.get("item")), _as_index(event.get("output_index"))
        if any(each.index == index and index is not None and each.is_same(item) for each in self._open):
            raise invalid_stream_error("an item that begins twice")
        yield from self._begin_item(item, index)

    def _begin_item(self, item: Item, index: int | None) -> Iterator[TurnEvent]:
        if self._count >= MAX_ITEMS:
            raise invalid_stream_error(f"more than {MAX_ITEMS} items")
        growing = _GrowingItem(self._count, index, item)
        self._count += 1
        self._open.append(growing)
        self._indices |= {index} if index is not None else set()
        self._ids |= {growing.id} if growing.id is not None else set()
        yield from growing.opening()

    def _on_item_done(self, event: ResponsesEvent) -> Iterator[TurnEvent]:
        item = check_item(event.get("item"))
        growing = self._find_item(item.get("id"), event.get("output_index"))
        if growing is None:
            yield from self._add_whole_item(item, _as_index(event.get("output_index")))
            return
        self._open.remove(growing)
        yield from growing.closing(item, "completed")

    def _add_whole_item(self, item: Item, index: int | None) -> Iterator[TurnEvent]:
        """Begins and closes an unannounced item. An item that was complete before raises UpstreamFailed."""
        if index in self._indices or _item_id(item) in self._ids:
            raise invalid_stream_error("an item that ends twice")
        yield from self._begin_item(item, index)
        yield from self._open.pop().closing(item, "completed")

    def _close_open_items(self, status: str) -> Iterator[TurnEvent]:
        while self._open:
            growing = self._open.pop(0)
            yield from growing.closing(growing.item, status)

    def _add_unannounced_items(self, output: Any) -> Iterator[TurnEvent]:
        """Adds items that only the final response has."""
        output = output if isinstance(output, list) else []
        if len(output) <= self._count:
            return
        for index, item in enumerate(output):
            if index not in self._indices and _item_id(check_item(item)) not in self._ids:
                yield from self._add_whole_item(item, index)

    # -- events between start and end

    def _on_delta(self, event: ResponsesEvent, kind: DeltaKind, item_type: str, part_type: str) -> Iterator[TurnEvent]:
        growing = self._require_item(event, item_type)
        text = event.get("delta")
        if not isinstance(text, str):
            raise invalid_stream_error("a delta without text")
        self._characters += len(text)
        if self._characters > MAX_CHARACTERS:
            raise invalid_stream_error(f"more than {MAX_CHARACTERS} characters")
        field = "summary_index" if kind == "summary" else "content_index"
        part = _as_index(event.get(field)) or 0
        yield from growing.delta(kind, part, part_type, text, event.get("logprobs"))

    def _on_annotation(self, event: ResponsesEvent) -> Iterator[TurnEvent]:
        growing, annotation = self._require_item(event, "message"), event.get("annotation")
        if not isinstance(annotation, dict):
            raise invalid_stream_error("an annotation that is none")
        yield from growing.cite(_as_index(event.get("content_index")) or 0, annotation)

    def _pass_through(self, event: ResponsesEvent, item_type: str) -> Iterator[TurnEvent]:
        growing = self._require_item(event, item_type)
        left = {name: value for name, value in event.items() if name not in _NOT_PASSED}
        yield PassedThrough(index=growing.number, event=left)

    def _require_item(self, event: ResponsesEvent, item_type: str) -> _GrowingItem:
        growing = self._find_item(event.get("item_id"), event.get("output_index"))
        if growing is None:
            raise invalid_stream_error(f"{str(event.get('type'))[:80]} about an item that is not there")
        if growing.item["type"] != item_type:
            raise invalid_stream_error(f"{str(event.get('type'))[:80]} about an item of another type")
        return growing

    def _find_item(self, id: Any, index: Any) -> _GrowingItem | None:
        """Returns the open item with that id, else the latest with that index."""
        by_id = [each for each in self._open if each.id is not None and each.id == id]
        by_index = [each for each in self._open if each.index is not None and each.index == _as_index(index)]
        found = by_id or by_index
        return found[-1] if found else None


class _GrowingItem:
    """An item that was announced, and is not complete."""

    def __init__(self, number: int, index: int | None, item: Item):
        self.number = number
        self.index = index
        self.item = item
        self.id = _item_id(item)
        self._texts = DeltaTexts()
        self._cited: dict[int, int] = {}
        self._opened: Item | None = None

    def is_same(self, item: Item) -> bool:
        return self.id is None or self.id == item.get("id")

    def opening(self) -> Iterator[TurnEvent]:
        """Announces the item; a call only when its name is known."""
        if self.item["type"] in CALL_TEXT_FIELDS and not _is_name(self.item.get("name")):
            return
        self._opened = empty_item(self.item)
        yield ItemOpened(index=self.number, item=self._opened)

    def delta(self, kind: DeltaKind, part: int, part_type: str, text: str, logprobs: Any) -> Iterator[TurnEvent]:
        self._part_pieces(kind, part, part_type).append(text)
        if self._opened is not None:
            logprobs = logprobs if isinstance(logprobs, list) else []
            yield ItemDelta(index=self.number, kind=kind, text=text, part=part, logprobs=logprobs)

    def cite(self, part: int, annotation: Item) -> Iterator[TurnEvent]:
        self._part_pieces("text", part, "output_text")
        self._cited[part] = self._cited.get(part, 0) + 1
        yield CitationAdded(index=self.number, annotation=annotation, part=part)

    def closing(self, item: Item, status: str) -> Iterator[TurnEvent]:
        """Yields the remaining text, and the complete item."""
        said = "".join(self._texts.whole) if self._opened is not None else ""
        if self._opened is None:
            self.item = {**item, "name": self._require_name(item)}
            yield from self.opening()
            assert self._opened is not None
        whole = complete_item(item, self._opened, self._texts, status)
        if whole["type"] == "message":
            yield from self._remaining_parts(whole)
        elif whole["type"] in CALL_TEXT_FIELDS:
            yield from self._remaining_call_text(whole, said)
        yield ItemClosed(index=self.number, item=whole)

    # -- inside

    def _require_name(self, item: Item) -> str:
        name = item.get("name")
        if not _is_name(name):
            raise invalid_stream_error("a call of nothing")
        return str(name)

    def _part_pieces(self, kind: DeltaKind, part: int, part_type: str) -> list[str]:
        """Returns the list that collects the text of a part. Parts come one after the other."""
        if kind in ("arguments", "custom"):
            return self._texts.whole
        if kind == "summary":
            summaries = self._texts.summaries
            self._check_part_order(part, len(summaries))
            if part == len(summaries):
                summaries.append([])
            return summaries[part]
        parts = self._texts.parts
        self._check_part_order(part, len(parts))
        if part == len(parts):
            parts.append((part_type, []))
        if parts[part][0] != part_type:
            raise invalid_stream_error("a part that changed its type")
        return parts[part][1]

    def _check_part_order(self, part: int, known: int) -> None:
        if part > known or part >= MAX_ITEM_PARTS:
            raise invalid_stream_error("a part before the one that precedes it")

    def _remaining_call_text(self, whole: Item, said: str) -> Iterator[TurnEvent]:
        text = whole[CALL_TEXT_FIELDS[whole["type"]]]
        if text != said:
            kind: DeltaKind = "arguments" if whole["type"] == "function_call" else "custom"
            yield ItemDelta(index=self.number, kind=kind, text=text[len(said) :])

    def _remaining_parts(self, whole: Item) -> Iterator[TurnEvent]:
        for number, part in enumerate(whole["content"]):
            if part["type"] in ("output_text", "refusal"):
                yield from self._remaining_text(number, part)
            for annotation in part.get("annotations", [])[self._cited.get(number, 0) :]:
                yield CitationAdded(index=self.number, annotation=annotation, part=number)

    def _remaining_text(self, number: int, part: Item) -> Iterator[TurnEvent]:
        parts = self._texts.parts
        said = "".join(parts[number][1]) if number < len(parts) else ""
        text = part[text_field(part["type"])]
        if text != said and text.startswith(said):
            kind: DeltaKind = "refusal" if part["type"] == "refusal" else "text"
            logprobs = part.get("logprobs", []) if not said else []
            yield ItemDelta(index=self.number, kind=kind, text=text[len(said) :], part=number, logprobs=logprobs)


def _stream_failure(error: Any, secret: str) -> errors.UpstreamFailed:
    """Converts an upstream's error, of a stream or of a response."""
    said = dict(_as_object(error))
    if said.get("type") == "error":  # the type of the event: the failure is in it, not below `error`
        said.pop("type")
    said["code"] = said.get("code") or "server_error"
    return to_upstream_failure(said, status=_STATUS_OF_CODE.get(str(said["code"]), 502), secret=secret)


def _finished_event(response: ResponsesEvent, *, complete: bool) -> AnswerFinished:
    details = response.get("incomplete_details")
    reason = details.get("reason") if isinstance(details, dict) else None
    model, tier = response.get("model"), response.get("service_tier")
    return AnswerFinished(
        status="completed" if complete else "incomplete",
        reason=None if complete else reason if reason in _INCOMPLETE_REASONS else _INCOMPLETE_REASONS[0],
        tokens=_parse_usage(response.get("usage")),
        model=model[:200] if isinstance(model, str) else "",
        service_tier=tier[:40] if isinstance(tier, str) else None,
    )


def _parse_usage(usage: Any) -> TokenUsage:
    usage = _as_object(usage)
    read, written = _as_object(usage.get("input_tokens_details")), _as_object(usage.get("output_tokens_details"))
    return TokenUsage(
        input=_token_count(usage.get("input_tokens")),
        cached=_token_count(read.get("cached_tokens")),
        cache_written=_token_count(read.get("cache_write_tokens")),
        output=_token_count(usage.get("output_tokens")),
        reasoning=_token_count(written.get("reasoning_tokens")),
    )


def _as_object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _token_count(value: Any) -> int:
    return min(max(int(value), 0), MAX_TOKEN_COUNT) if isinstance(value, int) else 0


def _as_index(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _item_id(item: Item) -> str | None:
    id = item.get("id")
    return id if isinstance(id, str) and id else None


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)
