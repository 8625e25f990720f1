"""Ids of calls, each of which names one call. Some models count from 0 in every answer, or say the same id twice;
clients and upstreams that match outputs to calls then fail, or mix them up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from cloche.gateway.happenings import Closed, Happening, Opened
from cloche.gateway.items import Item

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
