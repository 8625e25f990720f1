"""What a host has room for, and how much of it is in use, as it is told."""

from __future__ import annotations

from cloche.model import Struct


class Occupancy(Struct):
    """A gate as it is at one moment."""

    capacity: int
    because: str  # of which it is no more
    in_use: int
    waiting: int
    owners_waiting: int


class Pools(Struct):
    ready: int  # cells that wait to become sandboxes
    wanted: int  # that would, if there were the memory and the time to make them


class PoolInfo(Struct):
    """The cells of one kind that wait."""

    user: str  # as whom the kernels of those sandboxes run
    space_bytes: int
    ready: int
    wanted: int


class NurseryInfo(Struct):
    """What new sandboxes of a template are forked from."""

    template: str  # NAME@VERSION
    alive: bool
    why: str  # there is none, where it could not be started
    pools: list[PoolInfo]


class MemoryLeft(Struct):
    left_bytes: int | None  # None where this host does not tell
    reserve_bytes: int
    enough: bool  # whether sandboxes may begin
    ample: bool  # whether cells may be kept waiting


class CapacityInfo(Struct):
    sandboxes: Occupancy
    executions: Occupancy
    running: int  # sandboxes; those that are paused with their memory, and the engine's own, have places too
    paused: int
    pool: Pools
    memory: MemoryLeft
