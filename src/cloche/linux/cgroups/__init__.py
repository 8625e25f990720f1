"""Limits on memory, CPU and processes, by control groups of version 1, version 2, or both at once.

    cgroups = probe_cgroups()                   # reads only; `cgroups.report` is for `cloche doctor`
    parent = cgroups.parent("instance")         # one directory per hierarchy, locked as long as we live
    group = parent.create("cell")               # a few mkdirs
    group.set_memory(...); group.add(pid)       # limits first: earlier charges stay where they were
    group.kill(); group.remove()

Limits that a host cannot enforce are named in `missing`; setting such a limit does nothing, reading gives
None or 0.

`add` takes a few dozen microseconds per directory, but the first after a pause waits until no CPU is inside a
fork or an exit (8 to 25 ms): keep it out of the path that a user waits for, or let the process move itself
(`open_entrances`).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from cloche.linux.cgroups import v1, v2
from cloche.linux.cgroups.files import (
    HOST_LEAF,
    Hierarchy,
    above_leaf,
    mounted_hierarchies,
    read_numbers,
    write_control,
)
from cloche.linux.cgroups.group import (
    CONTROLLERS,
    CPU_CLOCK,
    KILL_ROUNDS,
    ControllerLocation,
    Group,
    InstanceGroups,
    checked_name,
    kill_pids,
    opened,
    remove_directory,
    try_lock,
)

__all__ = [
    "CONTROLLERS",
    "Cgroups",
    "ControllerReport",
    "Group",
    "InstanceGroups",
    "plan_cgroups",
    "probe_cgroups",
    "remove_dead",
]

_INSTANCE_PREFIX = "cloche-"
_DEATH_SECONDS = 2.0  # how long cleaning up waits for killed processes to be gone


class ControllerReport(NamedTuple):
    """A line for `cloche doctor`."""

    name: str
    version: str | None  # "v1", "v2", or None: not to be had
    path: str
    advice: str


class Cgroups:
    """The groups that this process can make, and their directories."""

    def __init__(
        self, places: dict[str, ControllerLocation], base: v2.UnifiedBase | None, report: list[ControllerReport]
    ) -> None:
        self._places = places
        self._base = base
        self.report = report
        self.missing = frozenset(CONTROLLERS) - places.keys()

    def parent(self, instance: str) -> InstanceGroups:
        """The directories of one instance of Cloche, made and locked. Raises BlockingIOError if in use, OSError."""
        places = dict(self._places)
        if self._base is not None and self._base.controllers:
            self._enable_controllers(places, os.fsencode(self._base.path), self._base.crowded)
        return InstanceGroups(places, _INSTANCE_PREFIX + checked_name(instance))

    @staticmethod
    def _enable_controllers(places: dict[str, ControllerLocation], base: bytes, crowded: bool) -> None:
        wanted = frozenset(name for name, place in places.items() if place.version == 2) - {"freezer", CPU_CLOCK}
        if crowded:
            v2.move_to_leaf(base)
        for name in wanted - v2.enable_controllers(base, wanted):
            del places[name]

    def remove_leftovers(self, is_live: Callable[[str], bool] = lambda instance: False) -> list[str]:
        """Kills and removes the groups of dead instances; returns their names.

        An instance with locked directories, or of which `is_live` is true, is left alone.
        """
        found = self._find_instances()
        return [instance for instance, paths in found.items() if not is_live(instance) and remove_dead(paths)]

    def dead_instances(self) -> list[str]:
        """The names of dead instances that have groups left. Only reads."""
        found = self._find_instances()
        return [name for name, paths in found.items() if all(_is_unlocked(os.fsencode(path)) for path in paths)]

    def _find_instances(self) -> dict[str, list[str]]:
        """The directories of each instance that has groups here, by its name."""
        found: dict[str, list[str]] = {}
        for base in {place.base for place in self._places.values()}:
            for name in os.listdir(base):
                if name.startswith(_INSTANCE_PREFIX) and name != HOST_LEAF:
                    found.setdefault(name[len(_INSTANCE_PREFIX) :], []).append(os.path.join(base, name))
        return found


def probe_cgroups() -> Cgroups:
    """The limits that this process can set, and how. Only reads."""
    return plan_cgroups(mounted_hierarchies())


def plan_cgroups(found: Iterable[Hierarchy]) -> Cgroups:
    """The limits that can be set in these hierarchies.

    Version 1 is taken where the host has it: there a process enters a group in 0.1 ms, in version 2 in 5 to 10.
    """
    seen = list(found)
    old = {name: h for h in seen if h.version == 1 for name in h.controllers}
    base = _unified_base(seen, frozenset(CONTROLLERS) - old.keys())
    places: dict[str, ControllerLocation] = {}
    report = []
    for name in CONTROLLERS:
        place, advice = _locate_controller(name, old.get(name), base)
        if place:
            places[name] = place
        report.append(
            ControllerReport(name, f"v{place.version}" if place else None, place.base if place else "", advice)
        )
    clock = _locate_controller(CPU_CLOCK, old.get("cpuacct"), base)[0]
    if clock:
        places[CPU_CLOCK] = clock
    return Cgroups(places, None if isinstance(base, str) else base, report)


def _unified_base(seen: list[Hierarchy], wanted: frozenset[str]) -> v2.UnifiedBase | str:
    unified = next((h for h in seen if h.version == 2), None)
    return v2.find_base(unified, wanted) if unified else "no cgroup v2 hierarchy is mounted"


def _locate_controller(
    name: str, old: Hierarchy | None, base: v2.UnifiedBase | str
) -> tuple[ControllerLocation | None, str]:
    """The location of a controller's groups, or advice."""
    advice = v1.unusable_reason(old) if old is not None else ""
    if old is not None and old.own is not None and not advice:
        return ControllerLocation(1, above_leaf(old.own)), ""
    core = name in ("freezer", CPU_CLOCK)  # in every group of version 2
    if isinstance(base, v2.UnifiedBase) and (core or name in base.controllers):
        return ControllerLocation(2, base.path), ""
    if old is not None:
        return None, advice
    if isinstance(base, str):
        return None, base
    return None, f"no {name} controller in {base.path}: see cgroup.subtree_control of the groups above it"


