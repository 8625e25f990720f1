"""Version 2: one directory for all controllers, and the question of whose children one may be the parent of.

A group that has processes in it cannot hand controllers to its children (except the real root). So the base, below
which we make groups, is found in this order:
 - our own group, if it is the real root, or needs to hand on nothing;
 - our own group, if it was delegated to us and only we are in it: we then move ourselves into a leaf of it;
 - an ordinary user: the nearest group above that is ours to write and holds no process itself (a systemd user session);
 - root: the root of what is mounted, if it is the real one or holds no process;
 - a container, whose root group holds its processes: as a last resort those are moved into a leaf.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

from cloche.linux.cgroups.files import HOST_LEAF, FileBytes, Hierarchy, field, file_bytes, numbers, read, write

_ADVICE = "start Cloche with `systemd-run --user --scope -p Delegate=yes`, or as a service with Delegate=yes"


class Base(NamedTuple):
    """A directory to make groups in, and what its children can be given."""

    path: str
    controllers: frozenset[str]
    crowded: bool  # processes must be moved into a leaf before controllers can be handed on


def find_base(hierarchy: Hierarchy, wanted: frozenset[str]) -> Base | str:
    """The base for groups that need these controllers (those of them that there are), or why there is none."""
    own = hierarchy.own
    if own is None:
        return "the process's own group is not among those mounted"
    if is_real_root(own) or not wanted & controllers(own):
        if _writable(own):
            return Base(own, wanted & controllers(own), crowded=False)
    elif _delegated(own) and _only(own, _descends):
        return Base(own, wanted & controllers(own), crowded=True)
    for above in _above(hierarchy.mount, own):
        if _writable(above) and (is_real_root(above) or not _processes(above)):
            return Base(above, wanted & controllers(above), crowded=False)
    if own == hierarchy.mount and os.geteuid() == 0 and _writable(own) and _only(own, _is_kin):
        return Base(own, wanted & controllers(own), crowded=True)
    return _reason(own)


def _reason(own: str) -> str:
    if not _writable(own):
        return f"{own} is not ours to write; {_ADVICE}"
    return f"{own} holds processes that are not ours, so its children can be given no controllers; {_ADVICE}"


def controllers(path: str) -> frozenset[str]:
    try:
        return frozenset(read(os.fsencode(path) + b"/cgroup.controllers").decode().split())
    except OSError:
        return frozenset()


def is_real_root(path: str) -> bool:
    """Not merely the root of a cgroup namespace, which has a type like every other group."""
    return not os.path.exists(os.path.join(path, "cgroup.type"))


def _writable(path: str) -> bool:
    files = ("", "cgroup.procs", "cgroup.subtree_control")
    return all(os.access(os.path.join(path, file), os.W_OK) for file in files)


def _delegated(path: str) -> bool:
    """Given to us to manage: by its owner, or, as root may write everywhere, by the mark that systemd leaves."""
    if not _writable(path):
        return False
    return os.geteuid() != 0 or any(_marked(path, name) for name in ("user.delegate", "trusted.delegate"))


def _marked(path: str, name: str) -> bool:
    try:
        return os.getxattr(path, name) == b"1"
    except OSError:
        return False


def _above(mount: str, own: str) -> Iterator[str]:
    """Groups above our own to try: for root only the topmost, as those between are somebody's slices."""
    if os.geteuid() == 0:
        yield from [mount] if own != mount else []
        return
    while own != mount:
        own = os.path.dirname(own)
        yield own


def _processes(path: str) -> list[int]:
    return numbers(os.fsencode(path) + b"/cgroup.procs")


def _only(path: str, test: Callable[[int], bool]) -> bool:
    """Whether all processes of a group pass. A pid of 0 is one that our pid namespace does not show."""
    return all(pid != 0 and test(pid) for pid in _processes(path))


def _descends(pid: int) -> bool:
    return os.getpid() in _ancestry(pid)


def _is_kin(pid: int) -> bool:
    """Ourselves, our descendants and ancestors, or the first process of our container."""
    return pid == 1 or _descends(pid) or pid in _ancestry(os.getpid())


def _ancestry(pid: int) -> list[int]:
    line = []
    while pid > 0:
        line.append(pid)
        pid = _parent(pid)
    return line


def _parent(pid: int) -> int:
    try:
        stat = read(b"/proc/%d/stat" % pid)
    except OSError:
        return 0
    return int(stat.rpartition(b")")[2].split()[1])  # the name in brackets may hold anything


def hand_on(path: bytes, wanted: frozenset[str]) -> frozenset[str]:
    """Enables controllers for the children of a group, each on its own; those that are enabled afterwards."""
    for controller in sorted(wanted):
        try:
            write(path + b"/cgroup.subtree_control", b"+" + controller.encode())
        except OSError:
            continue  # it is reported as missing
    return wanted & frozenset(read(path + b"/cgroup.subtree_control").decode().split())


def make_room(path: bytes) -> None:
    """Moves a group's processes into a leaf of it, where they keep the limits that they had."""
    leaf = path + b"/" + HOST_LEAF.encode()
    os.makedirs(leaf, exist_ok=True)
    for pid in numbers(path + b"/cgroup.procs"):
        try:
            write(leaf + b"/cgroup.procs", b"%d" % pid)
        except ProcessLookupError:
            continue  # it ended meanwhile


class Memory:
    def __init__(self, directory: bytes) -> None:
        self._directory = directory

    def limit(self, size_bytes: int) -> None:
        """Limits memory and forbids swap. (memory.oom.group is 0 in a new group: the largest process dies, not all.)"""
        write(self._directory + b"/memory.max", b"%d" % size_bytes)
        try:
            write(self._directory + b"/memory.swap.max", b"0")
        except FileNotFoundError:
            pass  # a kernel that does not account for swap

    def used_bytes(self) -> int:
        return int(read(self._directory + b"/memory.current"))

    def file_bytes(self) -> FileBytes:
        return file_bytes(self._directory + b"/memory.stat", b"file")

    def peak_bytes(self) -> int | None:
        try:
            return int(read(self._directory + b"/memory.peak"))
        except FileNotFoundError:  # before 5.19
            return None

    def oom_kills(self) -> int:
        return field(self._directory + b"/memory.events", b"oom_kill")


class Cpu:
    def __init__(self, directory: bytes) -> None:
        self._directory = directory

    def limit(self, cpus: float) -> None:
        write(self._directory + b"/cpu.max", b"%d 100000" % max(1000, cpus * 100_000))


class Clock:
    """CPU time. cpu.stat is in every group, whether or not it has the cpu controller."""

    def __init__(self, directory: bytes) -> None:
        self._directory = directory

    def seconds(self) -> float:
        return field(self._directory + b"/cpu.stat", b"usage_usec") / 1e6


class Freezer:
    """Frozen processes of version 2 can be killed as they are."""

    FILE, FROZEN, THAWED = b"/cgroup.freeze", b"1", b"0"

    def __init__(self, directory: bytes) -> None:
        self._directory = directory

    def freeze(self) -> None:
        write(self._directory + self.FILE, self.FROZEN)

    def thaw(self) -> None:
        write(self._directory + self.FILE, self.THAWED)

    def frozen(self) -> bool:
        return field(self._directory + b"/cgroup.events", b"frozen") == 1
