"""What a Chat Completions upstream answers, chunk by chunk, as happenings. Pure.

    content, refusal                    a message              reasoning_content, reasoning       a reasoning item
    tool_calls, function_call           a function_call each, or a custom_tool_call

Servers differ: ids, indexes and types may be missing, arguments may come whole or as an object, all calls may have the
index 0. All of it is read; of what makes no sense, what can be used is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from cloche import errors
from cloche.gateway.events import Closed, Delta, DeltaKind, Finished, Happening, Opened, Status, Tokens
from cloche.gateway.items import Item, new_item_id
from cloche.gateway.upstream import MAX_ITEMS
from cloche.gateway.upstream.http import SAME, failure_of

# The items of a chat's answer, while they come.

MAX_LOOKS = 100


class Speech:
    """A message: text, a refusal, or both."""

    def __init__(self, index: int):
        self.index = index
        self._id = new_item_id("message")
        self._parts: dict[DeltaKind, list[str]] = {}  # in the order in which they began
        self._logprobs: list[Any] = []

    def opening(self) -> Item:
        return {"id": self._id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}

    def add(self, kind: DeltaKind, text: str, logprobs: list[Any]) -> Delta:
        self._parts.setdefault(kind, []).append(text)
        self._logprobs += logprobs
        return Delta(index=self.index, kind=kind, text=text, part=list(self._parts).index(kind), logprobs=logprobs)

    def whole(self, status: str) -> Item:
        return {**self.opening(), "status": status, "content": [self._part(kind) for kind in self._parts]}

    def _part(self, kind: DeltaKind) -> Item:
        text = "".join(self._parts[kind])
        if kind == "refusal":
            return {"type": "refusal", "refusal": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}


class Reasoning:
    """What a model thinks, where its server shows it."""

    def __init__(self, index: int):
        self.index = index
        self._id = new_item_id("reasoning")
        self._pieces: list[str] = []

    def opening(self) -> Item:
        return {"id": self._id, "type": "reasoning", "summary": [], "status": "in_progress"}

    def add(self, kind: DeltaKind, text: str, logprobs: list[Any]) -> Delta:
        self._pieces.append(text)
        return Delta(index=self.index, kind=kind, text=text)

    def whole(self, status: str) -> Item:
        content = [{"type": "reasoning_text", "text": "".join(self._pieces)}]
        return {**self.opening(), "status": status, "content": content}


class Call:
    """A call of a function, or of a custom tool that the model knows as one. It opens when its name is known."""

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

    def name_it(self, name: str, *, is_custom: bool) -> None:
        if name and not self.name:
            self.name = name
            self._is_custom |= is_custom

    def add(self, arguments: str) -> Iterator[Happening]:
        if self._closed:
            return
        if arguments:
            self._pieces.append(arguments)
            self._waiting.append(arguments)
        if self.name:
            yield from self._open()
            yield from self._pass_on()

    @property
    def is_whole(self) -> bool:
        """Whether nothing can follow that has a meaning. It is not asked for ever: that takes as long as they are."""
        self._looks += 1
        return self._closed or (self._looks <= MAX_LOOKS and self._is_object)

    def close(self, *, cut_off: bool = False) -> Iterator[Happening]:
        """`cut_off` is whether the model could not say all that it meant. What has no name is dropped."""
        if self._closed or not self.name:
            return
        yield from self._open()
        yield from self._pass_on()
        self._closed = True
        status = "incomplete" if cut_off and not self._is_object else "completed"
        yield Closed(index=self.index, item=self._item(status, self._said()))

    @property
    def _is_object(self) -> bool:
        return is_object("".join(self._pieces))

    def _open(self) -> Iterator[Happening]:
        if not self._opened:
            self._opened = True
            self._id = new_item_id("custom_tool_call" if self._is_custom else "function_call")
            yield Opened(index=self.index, item=self._item("in_progress", ""))

    def _pass_on(self) -> Iterator[Happening]:
        waiting, self._waiting = self._waiting, []
        if self._is_custom and not self._raw_input:
            return  # its input is inside of JSON; it is told whole, at the end
        kind: DeltaKind = "custom" if self._is_custom else "arguments"
        for piece in waiting:
            yield Delta(index=self.index, kind=kind, text=piece)

    def _said(self) -> str:
        text = "".join(self._pieces)
        return input_of(text) if self._is_custom and not self._raw_input else text

    def _item(self, status: str, said: str) -> Item:
        item: Item = {"id": self._id, "call_id": self._call_id, "name": self.name, "status": status}
        if self._is_custom:
            return {**item, "type": "custom_tool_call", "input": said}
        return {**item, "type": "function_call", "arguments": said}


def is_object(arguments: str) -> bool:
    """Whether they are a whole JSON object."""
    if not arguments.rstrip().endswith("}"):
        return False
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False


def input_of(arguments: str) -> str:
    """The input of a custom tool, out of the arguments of the function that stands for it."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if isinstance(value, dict) and isinstance(value.get("input"), str):
        return str(value["input"])
    return value if isinstance(value, str) else arguments


