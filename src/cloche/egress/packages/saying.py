"""Warnings that a program could cause as often as it likes: said once in a while."""

from __future__ import annotations

import time
from typing import Any

from cloche.telemetry import log

SECONDS = 60.0


class Seldom:
    """Each event once a minute, with how many were left out since."""

    def __init__(self) -> None:
        self._said_at: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def warn(self, event: str, **fields: Any) -> None:
        now = time.monotonic()
        if now - self._said_at.get(event, -SECONDS) < SECONDS:
            self._left_out[event] = self._left_out.get(event, 0) + 1
            return
        self._said_at[event] = now
        left_out = self._left_out.pop(event, 0)
        log.warning(event, **fields, **({"left_out": left_out} if left_out else {}))
