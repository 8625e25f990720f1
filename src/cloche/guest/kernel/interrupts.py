"""Interrupts: SIGINT becomes KeyboardInterrupt in the user's code, and only there.

While nothing executes it is only remembered, as it may be meant for a cell that the kernel has not read yet;
while a frame is being written it waits, so that no frame is cut in two.
"""

from __future__ import annotations

import sys
from _signal import SIGINT, signal  # type: ignore[import-not-found]  # the enums of `signal` dirty 60 pages of a fork
from typing import Any


class Interrupts:
    """Armed for as long as a cell runs. All methods are for the main thread."""

    def __init__(self) -> None:
        self.armed = False
        self.cancelled = False  # the watched task was cancelled by an interrupt
        self._holds = 0
        self._pending = False
        self._expected = False
        self._early = False
        self._task: Any = None

    def install(self) -> None:
        signal(SIGINT, self._on_signal)

    def expect(self) -> bool:
        """A cell begins: an interrupt from now on is meant for it and waits until it is armed.

        Gives whether one came since the last cell began, which may have been meant for this one: see `recall`.
        """
        self._pending = False
        self._expected = True
        early, self._early = self._early, False
        return early

    def recall(self) -> None:
        """The interrupt that came before the cell was meant for it."""
        self._pending = True

    def arm(self) -> None:
        """Raises the KeyboardInterrupt that came since `expect`."""
        early, self._pending, self._expected = self._pending and self._expected, False, False
        self.armed = True
        if early:
            self._fire()

    def disarm(self) -> None:
        self.armed = False

    def hold(self) -> None:
        self._holds += 1

    def release(self) -> None:
        """Ends a hold. Raises the KeyboardInterrupt that came meanwhile."""
        self._holds -= 1
        if self._pending and self.armed and not self._holds:
            self._pending = False
            self._fire()

    def watch(self, task: Any) -> None:
        """`task` is the loop's task of the cell: cancelled where no user code is on the stack. None: no task."""
        self._task = task
        self.cancelled = False

    def _on_signal(self, _signum: int, _frame: Any) -> None:
        self._early = True
        if not self.armed:
            self._pending = self._expected
            return
        if self._holds:
            self._pending = True
        else:
            self._fire()

    def _fire(self) -> None:
        if not self.armed:
            return
        task, asyncio = self._task, sys.modules.get("asyncio")  # what has no task never imports it
        if asyncio and task is not None and not task.done() and asyncio.current_task(task.get_loop()) is None:
            # The loop sleeps in select: an exception there would tear the loop's own state, cancelling does not.
            self.cancelled = True
            task.get_loop().call_soon_threadsafe(task.cancel)
            return
        raise KeyboardInterrupt
