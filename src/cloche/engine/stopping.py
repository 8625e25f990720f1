"""How a program that runs on a kernel is brought to its end: interrupts, its time limit, and at last a kill."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cloche.engine.clock import Clock, Standstill
from cloche.engine.kernel import Kernel

GRACE_SECONDS = 2.0  # between SIGINT and SIGKILL
KILL_SECONDS = 10.0  # after SIGKILL; a cell that does not manage that is broken
STUBBORN_SECONDS = 10.0  # an interrupt repeated after this kills
REPEAT_SECONDS = 1.0  # Python misses a signal that lands just before a call that blocks
REPEATS = 3
LEFT_BEHIND = "its sandbox is paused: the program is stopped when that goes on"


class Stopping:
    """Made when the program is given to its kernel. Calls `give_up()` if it cannot even be killed.

    While programs stand still, so does all of this: who cannot move is not to blame for not ending.
    """

    def __init__(self, kernel: Kernel, timeout_seconds: float | None, give_up: Callable[[], None]):
        self.timed_out = False
        self.killed = False
        self._kernel = kernel
        self._give_up: Callable[[], None] | None = give_up
        self._began = False
        self._interrupted_at: float | None = None
        self._time = kernel.time
        self._repeat: Clock | None = None
        self._timer: Clock | None = None
        self._standstill: Standstill | None = None
        self._clock = None if timeout_seconds is None else Clock(timeout_seconds, self._on_timeout, self._time)

    @property
    def interrupted(self) -> bool:
        return self._interrupted_at is not None

    def begin(self) -> None:
        """The program runs: an interrupt that came before reaches it now."""
        self._began = True
        if self.interrupted:
            self._send_interrupt()

    def interrupt(self) -> None:
        """See `Execution.interrupt`."""
        now = self._time.now()
        if self._interrupted_at is None:
            self._interrupted_at = now
        elif now - self._interrupted_at > STUBBORN_SECONDS:
            self._kill()
            return
        if self._began:
            self._send_interrupt()

    def interrupt_firmly(self) -> None:
        """An interrupt, and a kill where that is not enough."""
        if not self.killed:
            self._interrupted_at = self._time.now() if self._interrupted_at is None else self._interrupted_at
            self._send_interrupt()
            self._set_timer(GRACE_SECONDS, self._kill)

    def when_still(self, call: Callable[[], None]) -> None:
        """Calls it if programs stand still before this one has ended, or do already."""
        if self._standstill is not None:
            self._standstill.stop()
        self._standstill = Standstill(call, self._time)

    def hold_clock(self) -> None:
        """The time limit stands still until `release_clock` was called as often."""
        if self._clock is not None:
            self._clock.hold()

    def release_clock(self) -> None:
        if self._clock is not None:
            self._clock.go_on()

    def close(self) -> None:
        """The program has ended: nothing more is done to it."""
        self._give_up = None
        for each in (self._clock, self._timer, self._repeat, self._standstill):
            if each is not None:
                each.stop()

    def _on_timeout(self) -> None:
        self.timed_out = True
        self.interrupt_firmly()

    def _send_interrupt(self, repeats: int = REPEATS) -> None:
        if self._repeat is not None:
            self._repeat.stop()
        if not self.killed:
            self._kernel.interrupt()
            if repeats:
                self._repeat = Clock(REPEAT_SECONDS, partial(self._send_interrupt, repeats - 1), self._time)

    def _kill(self) -> None:
        self.killed = True
        self._kernel.kill()
        if self._give_up is not None:
            self._set_timer(KILL_SECONDS, self._give_up)

    def _set_timer(self, seconds: float, call: Callable[[], None]) -> None:
        for each in (self._clock, self._timer):
            if each is not None:
                each.stop()
        self._timer = Clock(seconds, call, self._time)
