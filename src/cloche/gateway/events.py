"""What happens while a model answers. A leg (one call of an upstream) says these of its items, by their place in the
leg; a turn (the whole answer) says them of its own, by their place in the response.

    Opened · Delta* · [Interpreting · Printed* ] · Cited* · Closed       one item after the other
    Passed                                                               what only a client understands
    Finished                                                             the last word of a leg or turn

Whoever fails raises instead: `errors.UpstreamFailed` and whatever the engine raises.
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

Status = Literal["completed", "incomplete"]


class Tokens(Struct):
    """What a model read and wrote."""

    input: int = 0
    cached: int = 0
    cache_written: int = 0
    output: int = 0
    reasoning: int = 0

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(
            input=self.input + other.input,
            cached=self.cached + other.cached,
            cache_written=self.cache_written + other.cache_written,
            output=self.output + other.output,
            reasoning=self.reasoning + other.reasoning,
        )

    @property
    def total(self) -> int:
        return self.input + self.output


class Opened(Struct):
    """An item begins. What it will have is still empty."""

    index: int
    item: Item


class Delta(Struct):
    """More of an item's text. `part` is the number of its content or summary part."""

    index: int
    kind: DeltaKind
    text: str
    part: int = 0
    logprobs: list[Any] = []


class Interpreting(Struct):
    """A code call's code is whole, and starts to run now."""

    index: int
    code: str


class Printed(Struct):
    """An event of the program that a code call runs."""

    index: int
    event: AnyEvent


class Cited(Struct):
    """An annotation of a message's text."""

    index: int
    annotation: Item
    part: int = 0


class Closed(Struct):
    """An item is whole."""

    index: int
    item: Item


class Passed(Struct):
    """An event of a Responses upstream about an item that only its client understands, as it came."""

    index: int
    event: dict[str, Any]


class Finished(Struct):
    """The end. `reason` says why it is incomplete: `max_output_tokens`, `content_filter`, .."""

    status: Status = "completed"
    reason: str | None = None
    tokens: Tokens = Tokens()
    model: str = ""  # as the upstream calls it
    service_tier: str | None = None


Happening = Opened | Delta | Interpreting | Printed | Cited | Closed | Passed | Finished


# Ids of calls, each of which names one call. Some models count from 0 in every answer, or say the same id twice;
# clients and upstreams that match outputs to calls then fail, or mix them up.

MAX_LENGTH = 64  # OpenAI takes no more


class CallIds:
    """Those that are taken."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._seen = Counter(taken)

    def unique(self, id: str) -> str:
        """The id itself where it can be, else one like it: the same at every call after the same history."""
        id = (id or "call")[:MAX_LENGTH]
        self._seen[id] += 1
        while self._seen[id] > 1:
            suffix = f"_{self._seen[id]}"
            id = id[: MAX_LENGTH - len(suffix)] + suffix
            self._seen[id] += 1
        return id


class OwnCallIds:
    """Gives the calls of a leg ids that nothing else in the transcript has."""

    def __init__(self, transcript: Iterable[Item]):
        self._ids = CallIds(each for item in transcript for each in _call_ids(item))
        self._given: dict[int, str] = {}  # by the place of the call in its leg

    def of(self, happening: Happening) -> Happening:
        """The same, with that id."""
        match happening:
            case Opened(index=index, item={"call_id": str(id)}):
                self._given[index] = self._ids.unique(id)
                return Opened(index=index, item={**happening.item, "call_id": self._given[index]})
            case Closed(index=index) if index in self._given:
                return Closed(index=index, item={**happening.item, "call_id": self._given[index]})
            case _:
                return happening


def _call_ids(item: Item) -> list[str]:
    """An output has the id of its call, which counts once."""
    known = item.get("call_id")
    return [known] if isinstance(known, str) and not str(item.get("type")).endswith("_output") else []
