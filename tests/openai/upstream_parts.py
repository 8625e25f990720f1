"""What legs of a scripted model are made of. Documented in `upstream.py`, from which tests import them."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

PIECE = 7  # characters

_numbers = itertools.count(1)


def new_id(prefix: str) -> str:
    """An id of the upstream's own."""
    return f"{prefix}up_{next(_numbers)}"


Chunks = int | list[str] | None


@dataclass
class Text:
    text: str
    chunks: Chunks = None
    annotations: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Code:
    code: str
    call_id: str | None = None
    raw_arguments: str | None = None
    chunks: Chunks = None

    @property
    def arguments(self) -> str:
        return json.dumps({"code": self.code}) if self.raw_arguments is None else self.raw_arguments


@dataclass
class Function:
    name: str
    given: dict[str, Any] | str
    call_id: str | None = None
    chunks: Chunks = None

    @property
    def arguments(self) -> str:
        return self.given if isinstance(self.given, str) else json.dumps(self.given)


@dataclass
class Custom:
    name: str
    input: str
    call_id: str | None = None
    chunks: Chunks = None


@dataclass
class Reasoning:
    text: str = ""
    summary: str = ""
    encrypted: str = ""
    key: str = "reasoning_content"
    chunks: Chunks = None


@dataclass
class Refusal:
    text: str
    chunks: Chunks = None


class Interleaved:
    def __init__(self, *parts: Any):
        self.parts = parts


@dataclass
class UnknownItem:
    item: dict[str, Any]
    events: list[str] = field(default_factory=list)


@dataclass
class ChatDelta:
    delta: dict[str, Any]


@dataclass
class Raw:
    text: str


@dataclass
class Usage:
    input: int = 10
    output: int = 5
    cached: int = 0
    reasoning: int = 0


@dataclass
class WaitFor:
    event: threading.Event


@dataclass
class Reached:
    event: threading.Event


@dataclass
class Slow:
    seconds: float


class Hang:
    pass


class BreakOff:
    pass


@dataclass
class Garbage:
    text: str = "<html>502 Bad Gateway</html>"


@dataclass
class StreamError:
    message: str
    type: str = "server_error"
    code: str | None = None

    @property
    def body(self) -> dict[str, Any]:
        return {"message": self.message, "type": self.type, "code": self.code, "param": None}


class IncompleteLength:
    pass


class ContentFilter:
    pass


class NoFinish:
    pass


@dataclass
class HttpError:
    status: int
    body: dict[str, Any] | str = ""
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return self.body if isinstance(self.body, str) else json.dumps(self.body)


ACTIONS = (WaitFor, Reached, Slow, Hang, BreakOff)
"""What the server does itself, between frames."""


def usage_of(leg: list[Any]) -> Usage:
    return next((part for part in leg if isinstance(part, Usage)), Usage())


def has(leg: list[Any], kind: type) -> bool:
    return any(isinstance(part, kind) for part in leg)


def flat(leg: list[Any]) -> Iterator[Any]:
    for part in leg:
        yield from part.parts if isinstance(part, Interleaved) else [part]


def pieces(text: str, chunks: Chunks = None) -> list[str]:
    if isinstance(chunks, list):
        return chunks
    size = PIECE if chunks is None else max(-(-len(text) // chunks), 1)
    return [text[at : at + size] for at in range(0, len(text), size)]


def alternating(streams: list[Iterator[Any]]) -> Iterator[Any]:
    """One of each in turn, until all have ended."""
    missing = object()
    for row in itertools.zip_longest(*streams, fillvalue=missing):
        yield from (each for each in row if each is not missing)


def code_function(names: list[str]) -> str:
    """The function that a request offers for code."""
    if "python" in names and not any(name.startswith("python") and name != "python" for name in names):
        return "python"
    return next((name for name in reversed(names) if name.startswith("python")), "python")