MAX_CALLS = 128
MAX_CHARACTERS = 32 * 1024 * 1024  # of everything that is said in one leg

REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}
FAILURES = frozenset({"error", "insufficient_system_resource"})


class ChatAnswer:
    """Feed it the chunks of a stream, or a whole completion; then `end` says how it ended."""

    def __init__(self, custom_tools: frozenset[str] = frozenset(), secret: str = ""):
        self._custom_tools = custom_tools
        self._secret = secret
        self._items = 0
        self._characters = 0
        self._speech: Speech | Reasoning | None = None  # the one that is being said
        self._calls: list[Call] = []
        self._by_index: dict[Any, Call] = {}
        self._finish: str | None = None
        self._tokens = Tokens()
        self._model = ""
        self._service_tier: str | None = None

    def feed(self, chunk: dict[str, Any]) -> Iterator[Happening]:
        """Raises UpstreamFailed if it tells of an error, or is too much."""
        if chunk.get("error"):
            raise self._error(chunk["error"])
        self._note(chunk)
        choice = _first(chunk.get("choices"))
        if choice.get("index") in (None, 0):
            said = choice.get("delta") or choice.get("message")
            yield from self._said(_dict(said), _list(_dict(choice.get("logprobs")).get("content")))
            self._finish = _text(choice.get("finish_reason")) or self._finish

    def end(self) -> Iterator[Happening]:
        """Raises UpstreamFailed if the answer did not end, but break off."""
        if self._finish is None:
            raise errors.UpstreamFailed("The upstream of this model broke off in the middle of its answer")
        if self._finish in FAILURES:
            raise errors.UpstreamFailed(f"The upstream of this model failed: it stopped with {self._finish!r}")
        reason = REASONS.get(self._finish)
        status: Status = "incomplete" if reason else "completed"
        yield from self._end_speech(status)
        for call in self._calls:
            yield from call.close(cut_off=reason is not None and call is self._calls[-1])
        yield Finished(
            status=status,
            reason=reason,
            tokens=self._tokens,
            model=self._model,
            service_tier=self._service_tier,
        )

    # -- around what is said

    def _note(self, chunk: dict[str, Any]) -> None:
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self._tokens = tokens_of(usage)
        self._model = _text(chunk.get("model"))[:200] or self._model
        self._service_tier = _text(chunk.get("service_tier"))[:50] or self._service_tier

    def _error(self, error: Any) -> errors.UpstreamFailed:
        said = error if isinstance(error, dict) else {"message": error}
        code = said.get("code")
        return failure_of(said, status=code if isinstance(code, int) and code in SAME else 502, secret=self._secret)

    def _count(self, text: str) -> None:
        self._characters += len(text)
        if self._characters > MAX_CHARACTERS:
            raise errors.UpstreamFailed(f"The upstream's answer is over {MAX_CHARACTERS} characters")

    def _new_index(self) -> int:
        if self._items >= MAX_ITEMS:
            raise errors.UpstreamFailed(f"The upstream's answer has over {MAX_ITEMS} items")
        self._items += 1
        return self._items - 1

    # -- what is said

    def _said(self, delta: dict[str, Any], logprobs: list[Any]) -> Iterator[Happening]:
        thought, content = _thought_and_content(delta)
        if thought:
            yield from self._more("reasoning", thought)
        if content:
            yield from self._more("text", content, logprobs)
        refusal = _text(delta.get("refusal"))
        if refusal:
            yield from self._more("refusal", refusal)
        legacy = delta.get("function_call")
        if isinstance(legacy, dict):
            yield from self._call({"index": "legacy", "function": legacy})
        for call in _list(delta.get("tool_calls")):
            yield from self._call(_dict(call))

    def _more(self, kind: DeltaKind, text: str, logprobs: list[Any] | None = None) -> Iterator[Happening]:
        self._count(text)
        wanted = Reasoning if kind == "reasoning" else Speech
        if not isinstance(self._speech, wanted):
            yield from self._end_speech("completed")
            yield from self._end_whole_calls()
            self._speech = wanted(self._new_index())
            yield Opened(index=self._speech.index, item=self._speech.opening())
        yield self._speech.add(kind, text, logprobs or [])

    def _end_speech(self, status: Status) -> Iterator[Happening]:
        if self._speech is not None:
            speech, self._speech = self._speech, None
            yield Closed(index=speech.index, item=speech.whole(status if not self._calls else "completed"))

    # -- calls

    def _call(self, delta: dict[str, Any]) -> Iterator[Happening]:
        kind = "custom" if isinstance(delta.get("custom"), dict) else "function"
        function = _dict(delta.get(kind))
        name = _text(function.get("name"))
        call = self._known(delta, name)
        if call is None:
            yield from self._end_speech("completed")
            yield from self._end_whole_calls()
            call = self._new_call(delta, custom=kind == "custom")
        call.name_it(name, is_custom=name in self._custom_tools)
        arguments = _arguments(function.get("arguments" if kind == "function" else "input"))
        self._count(arguments)
        yield from call.add(arguments)

    def _known(self, delta: dict[str, Any], name: str) -> Call | None:
        """The call that this is more of; None if a new one begins."""
        index, id = delta.get("index"), _text(delta.get("id"))
        if index is None:
            same_id = [call for call in self._calls if id and call.given_id == id]
            found = same_id[-1] if same_id else (self._calls[-1] if self._calls and not (id or name) else None)
        else:
            found = self._by_index.get(_key(index))
        return None if found is None or _is_another(found, id, name) else found

    def _new_call(self, delta: dict[str, Any], *, custom: bool) -> Call:
        if len(self._calls) >= MAX_CALLS:
            raise errors.UpstreamFailed(f"The upstream's model made over {MAX_CALLS} calls at once")
        call = Call(self._new_index(), _text(delta.get("id"))[:200], raw_input=custom)
        self._calls.append(call)
        self._by_index[_key(delta.get("index"))] = call
        return call

    def _end_whole_calls(self) -> Iterator[Happening]:
        """Closes those whose arguments are whole: nothing says so, but what follows lets it be seen."""
        for call in self._calls:
            if call.is_whole:
                yield from call.close()


