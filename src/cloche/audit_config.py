"""What the configuration says about the log of who did what."""

from __future__ import annotations

from cloche import errors
from cloche.model import GIB, MIB
from cloche.structs import Struct


class Audit(Struct):
    """The audit log of a server: see `cloche.engine.trail`."""

    enabled: bool = True
    days: float = 90.0  # that a line is kept
    max_bytes: int = 1 * GIB  # of all files: beyond it, the oldest go before their time

    def __post_init__(self) -> None:
        if not 0 < self.days < float("inf"):
            raise errors.InvalidRequest(f"audit.days must be a positive number, not {self.days}")
        if self.max_bytes < MIB:
            raise errors.InvalidRequest(f"audit.max_bytes must be 1 MiB or more, not {self.max_bytes}")
