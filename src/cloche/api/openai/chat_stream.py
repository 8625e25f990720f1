"""A chat completion, whole and in chunks, from the events of a turn.

All text of the assistant in a turn is one message: before its code, between, and after. The results of code
are in extra keys beside it, which OpenAI's clients keep: `code_interpreter_calls` and
`container_file_citations`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

from cloche import errors
from cloche.api.openai.chat_request import ChatRequest
from cloche.api.openai.context import status_and_body
from cloche.gateway.events import (
    AnswerFinished,
    CitationAdded,
    ItemClosed,
    ItemDelta,
    ItemOpened,
    TokenUsage,
    TurnEvent,
)
from cloche.gateway.items import Item
from cloche.store.gateway import chat_call_id, new_turn_key

Chunk = dict[str, Any]

BETWEEN_MESSAGES = "\n\n"
_CALL_FIELDS = {"function_call": ("function", "arguments"), "custom_tool_call": ("custom", "input")}
_FINISH_REASONS = {"max_output_tokens": "length", "content_filter": "content_filter"}


class ChatCompletion:
    """Takes the events of a turn and returns chunks. At the end, `whole` is the completion."""

    def __init__(self, request: ChatRequest, id: str | None = None):
        self.id = id or "chatcmpl-" + secrets.token_hex(16)
        self.turn_key = new_turn_key()
        self.calls: dict[str, str] = {}  # ids that the client sees -> the upstream's
        self.container: str | None = None  # the last that code ran in
        self._wanted = request
        self._created_at = int(time.time())
        self._said: dict[str, list[str]] = {"content": [], "refusal": [], "reasoning_content": []}
        self._length = 0  # of the content
        self._tool_calls: list[_ChatToolCall] = []
        self._code_calls: list[Item] = []
        self._annotations: list[Item] = []
        self._file_citations: list[Item] = []
        self._logprobs: dict[str, list[Any]] = {}
        self._open: dict[int, _OpenChatItem] = {}
        self._finished = AnswerFinished()
        # One JSON value is wanted, and what is said before code is none: a message is held until it is the last.
        self._holds = request.wants_json and request.code is not None
        self._held: list[str] = []

    def begin(self) -> list[Chunk]:
        return [self._new_chunk({"role": "assistant", "content": "", "refusal": None})]

    def feed(self, turn_event: TurnEvent) -> list[Chunk]:
        match turn_event:
            case ItemOpened():
                return list(self._open_item(turn_event))
            case ItemDelta():
                return list(self._open[turn_event.index].delta(turn_event))
            case CitationAdded():
                self._open[turn_event.index].add_citation(turn_event)
            case ItemClosed():
                return list(self._close_item(turn_event))
            case AnswerFinished():
                self._finished = turn_event
                return list(self._end_chunks())
        return []

    def fail_with(self, error: errors.ClocheError) -> list[Chunk]:
        """Ends the stream with an error."""
        return [error_chunk(error)]

    @property
    def whole(self) -> dict[str, Any]:
        choice = {
            "index": 0,
            "message": self._build_message(),
            "logprobs": self._all_logprobs(),
            "finish_reason": self._finish_reason,
        }
        body = {"id": self.id, "object": "chat.completion", "created": self._created_at, "model": self._wanted.model}
        return {**body, "choices": [choice], "usage": chat_usage(self._finished.tokens), **self._service_tier()}

    # -- what happens

    def _open_item(self, turn_event: ItemOpened) -> Iterator[Chunk]:
        item = turn_event.item
        if item["type"] == "code_interpreter_call":
            self.container = item["container_id"]
            yield from self._release_held("reasoning_content")
        elif item["type"] in _CALL_FIELDS:
            yield from self._release_held("content")
            yield self._open_call(item)
        number = len(self._tool_calls) - 1
        self._open[turn_event.index] = _OpenChatItem(self, item, call=number if item["type"] in _CALL_FIELDS else None)

    def _open_call(self, item: Item) -> Chunk:
        number = len(self._tool_calls)
        call = _ChatToolCall(chat_call_id(self.turn_key, number), item)
        self.calls[call.id] = item["call_id"]
        self._tool_calls.append(call)
        return self._new_chunk({"tool_calls": [{"index": number, **call.whole()}]})

    def _close_item(self, turn_event: ItemClosed) -> Iterator[Chunk]:
        item, opened = turn_event.item, self._open.pop(turn_event.index)
        yield from opened.rest(item)
        if item["type"] == "code_interpreter_call":
            known = ("id", "status", "code", "container_id", "outputs")
            self._code_calls.append({name: item.get(name) for name in known})

    def _end_chunks(self) -> Iterator[Chunk]:
        yield from self._release_held("content")
        extras = self._extra_fields()
        if extras:
            yield self._new_chunk(extras)
        yield {**self._new_chunk({}, finish_reason=self._finish_reason), **self._service_tier()}
        if self._wanted.include_usage:
            yield {**self._new_chunk({}), "choices": [], "usage": chat_usage(self._finished.tokens)}

    # -- what an open item says

    def say(self, key: str, text: str, logprobs: list[Any]) -> Iterator[Chunk]:
        """Adds to the message's content, refusal or reasoning."""
        if not text and not logprobs:
            return
        if key == "content":
            self._length += len(text)
        if key in ("content", "refusal") and logprobs:
            self._logprobs.setdefault(key, []).extend(map(_chat_logprob, logprobs))
        if key == "content" and self._holds:
            self._held.append(text)
            return
        self._said[key].append(text)
        yield self._new_chunk(
            {key: text}, logprobs={key: [_chat_logprob(each) for each in logprobs]} if logprobs else None
        )

    def say_call(self, number: int, text: str) -> Iterator[Chunk]:
        """Adds to a call's arguments."""
        self._tool_calls[number].pieces.append(text)
        yield self._new_chunk({"tool_calls": [{"index": number, **self._tool_calls[number].piece(text)}]})

    def separator_before(self, key: str) -> str:
        """The separator between this text and the text before."""
        before = self._said[key] or (self._held if key == "content" else [])
        return BETWEEN_MESSAGES if before and not before[-1].endswith("\n") else ""

    @property
    def length(self) -> int:
        return self._length

    def cite(self, annotation: Item, offset: int) -> None:
        places = ("start_index", "end_index")
        moved = {
            name: value + offset if name in places and isinstance(value, int) else value
            for name, value in annotation.items()
        }
        if moved.get("type") == "url_citation":
            del moved["type"]
            self._annotations.append({"type": "url_citation", "url_citation": moved})
        elif moved.get("type") == "container_file_citation":
            self._file_citations.append(moved)

    # -- inside

    def _release_held(self, key: str) -> Iterator[Chunk]:
        """Emits held text, as the content or as reasoning."""
        text, self._held = "".join(self._held), []
        if text and key != "content":
            self._length -= len(text)
            text = self.separator_before(key) + text
        if text:
            self._said[key].append(text)
            yield self._new_chunk({key: text})

    @property
    def _finish_reason(self) -> str:
        if self._finished.status == "incomplete":
            return _FINISH_REASONS.get(self._finished.reason or "", "length")
        return "tool_calls" if self._tool_calls else "stop"

    def _build_message(self) -> dict[str, Any]:
        content, refusal, reasoning = ("".join(self._said[key]) for key in ("content", "refusal", "reasoning_content"))
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content or (None if self._tool_calls or refusal else ""),
            "refusal": refusal or None,
            "annotations": [],
        }
        if reasoning:
            message["reasoning_content"] = reasoning
        if self._tool_calls:
            message["tool_calls"] = [call.whole() for call in self._tool_calls]
        return {**message, **self._extra_fields()}

    def _extra_fields(self) -> dict[str, Any]:
        extras = {
            "annotations": self._annotations,
            "code_interpreter_calls": self._code_calls,
            "container_file_citations": self._file_citations,
        }
        return {name: value for name, value in extras.items() if value}

    def _all_logprobs(self) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        return {"content": self._logprobs.get("content"), "refusal": self._logprobs.get("refusal")}

    def _service_tier(self) -> dict[str, Any]:
        tier = self._finished.service_tier
        return {"service_tier": tier} if tier else {}

    def _new_chunk(
        self, delta: Item, *, finish_reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> Chunk:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": {"content": None, "refusal": None, **logprobs} if logprobs else None,
            "finish_reason": finish_reason,
        }
        chunk = {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self._created_at,
            "model": self._wanted.model,
            "choices": [choice],
        }
        return {**chunk, "usage": None} if self._wanted.include_usage else chunk


