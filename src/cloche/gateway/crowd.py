"""How many turns are made at once for one owner: nobody's take the connections and the sandboxes of all others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from cloche import errors


class TooManyTurns(errors.InvalidRequest):
    """An owner has as many turns as one can have."""

    status = 429
    param = None
    reason = "rate_limit_exceeded"


class Crowd:
    def __init__(self, most_of_owner: int):
        self._most_of_owner = most_of_owner
        self._turns: Counter[str] = Counter()

    @contextmanager
    def enter(self, owner: str) -> Iterator[None]:
        """One more turn, for as long as the block lasts. Raises TooManyTurns."""
        if self._turns[owner] >= self._most_of_owner:
            raise TooManyTurns(
                f"Too many requests at once: {self._most_of_owner} answers are being made for this key's owner, and no "
                "more can be. Wait for one to end, and try again."
            )
        self._turns[owner] += 1
        try:
            yield
        finally:
            self._turns[owner] -= 1
            if not self._turns[owner]:
                del self._turns[owner]
