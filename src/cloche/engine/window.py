"""How much was counted in the last while."""

from __future__ import annotations

SLOTS = 60


class Window:
    """The sum of what was counted in the last `seconds`, exact to a sixtieth of that. Adding takes a microsecond.

    Times are of the monotonic clock: a host whose clock is set neither gives nor takes anything.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._slot_seconds = seconds / SLOTS
        self._slots = [0.0] * SLOTS
        self._newest = 0  # the number of the newest slot, since the clock began
        self._sum = 0.0

    def add(self, amount: float, at: float, now: float) -> None:
        """Counts it as of `at`, which may be a while ago."""
        self._advance(now)
        slot = int(at / self._slot_seconds)
        if self._newest - SLOTS < slot <= self._newest:
            self._slots[slot % SLOTS] += amount
            self._sum += amount

    def count(self, now: float) -> None:
        """One more, now."""
        self._advance(now)
        self._slots[self._newest % SLOTS] += 1
        self._sum += 1

    def sum(self, now: float) -> float:
        self._advance(now)
        return max(self._sum, 0.0)

    def wait_seconds(self, most: float, now: float) -> float:
        """After how long the sum is below `most`, should nothing be added."""
        self._advance(now)
        left = self._sum
        if left < most:
            return 0.0
        oldest = self._newest - SLOTS + 1
        turn = oldest % SLOTS
        for age, amount in enumerate(self._slots[turn:] + self._slots[:turn]):
            left -= amount
            if left < most:
                return (oldest + age + SLOTS) * self._slot_seconds - now
        return self.seconds

    def absorb(self, other: Window, now: float) -> None:
        """Counts as well what the other one has counted."""
        other._advance(now)
        self._advance(now)
        self._slots = [mine + theirs for mine, theirs in zip(self._slots, other._slots, strict=True)]
        self._sum += other._sum

    def _advance(self, now: float) -> None:
        newest = int(now / self._slot_seconds)
        if newest == self._newest:
            return
        for slot in range(max(self._newest, newest - SLOTS) + 1, newest + 1):
            self._sum -= self._slots[slot % SLOTS]
            self._slots[slot % SLOTS] = 0.0
        if newest - self._newest >= SLOTS:
            self._sum = 0.0  # and no rounding error lives on
        self._newest = newest
