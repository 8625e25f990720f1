"""What a build says about itself while it works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from cloche.model import Struct

Phase = Literal["wait", "lock", "install", "compile", "archive", "done"]


class Progress(Struct):
    phase: Phase
    detail: str
    fraction: float | None = None  # of the whole build, 0 to 1; None: not known


Report = Callable[[Progress], None]


def silent(_progress: Progress) -> None:
    """A Report for callers that do not watch."""
