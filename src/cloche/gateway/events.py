"""Turn events: the events of a model's answer.

A model call (one request to an upstream) numbers its items by their place in the call; a turn (the whole
answer) by their place in the response.

    ItemOpened · ItemDelta* · [CodeStarted · ProgramEvent* ] · CitationAdded* · ItemClosed     item by item
    PassedThrough                                           an event that only the client understands
    AnswerFinished                                          the last event of a model call or turn

Failures are raised instead: `errors.UpstreamFailed` and the errors of the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

from cloche.events import AnyEvent
from cloche.gateway.items import Item
from cloche.model import Struct

DeltaKind = Literal["text", "refusal", "summary", "reasoning", "arguments", "code", "custom"]
"""`summary` and `reasoning` are the two texts of a reasoning item; `custom` is a custom tool's input."""

AnswerStatus = Literal["completed", "incomplete"]


class TokenUsage(Struct):
    """The tokens that a model read and wrote."""

    input: int = 0
    cached: int = 0
    cache_written: int = 0
    output: int = 0
    reasoning: int = 0

    def __add__(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(
            input=self.input + other.input,
            cached=self.cached + other.cached,
            cache_written=self.cache_written + other.cache_written,
            output=self.output + other.output,
            reasoning=self.reasoning + other.reasoning,
        )

    @property
    def total(self) -> int:
        return self.input + self.output


class ItemOpened(Struct):
    """An item begins. Its contents are still empty."""

    index: int
    item: Item


class ItemDelta(Struct):
    """More of an item's text. `part` is the number of its content or summary part."""

    index: int
    kind: DeltaKind
    text: str
    part: int = 0
    logprobs: list[Any] = []


class CodeStarted(Struct):
    """The code of a code call is complete, and starts to run now."""

    index: int
    code: str


class ProgramEvent(Struct):
    """An event of the program that a code call runs."""

    index: int
    event: AnyEvent


class CitationAdded(Struct):
    """An annotation of a message's text."""

    index: int
    annotation: Item
    part: int = 0


class ItemClosed(Struct):
    """An item is complete."""

    index: int
    item: Item


class PassedThrough(Struct):
    """An event of a Responses upstream about an item that only its client understands, as it came."""

    index: int
    event: dict[str, Any]


class AnswerFinished(Struct):
    """The end. `reason` is why it is incomplete: `max_output_tokens`, `content_filter`, .."""

    status: AnswerStatus = "completed"
    reason: str | None = None
    tokens: TokenUsage = TokenUsage()
    model: str = ""  # as the upstream calls it
    service_tier: str | None = None


TurnEvent = (
    ItemOpened | ItemDelta | CodeStarted | ProgramEvent | CitationAdded | ItemClosed | PassedThrough | AnswerFinished
)


# Unique ids of tool calls.
#
# Some models count from 0 in every answer, or send the same id twice; clients and upstreams that match outputs
# to calls then fail, or mix them up.

MAX_CALL_ID_LENGTH = 64  # OpenAI takes no more


class CallIds:
    """The call ids that are taken."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._seen = Counter(taken)

    def make_unique(self, id: str) -> str:
        """Returns the id itself if it is free, else a similar one: the same one for the same history."""
        id = (id or "call")[:MAX_CALL_ID_LENGTH]
        self._seen[id] += 1
        while self._seen[id] > 1:
            suffix = f"_{self._seen[id]}"
            id = id[: MAX_CALL_ID_LENGTH - len(suffix)] + suffix
            self._seen[id] += 1
        return id


class CallIdRewriter:
    """Gives the calls of one model call ids that are unique in the transcript."""

    def __init__(self, transcript: Iterable[Item]):
        self._ids = CallIds(each for item in transcript for each in _taken_call_ids(item))
        self._given: dict[int, str] = {}  # by the place of the call in its leg

    def of(self, turn_event: TurnEvent) -> TurnEvent:
        """Returns the same event with the unique id."""
        match turn_event:
            case ItemOpened(index=index, item={"call_id": str(id)}):
                self._given[index] = self._ids.make_unique(id)
                return ItemOpened(index=index, item={**turn_event.item, "call_id": self._given[index]})
            case ItemClosed(index=index) if index in self._given:
                return ItemClosed(index=index, item={**turn_event.item, "call_id": self._given[index]})
            case _:
                return turn_event


def _taken_call_ids(item: Item) -> list[str]:
    """Returns the item's call id. An output has the id of its call, which counts once."""
    known = item.get("call_id")
    return [known] if isinstance(known, str) and not str(item.get("type")).endswith("_output") else []
