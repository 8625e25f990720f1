"""Control groups of version 2: one directory for all controllers, and the search for a base of our groups.

A group that has processes in it cannot enable controllers for its children (except the real root). So the
base, below which we make groups, is found in this order:
 - our own group, if it is the real root, or has to enable nothing;
 - our own group, if it was delegated to us and only we are in it: we then move ourselves into a leaf of it;
 - an ordinary user: the nearest group above that we may write and that holds no process itself (a systemd
   user session);
 - root: the root of the mount, if it is the real one or holds no process;
 - a container that has processes in its root group: as a last resort those are moved into a leaf.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

from cloche.linux.cgroups.files import (
    HOST_LEAF,
    FileBytes,
    Hierarchy,
    file_bytes,
    read_control,
    read_field,
    read_numbers,
    write_control,
)

_ADVICE = "start Cloche with `systemd-run --user --scope -p Delegate=yes`, or as a service with Delegate=yes"


class UnifiedBase(NamedTuple):
    """A directory to make groups in, and the controllers that its children can be given."""

    path: str
    controllers: frozenset[str]
    crowded: bool  # processes must be moved into a leaf before controllers can be handed on


def find_base(hierarchy: Hierarchy, wanted: frozenset[str]) -> UnifiedBase | str:
    """The base for groups that need these controllers (those of them that there are), or why there is none."""
    own = hierarchy.own
    if own is None:
        return "the process's own group is not among those mounted"
    if is_real_root(own) or not wanted & read_controllers(own):
        if _is_writable(own):
            return UnifiedBase(own, wanted & read_controllers(own), crowded=False)
    elif _is_delegated(own) and _all_processes(own, _is_descendant):
        return UnifiedBase(own, wanted & read_controllers(own), crowded=True)
    for above in _groups_above(hierarchy.mount, own):
        if _is_writable(above) and (is_real_root(above) or not _read_pids(above)):
            return UnifiedBase(above, wanted & read_controllers(above), crowded=False)
    if own == hierarchy.mount and os.geteuid() == 0 and _is_writable(own) and _all_processes(own, _is_kin):
        return UnifiedBase(own, wanted & read_controllers(own), crowded=True)
    return _refusal_reason(own)


def _refusal_reason(own: str) -> str:
    if not _is_writable(own):
        return f"{own} is not ours to write; {_ADVICE}"
    return f"{own} holds processes that are not ours, so its children can be given no controllers; {_ADVICE}"


def read_controllers(path: str) -> frozenset[str]:
    try:
        return frozenset(read_control(os.fsencode(path) + b"/cgroup.controllers").decode().split())
    except OSError:
        return frozenset()


def is_real_root(path: str) -> bool:
    """Not merely the root of a cgroup namespace, which has a type like every other group."""
    return not os.path.exists(os.path.join(path, "cgroup.type"))


def _is_writable(path: str) -> bool:
    files = ("", "cgroup.procs", "cgroup.subtree_control")
    return all(os.access(os.path.join(path, file), os.W_OK) for file in files)


def _is_delegated(path: str) -> bool:
    """Given to us to manage: by its owner, or, as root may write everywhere, by the mark that systemd leaves."""
    if not _is_writable(path):
        return False
    return os.geteuid() != 0 or any(_has_mark(path, name) for name in ("user.delegate", "trusted.delegate"))


def _has_mark(path: str, name: str) -> bool:
    try:
        return os.getxattr(path, name) == b"1"
    except OSError:
        return False


def _groups_above(mount: str, own: str) -> Iterator[str]:
    """Groups above our own to try: for root only the topmost, as those between are other services' slices."""
    if os.geteuid() == 0:
        yield from [mount] if own != mount else []
        return
    while own != mount:
        own = os.path.dirname(own)
        yield own


def _read_pids(path: str) -> list[int]:
    return read_numbers(os.fsencode(path) + b"/cgroup.procs")


