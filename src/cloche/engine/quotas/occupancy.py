"""Capacity and occupancy of a host, as reported by the API."""

from __future__ import annotations

from cloche.model import Struct


class Occupancy(Struct):
    """An admission queue as it is at one moment."""

    capacity: int
    because: str  # of which it is no more
    in_use: int
    waiting: int
    owners_waiting: int


class PoolTotals(Struct):
    ready: int  # cells that wait to become sandboxes
    wanted: int  # that would, if there were the memory and the time to make them


class PoolInfo(Struct):
    """The ready cells of one kind."""

    user: str  # of the kernels of those sandboxes
    space_bytes: int
    ready: int
    wanted: int


class NurseryInfo(Struct):
    """The nursery that new sandboxes of a template are forked from."""

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
    pool: PoolTotals
    memory: MemoryLeft
