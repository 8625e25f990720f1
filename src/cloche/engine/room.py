"""How many sandboxes and executions a host can have at once, worked out from what it has."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

from cloche.config.sections import Capacity
from cloche.linux.host_memory import available_bytes, directories, number_in
from cloche.model import MIB, Struct

SANDBOX_BYTES = 8 * MIB  # one that has run something small; those that use more meet the reserve
SANDBOX_DESCRIPTORS = 12
SANDBOX_PROCESSES = 8  # with a few that its programs start
OWN_DESCRIPTORS = 512  # for connections, files and the server itself
EXECUTIONS_PER_CORE = 64  # most of a program's time passes with waiting
LEAST_EXECUTIONS = 256


class Room(Struct):
    """`because`: what it is that there is no more of."""

    places: int
    because: str


def sandboxes_at_once(config: Capacity) -> Room:
    if config.sandboxes:
        return Room(places=config.sandboxes, because="configured")
    return min(_rooms(config), key=lambda room: room.places)


def executions_at_once(config: Capacity) -> Room:
    if config.executions:
        return Room(places=config.executions, because="configured")
    cores = len(os.sched_getaffinity(0))
    return Room(places=max(EXECUTIONS_PER_CORE * cores, LEAST_EXECUTIONS), because="cores")


def _rooms(config: Capacity) -> Iterator[Room]:
    left = available_bytes()
    if left is not None:
        yield _room((left - config.memory_reserve_bytes) // SANDBOX_BYTES, "memory")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY:
        yield _room((files - OWN_DESCRIPTORS) // SANDBOX_DESCRIPTORS, "descriptors")
    yield _room(_most_processes() * 3 // 4 // SANDBOX_PROCESSES, "processes")


def _room(places: int, because: str) -> Room:
    return Room(places=max(places, 1), because=because)


def _most_processes() -> int:
    """That this host, or this user on it, or the cgroups that this process is in, can have."""
    known = [number_in("/proc/sys/kernel", name) for name in ("pid_max", "threads-max")]
    known += [number_in(each, "pids.max") for each in directories("pids")]
    own = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    return min([each for each in (*known, own) if each is not None and each > 0], default=32768)