def remove_dead(directories: Iterable[str]) -> bool:
    """Kills the processes in an instance's groups, and removes them; false if it lives or some are left."""
    paths = [os.fsencode(directory) for directory in directories]
    if not all(_is_unlocked(path) for path in paths):
        return False
    groups = [group for path in paths for group in _inner_groups(path)]
    for path in groups:
        _kill_group(path)
    for path in [*groups, *paths]:
        _rmdir_patiently(path)
    return not any(os.path.exists(path) for path in paths)


def _is_unlocked(directory: bytes) -> bool:
    """Whether it is not locked (or it is gone)."""
    fd = opened(directory)
    if fd is None:
        return True
    try:
        return try_lock(fd)
    finally:
        os.close(fd)


def _rmdir_patiently(directory: bytes) -> None:
    deadline = time.monotonic() + _DEATH_SECONDS
    while not remove_directory(directory) and time.monotonic() < deadline:
        time.sleep(0.005)


def _inner_groups(directory: bytes) -> list[bytes]:
    """The groups below it, inner ones (see `ProgramSubgroup`) before their parents."""
    outer = [os.path.join(directory, name) for name in _list_subdirectories(directory)]
    return [group for each in outer for group in (*_inner_groups(each), each)]


def _list_subdirectories(directory: bytes) -> list[bytes]:
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []


def _kill_group(directory: bytes) -> None:
    """Kills the processes in a directory of a hierarchy of either version, and thaws it."""
    for file, text in ((b"/pids.max", b"0"), (b"/cgroup.kill", b"1")):
        _write_if_there(directory + file, text)
    for _ in range(KILL_ROUNDS):
        with contextlib.suppress(FileNotFoundError):
            if not kill_pids(read_numbers(directory + b"/cgroup.procs")):
                break
        _write_if_there(directory + b"/freezer.state", b"THAWED")


def _write_if_there(path: bytes, text: bytes) -> None:
    with contextlib.suppress(FileNotFoundError):
        write_control(path, text)