def _all_processes(path: str, test: Callable[[int], bool]) -> bool:
    """Whether all processes of a group pass. A pid of 0 is one that our pid namespace does not show."""
    return all(pid != 0 and test(pid) for pid in _read_pids(path))


def _is_descendant(pid: int) -> bool:
    return os.getpid() in _ancestor_pids(pid)


def _is_kin(pid: int) -> bool:
    """Ourselves, our descendants and ancestors, or the first process of our container."""
    return pid == 1 or _is_descendant(pid) or pid in _ancestor_pids(os.getpid())


def _ancestor_pids(pid: int) -> list[int]:
    line = []
    while pid > 0:
        line.append(pid)
        pid = _parent_pid(pid)
    return line


def _parent_pid(pid: int) -> int:
    try:
        stat = read_control(b"/proc/%d/stat" % pid)
    except OSError:
        return 0
    return int(stat.rpartition(b")")[2].split()[1])  # the name in brackets may hold anything


def enable_controllers(path: bytes, wanted: frozenset[str]) -> frozenset[str]:
    """Enables controllers for the children of a group, each on its own; returns the enabled ones."""
    for controller in sorted(wanted):
        try:
            write_control(path + b"/cgroup.subtree_control", b"+" + controller.encode())
        except OSError:
            continue  # it is reported as missing
    return wanted & frozenset(read_control(path + b"/cgroup.subtree_control").decode().split())


def move_to_leaf(path: bytes) -> None:
    """Moves a group's processes into a leaf of it, where they keep the limits that they had."""
    leaf = path + b"/" + HOST_LEAF.encode()
    os.makedirs(leaf, exist_ok=True)
    for pid in read_numbers(path + b"/cgroup.procs"):
        try:
            write_control(leaf + b"/cgroup.procs", b"%d" % pid)
        except ProcessLookupError:
            continue  # it ended meanwhile


class MemoryV2:
    def __init__(self, directory: bytes) -> None:
        self._directory = directory

    def limit(self, size_bytes: int) -> None:
        """Limits memory and forbids swap. (memory.oom.group is 0 in a new group: the largest process dies, not all.)"""
        write_control(self._directory + b"/memory.max", b"%d" % size_bytes)
        try:
            write_control(self._directory + b"/memory.swap.max", b"0")
        except FileNotFoundError:
            pass  # a kernel that does not account for swap

    def limit_sockets(self, size_bytes: int) -> None:
        """Does nothing: here the buffers of sockets are memory like any other."""

    def used_bytes(self) -> int:
        return int(read_control(self._directory + b"/memory.current"))

    def file_bytes(self) -> FileBytes:
        return file_bytes(self._directory + b"/memory.stat", b"file")

    def peak_bytes(self) -> int | None:
        try:
            return int(read_control(self._directory + b"/memory.peak"))
        except FileNotFoundError:  # before 5.19
            return None

    def oom_kills(self) -> int:
        return read_field(self._directory + b"/memory.events", b"oom_kill")


class CpuV2:
    def __init__(self, directory: bytes) -> None:
        self._directory = directory

    def limit(self, cpus: float) -> None:
        write_control(self._directory + b"/cpu.max", b"%d 100000" % max(1000, cpus * 100_000))


class CpuClockV2:
    """CPU time. cpu.stat is in every group, whether or not it has the cpu controller."""

    def __init__(self, directory: bytes) -> None:
        self._directory = directory

    def seconds(self) -> float:
        return read_field(self._directory + b"/cpu.stat", b"usage_usec") / 1e6


class FreezerV2:
    """Frozen processes of version 2 can be killed as they are."""

    FILE, FROZEN, THAWED = b"/cgroup.freeze", b"1", b"0"

    def __init__(self, directory: bytes) -> None:
        self._directory = directory

    def freeze(self) -> None:
        write_control(self._directory + self.FILE, self.FROZEN)

    def thaw(self) -> None:
        write_control(self._directory + self.FILE, self.THAWED)

    def frozen(self) -> bool:
        return read_field(self._directory + b"/cgroup.events", b"frozen") == 1
