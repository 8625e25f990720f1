"""What the configuration says about what of sandboxes is kept."""

from __future__ import annotations

from cloche import errors
from cloche.model import GIB, MIB
from cloche.structs import Struct


class Kept(Struct):
    """What of sandboxes outlasts them, for each owner."""

    paused_seconds: float = 30 * 86400.0  # after which a paused sandbox is given up
    paused: int = 200  # sandboxes
    paused_bytes: int = 20 * GIB  # of the files of all of them
    snapshots: int = 100
    snapshot_bytes: int = 20 * GIB  # of all together

    def __post_init__(self) -> None:
        if not 0 < self.paused_seconds < float("inf"):
            raise errors.InvalidRequest(f"kept.paused_seconds must be a positive number, not {self.paused_seconds}")
        for name in ("paused", "paused_bytes", "snapshots", "snapshot_bytes"):
            if getattr(self, name) < 0:
                raise errors.InvalidRequest(f"kept.{name} must be 0 or more, not {getattr(self, name)}")


class History(Struct):
    """What is kept in memory of the cells that ran, with their outputs."""

    sandbox_bytes: int = 8 * MIB  # of each sandbox: the oldest make room
    bytes: int = 256 * MIB  # of all of them: beyond that, whoever needs more has an even share

    def __post_init__(self) -> None:
        for name in ("sandbox_bytes", "bytes"):
            if getattr(self, name) < 0:
                raise errors.InvalidRequest(f"history.{name} must be 0 or more, not {getattr(self, name)}")
