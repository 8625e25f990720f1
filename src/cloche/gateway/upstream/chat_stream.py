"""Parses a Chat Completions answer, chunk by chunk, into turn events. Pure.

    content, refusal                    a message              reasoning_content, reasoning       a reasoning item
    tool_calls, function_call           a function_call each, or a custom_tool_call

Servers differ: ids, indexes and types may be missing, arguments may come whole or as an object, all calls may
have the index 0. The parser reads all of it, and uses the usable parts of malformed chunks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from cloche import errors
from cloche.gateway.events import (
    AnswerFinished,
    AnswerStatus,
    DeltaKind,
    ItemClosed,
    ItemDelta,
    ItemOpened,
    TokenUsage,
    TurnEvent,
)
from cloche.gateway.items import Item, new_item_id
from cloche.gateway.upstream import MAX_ITEMS
from cloche.gateway.upstream.http import PASSED_STATUSES, to_upstream_failure

# The items of a chat answer while they stream: messages, reasoning, calls.

MAX_COMPLETENESS_CHECKS = 100


class ChatMessageItem:
    """A message: text, a refusal, or both."""

    def __init__(self, index: int):
        self.index = index
        self._id = new_item_id("message")
        self._parts: dict[DeltaKind, list[str]] = {}  # in the order in which they began
        self._logprobs: list[Any] = []

    def opening(self) -> Item:
        return {"id": self._id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}

    def add(self, kind: DeltaKind, text: str, logprobs: list[Any]) -> ItemDelta:
        self._parts.setdefault(kind, []).append(text)
        self._logprobs += logprobs
        return ItemDelta(index=self.index, kind=kind, text=text, part=list(self._parts).index(kind), logprobs=logprobs)

    def whole(self, status: str) -> Item:
        return {**self.opening(), "status": status, "content": [self._build_part(kind) for kind in self._parts]}

    def _build_part(self, kind: DeltaKind) -> Item:
        text = "".join(self._parts[kind])
        if kind == "refusal":
            return {"type": "refusal", "refusal": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}


class ChatReasoningItem:
    """A reasoning item, where the model's server exposes reasoning."""

    def __init__(self, index: int):
        self.index = index
        self._id = new_item_id("reasoning")
        self._pieces: list[str] = []

    def opening(self) -> Item:
        return {"id": self._id, "type": "reasoning", "summary": [], "status": "in_progress"}

    def add(self, kind: DeltaKind, text: str, logprobs: list[Any]) -> ItemDelta:
        self._pieces.append(text)
        return ItemDelta(index=self.index, kind=kind, text=text)

    def whole(self, status: str) -> Item:
        content = [{"type": "reasoning_text", "text": "".join(self._pieces)}]
        return {**self.opening(), "status": status, "content": content}


class ChatCallItem:
    """A call of a function, or of a custom tool presented as one. It opens when its name is known."""

    def __init__(self, index: int, given_id: str, *, raw_input: bool):
        self.index = index
        self.given_id = given_id
        self._raw_input = raw_input  # a custom tool's own words, not arguments
        self._call_id = given_id or new_item_id("call")
        self.name = ""
        self._is_custom = raw_input
        self._pieces: list[str] = []
        self._waiting: list[str] = []  # pieces that came before the name
        self._looks = 0
        self._id = ""
        self._opened = self._closed = False

    def set_name(self, name: str, *, is_custom: bool) -> None:
        if name and not self.name:
            self.name = name
            self._is_custom |= is_custom

    def add(self, arguments: str) -> Iterator[TurnEvent]:
        if self._closed:
            return
        if arguments:
            self._pieces.append(arguments)
            self._waiting.append(arguments)
        if self.name:
            yield from self._open_item()
            yield from self._emit_pieces()

    @property
    def is_complete(self) -> bool:
        """Whether the call is closed, or its arguments are a complete JSON object.

        The check is made a limited number of times, as each one parses all arguments.
        """
        self._looks += 1
        return self._closed or (self._looks <= MAX_COMPLETENESS_CHECKS and self._is_json_object)

    def close(self, *, cut_off: bool = False) -> Iterator[TurnEvent]:
        """Closes the call. `cut_off`: the model could not finish it. A call without a name is dropped."""
        if self._closed or not self.name:
            return
        yield from self._open_item()
        yield from self._emit_pieces()
        self._closed = True
        status = "incomplete" if cut_off and not self._is_json_object else "completed"
        yield ItemClosed(index=self.index, item=self._build_item(status, self._final_text()))

    @property
    def _is_json_object(self) -> bool:
        return is_json_object("".join(self._pieces))

    def _open_item(self) -> Iterator[TurnEvent]:
        if not self._opened:
            self._opened = True
            self._id = new_item_id("custom_tool_call" if self._is_custom else "function_call")
            yield ItemOpened(index=self.index, item=self._build_item("in_progress", ""))

    def _emit_pieces(self) -> Iterator[TurnEvent]:
        waiting, self._waiting = self._waiting, []
        if self._is_custom and not self._raw_input:
            return  # its input is inside of JSON; it is sent as a whole, at the end
        kind: DeltaKind = "custom" if self._is_custom else "arguments"
        for piece in waiting:
            yield ItemDelta(index=self.index, kind=kind, text=piece)

    def _final_text(self) -> str:
        text = "".join(self._pieces)
        return extract_custom_input(text) if self._is_custom and not self._raw_input else text

    def _build_item(self, status: str, said: str) -> Item:
        item: Item = {"id": self._id, "call_id": self._call_id, "name": self.name, "status": status}
        if self._is_custom:
            return {**item, "type": "custom_tool_call", "input": said}
        return {**item, "type": "function_call", "arguments": said}