def _is_another(call: Call, id: str, name: str) -> bool:
    """Whether an id or a name begins another call, although the place is the same.

    Some servers give every call the index 0, and send each whole. Others (vLLM, where a call is forced) repeat the
    name and make up a new id with every piece: then what came so far is not whole.
    """
    if id and id == call.given_id:
        return False
    if name and call.name and name != call.name:
        return True
    return bool(id or name) and call.is_whole


def tokens_of(usage: dict[str, Any]) -> Tokens:
    read, wrote = _dict(usage.get("prompt_tokens_details")), _dict(usage.get("completion_tokens_details"))
    return Tokens(
        input=_count_of(usage.get("prompt_tokens")),
        cached=_count_of(read.get("cached_tokens")) or _count_of(usage.get("prompt_cache_hit_tokens")),
        cache_written=_count_of(read.get("cache_write_tokens")),
        output=_count_of(usage.get("completion_tokens")),
        reasoning=_count_of(wrote.get("reasoning_tokens")),
    )


def _thought_and_content(delta: dict[str, Any]) -> tuple[str, str]:
    thought = _text(delta.get("reasoning_content")) or _text(delta.get("reasoning"))
    content = delta.get("content")
    if not isinstance(content, list):
        return thought, _text(content)
    parts = [part for part in content if isinstance(part, dict)]  # Mistral's
    texts = "".join(_text(part.get("text")) for part in parts)
    thoughts = [_text(_dict(each).get("text")) for part in parts for each in _list(part.get("thinking"))]
    return thought + "".join(thoughts), texts


def _arguments(value: Any) -> str:
    return msgspec.json.encode(value).decode() if isinstance(value, dict) else _text(value)


def _key(index: Any) -> Any:
    return index if isinstance(index, (int, str)) else None


def _first(value: Any) -> dict[str, Any]:
    return _dict(value[0]) if isinstance(value, list) and value else {}


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _count_of(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value < 1 << 53 else 0