class _ChatToolCall:
    """A call of the client's tools. Its arguments arrive in many pieces."""

    def __init__(self, id: str, item: Item):
        self.id = id
        self.pieces: list[str] = []
        self._name = item["name"]
        self._kind, self._field = _CALL_FIELDS[item["type"]]

    def whole(self) -> Item:
        about = {"name": self._name, self._field: "".join(self.pieces)}
        return {"id": self.id, "type": self._kind, self._kind: about}

    def piece(self, text: str) -> Item:
        return {self._kind: {self._field: text}}


class _OpenChatItem:
    """An incomplete item, and the parts of it that were sent."""

    def __init__(self, completion: ChatCompletion, item: Item, call: int | None):
        self._completion = completion
        self._item = item
        self._call = call  # the number of a tool call
        self._texts: dict[tuple[str, int], list[str]] = {}
        self._offsets: dict[int, int] = {}  # where the parts of a message begin in the content

    def delta(self, delta: ItemDelta) -> Iterator[Chunk]:
        if delta.kind in ("text", "refusal", "summary", "reasoning"):
            yield from self._say_text(delta.kind, delta.part, delta.text, delta.logprobs)
        elif delta.kind in ("arguments", "custom") and self._call is not None:
            self._texts.setdefault(("call", 0), []).append(delta.text)
            yield from self._completion.say_call(self._call, delta.text)

    def add_citation(self, turn_event: CitationAdded) -> None:
        self._completion.cite(turn_event.annotation, self._part_offset(turn_event.part))

    def rest(self, item: Item) -> Iterator[Chunk]:
        """Sends the text that no delta had: some upstreams send items whole."""
        if self._call is not None:
            text = item.get(_CALL_FIELDS[item["type"]][1])
            yield from self._say_rest("call", 0, text, lambda rest: self._completion.say_call(self._call or 0, rest))
        for part, each in enumerate(item.get("summary") or []):
            yield from self._say_rest("summary", part, each.get("text"))
        for part, each in enumerate(item.get("content") or []):
            match each.get("type"):
                case "output_text":
                    yield from self._say_rest("text", part, each.get("text"), logprobs=each.get("logprobs"))
                case "refusal":
                    yield from self._say_rest("refusal", part, each.get("refusal"))
                case "reasoning_text":
                    yield from self._say_rest("reasoning", part, each.get("text"))

    def _say_rest(
        self,
        kind: str,
        part: int,
        whole: Any,
        say: Callable[[str], Iterator[Chunk]] | None = None,
        logprobs: list[Any] | None = None,
    ) -> Iterator[Chunk]:
        said = "".join(self._texts.get((kind, part), []))
        if isinstance(whole, str) and whole != said and whole.startswith(said):
            rest = whole[len(said) :]
            yield from say(rest) if say else self._say_text(kind, part, rest, [] if said else logprobs or [])

    def _say_text(self, kind: str, part: int, text: str, logprobs: list[Any]) -> Iterator[Chunk]:
        key = {"text": "content", "refusal": "refusal"}.get(kind, "reasoning_content")
        if (kind, part) not in self._texts:
            self._texts[kind, part] = []
            # Parts of one message are one text; another message, or another thought, is something new.
            separator = self._completion.separator_before(key) if key == "reasoning_content" or part == 0 else ""
            if separator:
                yield from self._completion.say(key, separator, [])
            if key == "content":
                self._part_offset(part)
        self._texts[kind, part].append(text)
        yield from self._completion.say(key, text, logprobs)

    def _part_offset(self, part: int) -> int:
        return self._offsets.setdefault(part, self._completion.length)


def error_chunk(error: errors.ClocheError) -> Chunk:
    """The last chunk of a stream that failed."""
    return {"error": status_and_body(error)[1]}


def chat_usage(tokens: TokenUsage) -> dict[str, Any]:
    return {
        "prompt_tokens": tokens.input,
        "completion_tokens": tokens.output,
        "total_tokens": tokens.total,
        "prompt_tokens_details": {
            "cached_tokens": tokens.cached,
            "cache_write_tokens": tokens.cache_written,
            "audio_tokens": 0,
        },
        "completion_tokens_details": {
            "reasoning_tokens": tokens.reasoning,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def _chat_logprob(logprob: Any) -> Any:
    """A token's probability: Responses may leave out keys that Chat has."""
    if not isinstance(logprob, dict):
        return logprob
    top = [{"bytes": None, **each} for each in logprob.get("top_logprobs") or () if isinstance(each, dict)]
    return {"bytes": None, **logprob, "top_logprobs": top}