def is_json_object(arguments: str) -> bool:
    """Whether the arguments are a complete JSON object."""
    if not arguments.rstrip().endswith("}"):
        return False
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False


def extract_custom_input(arguments: str) -> str:
    """Extracts the input of a custom tool from the arguments of the function that represents it."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if isinstance(value, dict) and isinstance(value.get("input"), str):
        return str(value["input"])
    return value if isinstance(value, str) else arguments


MAX_CHAT_CALLS = 128
MAX_CHAT_CHARACTERS = 32 * 1024 * 1024  # of all text in one model call

INCOMPLETE_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}
FAILED_FINISH_REASONS = frozenset({"error", "insufficient_system_resource"})


class ChatStreamParser:
    """Parser: `feed` it the chunks of a stream, or a whole completion; then `end` reports how it ended."""

    def __init__(self, custom_tools: frozenset[str] = frozenset(), secret: str = ""):
        self._custom_tools = custom_tools
        self._secret = secret
        self._items = 0
        self._characters = 0
        self._speech: ChatMessageItem | ChatReasoningItem | None = None  # the item that is being streamed
        self._calls: list[ChatCallItem] = []
        self._by_index: dict[Any, ChatCallItem] = {}
        self._finish: str | None = None
        self._tokens = TokenUsage()
        self._model = ""
        self._service_tier: str | None = None

    def feed(self, chunk: dict[str, Any]) -> Iterator[TurnEvent]:
        """Raises UpstreamFailed if the chunk reports an error, or is too large."""
        if chunk.get("error"):
            raise self._parse_error(chunk["error"])
        self._note_metadata(chunk)
        choice = _first_dict(chunk.get("choices"))
        if choice.get("index") in (None, 0):
            said = choice.get("delta") or choice.get("message")
            yield from self._feed_delta(_as_dict(said), _as_list(_as_dict(choice.get("logprobs")).get("content")))
            self._finish = _as_text(choice.get("finish_reason")) or self._finish

    def end(self) -> Iterator[TurnEvent]:
        """Raises UpstreamFailed if the answer broke off instead of ending."""
        if self._finish is None:
            raise errors.UpstreamFailed("The upstream of this model broke off in the middle of its answer")
        if self._finish in FAILED_FINISH_REASONS:
            raise errors.UpstreamFailed(f"The upstream of this model failed: it stopped with {self._finish!r}")
        reason = INCOMPLETE_REASONS.get(self._finish)
        status: AnswerStatus = "incomplete" if reason else "completed"
        yield from self._end_text_item(status)
        for call in self._calls:
            yield from call.close(cut_off=reason is not None and call is self._calls[-1])
        yield AnswerFinished(
            status=status,
            reason=reason,
            tokens=self._tokens,
            model=self._model,
            service_tier=self._service_tier,
        )

    # -- start and end

    def _note_metadata(self, chunk: dict[str, Any]) -> None:
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self._tokens = parse_chat_usage(usage)
        self._model = _as_text(chunk.get("model"))[:200] or self._model
        self._service_tier = _as_text(chunk.get("service_tier"))[:50] or self._service_tier

    def _parse_error(self, error: Any) -> errors.UpstreamFailed:
        said = error if isinstance(error, dict) else {"message": error}
        code = said.get("code")
        return to_upstream_failure(
            said, status=code if isinstance(code, int) and code in PASSED_STATUSES else 502, secret=self._secret
        )

    def _count_characters(self, text: str) -> None:
        self._characters += len(text)
        if self._characters > MAX_CHAT_CHARACTERS:
            raise errors.UpstreamFailed(f"The upstream's answer is over {MAX_CHAT_CHARACTERS} characters")

    def _new_index(self) -> int:
        if self._items >= MAX_ITEMS:
            raise errors.UpstreamFailed(f"The upstream's answer has over {MAX_ITEMS} items")
        self._items += 1
        return self._items - 1

    # -- content

    def _feed_delta(self, delta: dict[str, Any], logprobs: list[Any]) -> Iterator[TurnEvent]:
        thought, content = _split_reasoning(delta)
        if thought:
            yield from self._add_text("reasoning", thought)
        if content:
            yield from self._add_text("text", content, logprobs)
        refusal = _as_text(delta.get("refusal"))
        if refusal:
            yield from self._add_text("refusal", refusal)
        legacy = delta.get("function_call")
        if isinstance(legacy, dict):
            yield from self._feed_call({"index": "legacy", "function": legacy})
        for call in _as_list(delta.get("tool_calls")):
            yield from self._feed_call(_as_dict(call))

    def _add_text(self, kind: DeltaKind, text: str, logprobs: list[Any] | None = None) -> Iterator[TurnEvent]:
        self._count_characters(text)
        wanted = ChatReasoningItem if kind == "reasoning" else ChatMessageItem
        if not isinstance(self._speech, wanted):
            yield from self._end_text_item("completed")
            yield from self._close_complete_calls()
            self._speech = wanted(self._new_index())
            yield ItemOpened(index=self._speech.index, item=self._speech.opening())
        yield self._speech.add(kind, text, logprobs or [])

    def _end_text_item(self, status: AnswerStatus) -> Iterator[TurnEvent]:
        if self._speech is not None:
            speech, self._speech = self._speech, None
            yield ItemClosed(index=speech.index, item=speech.whole(status if not self._calls else "completed"))

    # -- calls

    def _feed_call(self, delta: dict[str, Any]) -> Iterator[TurnEvent]:
        kind = "custom" if isinstance(delta.get("custom"), dict) else "function"
        function = _as_dict(delta.get(kind))
        name = _as_text(function.get("name"))
        call = self._find_call(delta, name)
        if call is None:
            yield from self._end_text_item("completed")
            yield from self._close_complete_calls()
            call = self._new_call(delta, custom=kind == "custom")
        call.set_name(name, is_custom=name in self._custom_tools)
        arguments = _encode_arguments(function.get("arguments" if kind == "function" else "input"))
        self._count_characters(arguments)
        yield from call.add(arguments)

    def _find_call(self, delta: dict[str, Any], name: str) -> ChatCallItem | None:
        """Returns the call that this delta continues; None if it begins a new call."""
        index, id = delta.get("index"), _as_text(delta.get("id"))
        if index is None:
            same_id = [call for call in self._calls if id and call.given_id == id]
            found = same_id[-1] if same_id else (self._calls[-1] if self._calls and not (id or name) else None)
        else:
            found = self._by_index.get(_index_key(index))
        return None if found is None or _starts_another_call(found, id, name) else found

    def _new_call(self, delta: dict[str, Any], *, custom: bool) -> ChatCallItem:
        if len(self._calls) >= MAX_CHAT_CALLS:
            raise errors.UpstreamFailed(f"The upstream's model made over {MAX_CHAT_CALLS} calls at once")
        call = ChatCallItem(self._new_index(), _as_text(delta.get("id"))[:200], raw_input=custom)
        self._calls.append(call)
        self._by_index[_index_key(delta.get("index"))] = call
        return call

    def _close_complete_calls(self) -> Iterator[TurnEvent]:
        """Closes calls with complete arguments: servers do not report that, but the next item implies it."""
        for call in self._calls:
            if call.is_complete:
                yield from call.close()


def _starts_another_call(call: ChatCallItem, id: str, name: str) -> bool:
    """Whether an id or a name begins another call, although the index is the same.

    Some servers give every call the index 0, and send each whole. Others (vLLM, where a call is forced) repeat
    the name and invent a new id with every piece: then the arguments so far are incomplete.
    """
    if id and id == call.given_id:
        return False
    if name and call.name and name != call.name:
        return True
    return bool(id or name) and call.is_complete


def parse_chat_usage(usage: dict[str, Any]) -> TokenUsage:
    read, wrote = _as_dict(usage.get("prompt_tokens_details")), _as_dict(usage.get("completion_tokens_details"))
    return TokenUsage(
        input=_as_count(usage.get("prompt_tokens")),
        cached=_as_count(read.get("cached_tokens")) or _as_count(usage.get("prompt_cache_hit_tokens")),
        cache_written=_as_count(read.get("cache_write_tokens")),
        output=_as_count(usage.get("completion_tokens")),
        reasoning=_as_count(wrote.get("reasoning_tokens")),
    )


def _split_reasoning(delta: dict[str, Any]) -> tuple[str, str]:
    thought = _as_text(delta.get("reasoning_content")) or _as_text(delta.get("reasoning"))
    content = delta.get("content")
    if not isinstance(content, list):
        return thought, _as_text(content)
    parts = [part for part in content if isinstance(part, dict)]  # Mistral's
    texts = "".join(_as_text(part.get("text")) for part in parts)
    thoughts = [_as_text(_as_dict(each).get("text")) for part in parts for each in _as_list(part.get("thinking"))]
    return thought + "".join(thoughts), texts


def _encode_arguments(value: Any) -> str:
    return msgspec.json.encode(value).decode() if isinstance(value, dict) else _as_text(value)


def _index_key(index: Any) -> Any:
    return index if isinstance(index, (int, str)) else None


def _first_dict(value: Any) -> dict[str, Any]:
    return _as_dict(value[0]) if isinstance(value, list) and value else {}


def _as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _as_count(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value < 1 << 53 else 0
