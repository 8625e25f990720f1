"""The items of a chat's answer, while they come."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from cloche.gateway.happenings import Closed, Delta, DeltaKind, Happening, Opened
from cloche.gateway.items import Item, new_item_id

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
