"""The events of a Responses upstream, as happenings of a leg. Pure: feed it events, in the order in which they came.

Upstreams number their items in many ways, some of them wrong. Here an item is found by its id, else by its index, and
gets a number of its own; what cannot be understood at all raises UpstreamFailed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cloche import errors
from cloche.gateway.events import Cited, Closed, Delta, DeltaKind, Finished, Happening, Opened, Passed, Tokens
from cloche.gateway.items import Item, new_item_id, output_text
from cloche.gateway.upstream import MAX_ITEMS
from cloche.gateway.upstream.http import failure_of

# Items as a Responses upstream sends them: checked, and with every field that readers count on.
#
# What an upstream says is hostile input. What is missing and can be made up is made up; what makes no sense raises.

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


Event = dict[str, Any]

MAX_PARTS = 1000  # of one item
MAX_CHARACTERS = 64 << 20  # of one leg's deltas
MAX_TOKENS = 1 << 53

_DELTAS: dict[str, tuple[DeltaKind, str, str]] = {  # event -> kind, type of its item, type of its part
    "response.output_text.delta": ("text", "message", "output_text"),
    "response.refusal.delta": ("refusal", "message", "refusal"),
    "response.reasoning_text.delta": ("reasoning", "reasoning", "reasoning_text"),
    "response.reasoning_summary_text.delta": ("summary", "reasoning", ""),
    "response.function_call_arguments.delta": ("arguments", "function_call", ""),
    "response.custom_tool_call_input.delta": ("custom", "custom_tool_call", ""),
}

_PASSED: dict[str, tuple[str, ...]] = {  # type of an item -> the events about it that clients know
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
_ITEM_OF_PASSED = {f"response.{event}": kind for kind, events in _PASSED.items() for event in events}
# Strict clients refuse a stream with events that they do not know. What those say is in the whole item too.

_NOT_PASSED = frozenset({"sequence_number", "obfuscation", "response_id", "item_id", "output_index"})

_REASONS = ("max_output_tokens", "content_filter")
_STATUS_OF_CODE = {"rate_limit_exceeded": 429, "invalid_prompt": 400}


class LegEvents:
    """`finished` once the upstream's last word was heard. `secret` is cut out of what it says went wrong."""

    def __init__(self, secret: str = "") -> None:
        self._secret = secret
        self._open: list[_Growing] = []
        self._indices: set[int] = set()  # the upstream's own, of all items that were begun
        self._ids: set[str | None] = set()
        self._count = 0
        self._characters = 0
        self.finished = False

    def feed(self, event: Any) -> Iterator[Happening]:
        """Raises UpstreamFailed if the upstream failed, or makes no sense."""
        kind = event.get("type") if isinstance(event, dict) else None
        if not isinstance(kind, str):
            if isinstance(event, dict) and event.get("error"):
                raise _failure(event["error"], self._secret)
            raise out_of_grammar("an event without a type")
        if kind in _DELTAS:
            yield from self._delta(event, *_DELTAS[kind])
        elif kind in _ITEM_OF_PASSED:
            yield from self._passed(event, _ITEM_OF_PASSED[kind])
        elif kind == "response.output_item.added":
            yield from self._added(event)
        elif kind == "response.output_item.done":
            yield from self._done(event)
        elif kind == "response.output_text.annotation.added":
            yield from self._annotation(event)
        elif kind in ("response.completed", "response.incomplete", "response.failed"):
            yield from self.end(event.get("response"), kind.removeprefix("response."))
        elif kind == "error":
            raise _failure(event.get("error") if isinstance(event.get("error"), dict) else event, self._secret)

    def end(self, response: Any, status: str | None = None) -> Iterator[Happening]:
        """What a whole response says that was not said yet, and that it is the end."""
        if not isinstance(response, dict):
            raise out_of_grammar("an end without a response")
        said = response.get("status")
        status = said if said in ("incomplete", "failed", "cancelled") else status or said
        if status not in ("completed", "incomplete"):
            raise _failure(response.get("error") or {"message": f"its answer is '{str(status)[:40]}'"}, self._secret)
        yield from self._close_all("completed" if status == "completed" else "incomplete")
        yield from self._unsaid(response.get("output"))
        self.finished = True
        yield _finished(response, complete=status == "completed")

    # -- the beginning and the end of items

    def _added(self, event: Event) -> Iterator[Happening]:
        item, index = checked(event.get("item")), _number(event.get("output_index"))
        if any(each.index == index and index is not None and each.is_same(item) for each in self._open):
            raise out_of_grammar("an item that begins twice")
        yield from self._begin(item, index)

    def _begin(self, item: Item, index: int | None) -> Iterator[Happening]:
        if self._count >= MAX_ITEMS:
            raise out_of_grammar(f"more than {MAX_ITEMS} items")
        growing = _Growing(self._count, index, item)
        self._count += 1
        self._open.append(growing)
        self._indices |= {index} if index is not None else set()
        self._ids |= {growing.id} if growing.id is not None else set()
        yield from growing.opening()

    def _done(self, event: Event) -> Iterator[Happening]:
        item = checked(event.get("item"))
        growing = self._find(item.get("id"), event.get("output_index"))
        if growing is None:
            yield from self._whole(item, _number(event.get("output_index")))
            return
        self._open.remove(growing)
        yield from growing.closing(item, "completed")

    def _whole(self, item: Item, index: int | None) -> Iterator[Happening]:
        """An item that nobody announced. One that was whole before is not whole again."""
        if index in self._indices or _id_of(item) in self._ids:
            raise out_of_grammar("an item that ends twice")
        yield from self._begin(item, index)
        yield from self._open.pop().closing(item, "completed")

    def _close_all(self, status: str) -> Iterator[Happening]:
        while self._open:
            growing = self._open.pop(0)
            yield from growing.closing(growing.item, status)

    def _unsaid(self, output: Any) -> Iterator[Happening]:
        """Items that only the end mentions."""
        output = output if isinstance(output, list) else []
        if len(output) <= self._count:
            return
        for index, item in enumerate(output):
            if index not in self._indices and _id_of(checked(item)) not in self._ids:
                yield from self._whole(item, index)

    # -- what comes between

    def _delta(self, event: Event, kind: DeltaKind, item_type: str, part_type: str) -> Iterator[Happening]:
        growing = self._needed(event, item_type)
        text = event.get("delta")
        if not isinstance(text, str):
            raise out_of_grammar("a delta without text")
        self._characters += len(text)
        if self._characters > MAX_CHARACTERS:
            raise out_of_grammar(f"more than {MAX_CHARACTERS} characters")
        field = "summary_index" if kind == "summary" else "content_index"
        part = _number(event.get(field)) or 0
        yield from growing.delta(kind, part, part_type, text, event.get("logprobs"))

    def _annotation(self, event: Event) -> Iterator[Happening]:
        growing, annotation = self._needed(event, "message"), event.get("annotation")
        if not isinstance(annotation, dict):
            raise out_of_grammar("an annotation that is none")
        yield from growing.cite(_number(event.get("content_index")) or 0, annotation)

    def _passed(self, event: Event, item_type: str) -> Iterator[Happening]:
        growing = self._needed(event, item_type)
        left = {name: value for name, value in event.items() if name not in _NOT_PASSED}
        yield Passed(index=growing.number, event=left)

    def _needed(self, event: Event, item_type: str) -> _Growing:
        growing = self._find(event.get("item_id"), event.get("output_index"))
        if growing is None:
            raise out_of_grammar(f"{str(event.get('type'))[:80]} about an item that is not there")
        if growing.item["type"] != item_type:
            raise out_of_grammar(f"{str(event.get('type'))[:80]} about an item of another type")
        return growing

    def _find(self, id: Any, index: Any) -> _Growing | None:
        """The open item with that id, else the latest with that index."""
        by_id = [each for each in self._open if each.id is not None and each.id == id]
        by_index = [each for each in self._open if each.index is not None and each.index == _number(index)]
        found = by_id or by_index
        return found[-1] if found else None


