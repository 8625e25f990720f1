"""Limits on memory, CPU and processes, by control groups of version 1, version 2, or both at once.

    cgroups = probe()                           # reads only; `cgroups.report` is for `cloche doctor`
    parent = cgroups.parent("instance")         # one directory per hierarchy, locked as long as we live
    group = parent.create("cell")               # a few mkdirs
    group.set_memory(...); group.add(pid)       # limits first: what is charged before stays where it was
    group.kill(); group.remove()

What a host cannot enforce is named in `missing`; setting such a limit does nothing, asking gives None or 0.

`add` takes a few dozen microseconds per directory, but the first after a pause waits until no CPU is inside a fork or
an exit (8 to 25 ms): keep it out of the path that a user waits for, or let the process move itself (`entrances`).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from cloche.linux.cgroups import v1, v2
from cloche.linux.cgroups.files import HOST_LEAF, Hierarchy, above_leaf, mounted, numbers, write
from cloche.linux.cgroups.group import (
    CLOCK,
    CONTROLLERS,
    KILL_ROUNDS,
    Group,
    Parent,
    Place,
    checked,
    kill_all,
    lock,
    opened,
    rmdir,
)

__all__ = ["CONTROLLERS", "Cgroups", "Controller", "Group", "Parent", "plan", "probe", "remove_dead"]

_PREFIX = "cloche-"
_DEATH_SECONDS = 2.0  # how long cleaning up waits for killed processes to be gone


class Controller(NamedTuple):
    """A line for `cloche doctor`."""

    name: str
    version: str | None  # "v1", "v2", or None: not to be had
    path: str
    advice: str


class Cgroups:
    """What this process can make below which directories."""

    def __init__(self, places: dict[str, Place], base: v2.Base | None, report: list[Controller]) -> None:
        self._places = places
        self._base = base
        self.report = report
        self.missing = frozenset(CONTROLLERS) - places.keys()

    def parent(self, instance: str) -> Parent:
        """The directories of one instance of Cloche, made and locked. Raises BlockingIOError if in use, OSError."""
        places = dict(self._places)
        if self._base is not None and self._base.controllers:
            self._hand_on(places, os.fsencode(self._base.path), self._base.crowded)
        return Parent(places, _PREFIX + checked(instance))

    @staticmethod
    def _hand_on(places: dict[str, Place], base: bytes, crowded: bool) -> None:
        wanted = frozenset(name for name, place in places.items() if place.version == 2) - {"freezer", CLOCK}
        if crowded:
            v2.make_room(base)
        for name in wanted - v2.hand_on(base, wanted):
            del places[name]

    def leftovers(self, is_live: Callable[[str], bool] = lambda instance: False) -> list[str]:
        """Kills and removes what dead instances left; gives their names.

        An instance whose directories are locked, or of which `is_live` is true, is left alone.
        """
        found = self._instances()
        return [instance for instance, paths in found.items() if not is_live(instance) and remove_dead(paths)]

    def dead(self) -> list[str]:
        """The instances of which something is left, by their names. Only looks."""
        found = self._instances()
        return [name for name, paths in found.items() if all(_unlocked(os.fsencode(path)) for path in paths)]

    def _instances(self) -> dict[str, list[str]]:
        """Of each that has groups here, by its name, the directories."""
        found: dict[str, list[str]] = {}
        for base in {place.base for place in self._places.values()}:
            for name in os.listdir(base):
                if name.startswith(_PREFIX) and name != HOST_LEAF:
                    found.setdefault(name[len(_PREFIX) :], []).append(os.path.join(base, name))
        return found


def probe() -> Cgroups:
    """What this process can limit, and how. Only reads."""
    return plan(mounted())


def plan(found: Iterable[Hierarchy]) -> Cgroups:
    """What can be limited in these hierarchies.

    Version 1 is taken where the host has it: there a process enters a group in 0.1 ms, in version 2 in 5 to 10.
    """
    seen = list(found)
    old = {name: h for h in seen if h.version == 1 for name in h.controllers}
    base = _unified_base(seen, frozenset(CONTROLLERS) - old.keys())
    places: dict[str, Place] = {}
    report = []
    for name in CONTROLLERS:
        place, advice = _place(name, old.get(name), base)
        if place:
            places[name] = place
        report.append(Controller(name, f"v{place.version}" if place else None, place.base if place else "", advice))
    clock = _place(CLOCK, old.get("cpuacct"), base)[0]
    if clock:
        places[CLOCK] = clock
    return Cgroups(places, None if isinstance(base, str) else base, report)


def _unified_base(seen: list[Hierarchy], wanted: frozenset[str]) -> v2.Base | str:
    unified = next((h for h in seen if h.version == 2), None)
    return v2.find_base(unified, wanted) if unified else "no cgroup v2 hierarchy is mounted"


def _place(name: str, old: Hierarchy | None, base: v2.Base | str) -> tuple[Place | None, str]:
    """Where a controller's groups can be made, or advice."""
    advice = v1.usable(old) if old is not None else ""
    if old is not None and old.own is not None and not advice:
        return Place(1, above_leaf(old.own)), ""
    core = name in ("freezer", CLOCK)  # in every group of version 2
    if isinstance(base, v2.Base) and (core or name in base.controllers):
        return Place(2, base.path), ""
    if old is not None:
        return None, advice
    if isinstance(base, str):
        return None, base
    return None, f"no {name} controller in {base.path}: see cgroup.subtree_control of the groups above it"


def remove_dead(directories: Iterable[str]) -> bool:
    """Kills what is in an instance's groups, and removes them all; false if the instance lives or some are left."""
    paths = [os.fsencode(directory) for directory in directories]
    if not all(_unlocked(path) for path in paths):
        return False
    groups = [group for path in paths for group in _groups(path)]
    for path in groups:
        _end(path)
    for path in [*groups, *paths]:
        _rmdir_patiently(path)
    return not any(os.path.exists(path) for path in paths)


def _unlocked(directory: bytes) -> bool:
    """Whether nobody holds it (or it is gone)."""
    fd = opened(directory)
    if fd is None:
        return True
    try:
        return lock(fd)
    finally:
        os.close(fd)


def _rmdir_patiently(directory: bytes) -> None:
    deadline = time.monotonic() + _DEATH_SECONDS
    while not rmdir(directory) and time.monotonic() < deadline:
        time.sleep(0.005)


def _groups(directory: bytes) -> list[bytes]:
    """Those below it, the inner ones (see `cgroup_programs`) before those that they are in."""
    outer = [os.path.join(directory, name) for name in _subdirectories(directory)]
    return [group for each in outer for group in (*_groups(each), each)]


def _subdirectories(directory: bytes) -> list[bytes]:
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []


def _end(directory: bytes) -> None:
    """Kills what is in a directory of a hierarchy that may be of either version, and thaws it."""
    for file, text in ((b"/pids.max", b"0"), (b"/cgroup.kill", b"1")):
        _write_if_there(directory + file, text)
    for _ in range(KILL_ROUNDS):
        with contextlib.suppress(FileNotFoundError):
            if not kill_all(numbers(directory + b"/cgroup.procs")):
                break
        _write_if_there(directory + b"/freezer.state", b"THAWED")


def _write_if_there(path: bytes, text: bytes) -> None:
    with contextlib.suppress(FileNotFoundError):
        write(path, text)
