"""What the configuration says about named volumes."""

from __future__ import annotations

from cloche import errors
from cloche.model import GIB, MIB
from cloche.structs import Struct


class VolumeLimits(Struct):
    """Named volumes, which are in memory while a sandbox has them, and on the disk otherwise."""

    bytes: int = 1 * GIB  # that one can hold, of those that are made from now on
    per_owner: int = 20

    def __post_init__(self) -> None:
        if self.bytes < MIB or self.per_owner < 0:
            raise errors.InvalidRequest("volumes.bytes must be 1 MiB or more, and volumes.per_owner 0 or more")