class _Growing:
    """An item that was announced, and is not whole."""

    def __init__(self, number: int, index: int | None, item: Item):
        self.number = number
        self.index = index
        self.item = item
        self.id = _id_of(item)
        self._texts = Texts()
        self._cited: dict[int, int] = {}
        self._opened: Item | None = None

    def is_same(self, item: Item) -> bool:
        return self.id is None or self.id == item.get("id")

    def opening(self) -> Iterator[Happening]:
        """A call is announced when it is known what it calls."""
        if self.item["type"] in CALLS and not _is_name(self.item.get("name")):
            return
        self._opened = emptied(self.item)
        yield Opened(index=self.number, item=self._opened)

    def delta(self, kind: DeltaKind, part: int, part_type: str, text: str, logprobs: Any) -> Iterator[Happening]:
        self._pieces(kind, part, part_type).append(text)
        if self._opened is not None:
            logprobs = logprobs if isinstance(logprobs, list) else []
            yield Delta(index=self.number, kind=kind, text=text, part=part, logprobs=logprobs)

    def cite(self, part: int, annotation: Item) -> Iterator[Happening]:
        self._pieces("text", part, "output_text")
        self._cited[part] = self._cited.get(part, 0) + 1
        yield Cited(index=self.number, annotation=annotation, part=part)

    def closing(self, item: Item, status: str) -> Iterator[Happening]:
        """What was not said of it yet, and the whole."""
        said = "".join(self._texts.whole) if self._opened is not None else ""
        if self._opened is None:
            self.item = {**item, "name": self._name_of(item)}
            yield from self.opening()
            assert self._opened is not None
        whole = completed(item, self._opened, self._texts, status)
        if whole["type"] == "message":
            yield from self._unsaid_parts(whole)
        elif whole["type"] in CALLS:
            yield from self._unsaid_call(whole, said)
        yield Closed(index=self.number, item=whole)

    # -- inside

    def _name_of(self, item: Item) -> str:
        name = item.get("name")
        if not _is_name(name):
            raise out_of_grammar("a call of nothing")
        return str(name)

    def _pieces(self, kind: DeltaKind, part: int, part_type: str) -> list[str]:
        """Where the text of a part is gathered. Parts come one after the other."""
        if kind in ("arguments", "custom"):
            return self._texts.whole
        if kind == "summary":
            summaries = self._texts.summaries
            self._check_place(part, len(summaries))
            if part == len(summaries):
                summaries.append([])
            return summaries[part]
        parts = self._texts.parts
        self._check_place(part, len(parts))
        if part == len(parts):
            parts.append((part_type, []))
        if parts[part][0] != part_type:
            raise out_of_grammar("a part that changed its type")
        return parts[part][1]

    def _check_place(self, part: int, known: int) -> None:
        if part > known or part >= MAX_PARTS:
            raise out_of_grammar("a part before the one that precedes it")

    def _unsaid_call(self, whole: Item, said: str) -> Iterator[Happening]:
        text = whole[CALLS[whole["type"]]]
        if text != said:
            kind: DeltaKind = "arguments" if whole["type"] == "function_call" else "custom"
            yield Delta(index=self.number, kind=kind, text=text[len(said) :])

    def _unsaid_parts(self, whole: Item) -> Iterator[Happening]:
        for number, part in enumerate(whole["content"]):
            if part["type"] in ("output_text", "refusal"):
                yield from self._unsaid_text(number, part)
            for annotation in part.get("annotations", [])[self._cited.get(number, 0) :]:
                yield Cited(index=self.number, annotation=annotation, part=number)

    def _unsaid_text(self, number: int, part: Item) -> Iterator[Happening]:
        parts = self._texts.parts
        said = "".join(parts[number][1]) if number < len(parts) else ""
        text = part[text_field(part["type"])]
        if text != said and text.startswith(said):
            kind: DeltaKind = "refusal" if part["type"] == "refusal" else "text"
            logprobs = part.get("logprobs", []) if not said else []
            yield Delta(index=self.number, kind=kind, text=text[len(said) :], part=number, logprobs=logprobs)


