"""What was learned of models: of those that were asked for most recently, as clients choose the names."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_MODELS = 1000


class Recent(Generic[T]):
    """Keeps one thing of each model, and forgets the model that was not asked for longest."""

    def __init__(self, most: int = MAX_MODELS):
        self._most = most
        self._known: OrderedDict[str, T] = OrderedDict()

    def of(self, model: str) -> T | None:
        if model in self._known:
            self._known.move_to_end(model)
        return self._known.get(model)

    def keep(self, model: str, what: T) -> None:
        self._known[model] = what
        self._known.move_to_end(model)
        if len(self._known) > self._most:
            self._known.popitem(last=False)
