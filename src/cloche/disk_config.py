"""What the configuration says about how much of a disk is used, where nothing else bounds it."""

from __future__ import annotations

from cloche import errors
from cloche.structs import Struct


class Disk(Struct):
    """What is collected: see `cloche.engine.collection`."""

    template_versions: int = 5  # of one name that are kept, though nothing uses them
    template_days: float = 30.0  # for which a version that nothing uses is kept in any case
    collect_hours: float = 1.0  # between two collections

    def __post_init__(self) -> None:
        if self.template_versions < 1:
            raise errors.InvalidRequest(f"disk.template_versions must be 1 or more, not {self.template_versions}")
        for name in ("template_days", "collect_hours"):
            if not 0 < getattr(self, name) < float("inf"):
                raise errors.InvalidRequest(f"disk.{name} must be a positive number, not {getattr(self, name)}")
