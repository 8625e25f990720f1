"""How much this host takes on at once: places for sandboxes, turns for executions, and memory."""

from __future__ import annotations

import os

from cloche.config.sections import Capacity
from cloche.engine.gate import Gate, Waiter
from cloche.engine.memory import Memory
from cloche.engine.room import executions_at_once, sandboxes_at_once
from cloche.engine.shutting_out import ShutOut, erased


class Turns:
    """The executions of one sandbox at the gate. While it is paused its programs stand still, and hold no place."""

    def __init__(self, gate: Gate, owner: str):
        self._gate = gate
        self._owner = owner
        self._count = 0
        self._resting = False

    def check(self) -> None:
        """Raises Busy or QuotaExceeded where one more would be refused at once: before an answer has begun."""
        self._gate.check(self._owner)

    def enter_now(self) -> bool:
        if self._gate.enter_now(self._owner):
            self._entered()
            return True
        return False

    def line_up(self) -> Waiter:
        """Raises as `Gate.line_up` does."""
        return self._gate.line_up(self._owner)

    async def enter(self, waiter: Waiter) -> bool:
        """Whether its turn has come; False if it was withdrawn. Raises Busy, ShuttingDown."""
        if not await waiter.turn():
            return False
        self._entered()
        return True

    def leave(self) -> None:
        self._count -= 1
        if not self._resting:
            self._gate.leave(self._owner)

    def rest(self) -> None:
        if not self._resting:
            self._resting = True
            for _ in range(self._count):
                self._gate.leave(self._owner)

    def rise(self) -> None:
        """Raises Busy where there is no room now for all that would go on."""
        if self._resting:
            self._gate.take_back(self._owner, self._count)
            self._resting = False

    def _entered(self) -> None:
        self._count += 1
        if self._resting:
            self._gate.leave(self._owner)


class Admission:
    """What one engine has room for."""

    def __init__(self, config: Capacity):
        self._cores = len(os.sched_getaffinity(0))
        self.shut_out = ShutOut()
        self.memory = Memory(config.memory_reserve_bytes)
        self.sandboxes = Gate("sandboxes", sandboxes_at_once(config), config, self.memory.enough)
        self.executions = Gate("running executions", executions_at_once(config), config)

    @property
    def rooms(self) -> dict[str, object]:
        """What was worked out, or configured, in words for a log."""
        sandboxes, executions = self.sandboxes.room, self.executions.room
        return {"sandboxes": sandboxes.places, "because": sandboxes.because, "executions": executions.places}

    @property
    def crowded(self) -> bool:
        """Whether one more sandbox would have to wait."""
        return self.sandboxes.crowded

    def busy(self) -> bool:
        """Whether there are programs for all cores."""
        return self.executions.in_use >= self._cores

    def share(self) -> None:
        """There are several owners, or can be: none may have all of it."""
        self.sandboxes.share()
        self.executions.share()

    def shut(self, owner: str) -> None:
        """Nothing is made for that owner until `shut_out.end`, and whoever of theirs waits is told why."""
        self.shut_out.begin(owner)
        for gate in (self.sandboxes, self.executions):
            gate.turn_away(owner, erased)

    def close(self) -> None:
        """Whoever waits is told that the host is shutting down."""
        self.sandboxes.close()
        self.executions.close()
