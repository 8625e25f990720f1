"""What the configuration says about how much a host takes on at once."""

from __future__ import annotations

from cloche import errors
from cloche.model import MIB
from cloche.structs import Struct


class Capacity(Struct):
    """Beyond it requests wait, each owner's in a line of its own, and are refused after a time."""

    sandboxes: int = 0  # at once, those that are paused with their memory counted; 0: as many as there is room for
    executions: int = 0  # that run at once, also those that wait for something; 0: 64 for each core, 256 or more
    memory_reserve_bytes: int = 256 * MIB  # no sandbox begins where this host has less memory left
    queued: int = 1000  # requests that wait for a place, in all
    queued_per_owner: int = 250
    queue_seconds: float = 30.0  # that one waits

    def __post_init__(self) -> None:
        for name in ("sandboxes", "executions", "memory_reserve_bytes", "queued", "queued_per_owner"):
            if getattr(self, name) < 0:
                raise errors.InvalidRequest(f"capacity.{name} must be 0 or more, not {getattr(self, name)}")
        if not 0 <= self.queue_seconds < float("inf"):
            raise errors.InvalidRequest(f"capacity.queue_seconds must be 0 or more, not {self.queue_seconds}")