def _failure(error: Any, secret: str) -> errors.UpstreamFailed:
    """What an upstream says went wrong, in a stream or in a response."""
    said = dict(_object(error))
    if said.get("type") == "error":  # that of the event: what went wrong is in it, not below `error`
        said.pop("type")
    said["code"] = said.get("code") or "server_error"
    return failure_of(said, status=_STATUS_OF_CODE.get(str(said["code"]), 502), secret=secret)


def _finished(response: Event, *, complete: bool) -> Finished:
    details = response.get("incomplete_details")
    reason = details.get("reason") if isinstance(details, dict) else None
    model, tier = response.get("model"), response.get("service_tier")
    return Finished(
        status="completed" if complete else "incomplete",
        reason=None if complete else reason if reason in _REASONS else _REASONS[0],
        tokens=_tokens(response.get("usage")),
        model=model[:200] if isinstance(model, str) else "",
        service_tier=tier[:40] if isinstance(tier, str) else None,
    )


def _tokens(usage: Any) -> Tokens:
    usage = _object(usage)
    read, written = _object(usage.get("input_tokens_details")), _object(usage.get("output_tokens_details"))
    return Tokens(
        input=_amount(usage.get("input_tokens")),
        cached=_amount(read.get("cached_tokens")),
        cache_written=_amount(read.get("cache_write_tokens")),
        output=_amount(usage.get("output_tokens")),
        reasoning=_amount(written.get("reasoning_tokens")),
    )


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _amount(value: Any) -> int:
    return min(max(int(value), 0), MAX_TOKENS) if isinstance(value, int) else 0


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _id_of(item: Item) -> str | None:
    id = item.get("id")
    return id if isinstance(id, str) and id else None


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)
