"""Notices that somebody has set the wall clock: what was said of moments to come is then said anew."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from cloche.telemetry import log

TICK_SECONDS = 1.0
JUMP_SECONDS = 2.0  # less is drift, which nobody minds


class Jumps:
    """Calls `on_jump` after each, from `open` until `close`."""

    def __init__(self, on_jump: Callable[[], None]):
        self._on_jump = on_jump
        self._difference = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def open(self) -> None:
        self._difference = time.time() - time.monotonic()
        self._wait()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._look)

    def _look(self) -> None:
        self._wait()
        jumped = time.time() - time.monotonic() - self._difference
        if abs(jumped) > JUMP_SECONDS:
            self._difference += jumped
            log.warning("clock.jumped", seconds=round(jumped))
            self._on_jump()
