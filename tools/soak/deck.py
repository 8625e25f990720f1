"""Chance that leaves nothing out."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


class Deck(Generic[T]):
    """Cards that are shuffled and dealt to the last before they are shuffled again: none is left out for long."""

    def __init__(self, weights: Mapping[T, int], dice: random.Random):
        self.kinds = list(weights)
        self._cards = [kind for kind, weight in weights.items() for _ in range(weight)]
        self._dice = dice
        self._left: list[T] = []

    def draw(self) -> T:
        if not self._left:
            self._left = self._dice.sample(self._cards, len(self._cards))
        return self._left.pop()
