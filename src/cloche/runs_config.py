"""How much is kept of runs that outlive their connections."""

from __future__ import annotations

from cloche import errors
from cloche.model import KIB, MIB
from cloche.structs import Struct


class Runs(Struct):
    """Detached runs: see `cloche.engine.runs`."""

    events_bytes: int = 8 * MIB  # of one run's events: the oldest make room
    owner_bytes: int = 64 * MIB  # of all runs of one owner: those that ended first make room
    per_owner: int = 1000  # runs that are kept: the same
    at_once: int = 64  # of one owner, those that wait for their turn counted
    kept_hours: float = 24.0  # after their end

    def __post_init__(self) -> None:
        for name in ("per_owner", "at_once", "kept_hours"):
            if not 0 < getattr(self, name) < float("inf"):
                raise errors.InvalidRequest(f"runs.{name} must be a positive number, not {getattr(self, name)}")
        for name in ("events_bytes", "owner_bytes"):
            if getattr(self, name) < 16 * KIB:
                raise errors.InvalidRequest(f"runs.{name} must be 16384 or more, not {getattr(self, name)}")
