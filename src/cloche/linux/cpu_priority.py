"""A server's own CPU group: where CPU is short, the server runs before the code that it serves.

    with raised_priority():
        ...   # this process, and its children, weigh as much as four others that want the same CPU

Otherwise a sandbox that is woken pushes aside the very server that woke it, and hundreds of them keep it
waiting while a CPU stands idle (docs/design/performance.md has the numbers). `nice` does not do it: with autogroups, as
most kernels have them, it weighs the processes of one session against each other alone.

Nothing happens where the host does not let us, or where the process would have to leave a group of version 2
that is managed elsewhere, such as a scope of systemd.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

from cloche.linux.cgroups import v1, v2
from cloche.linux.cgroups.files import (
    HOST_LEAF,
    Hierarchy,
    above_leaf,
    mounted_hierarchies,
    read_control,
    write_control,
)
from cloche.linux.cgroups.group import remove_directory

_TRIES = 3
WEIGHT = 4  # times that of a group with the default weight. With more, sandboxes wait longer and no more is done


class ServerGroup(NamedTuple):
    """A group for servers, and the file that its weight is written to."""

    directory: bytes
    file: bytes
    weight: int

    def enter(self) -> bool:
        """Returns whether it could enter; if not, nothing of it is left."""
        for _ in range(_TRIES):
            try:
                self._enter_group()
                return True
            except FileNotFoundError:
                continue  # another server has left and removed it meanwhile
            except OSError:
                break
        with contextlib.suppress(OSError):
            remove_directory(self.directory)
        return False

    def _enter_group(self) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.directory, 0o755)
        write_control(self.directory + self.file, b"%d" % self.weight)
        write_control(self.directory + b"/cgroup.procs", b"0")

    def leave(self) -> None:
        """Goes back to the group above, and removes it if no other server is in it."""
        with contextlib.suppress(OSError):  # that of a container, which can hold no processes any more
            write_control(os.path.dirname(self.directory) + b"/cgroup.procs", b"0")
            remove_directory(self.directory)


@contextlib.contextmanager
def raised_priority() -> Iterator[bool]:
    """Yields whether the priority could be had."""
    leaf = find_server_group(mounted_hierarchies())
    if leaf is None or not leaf.enter():
        yield False
        return
    try:
        yield True
    finally:
        leaf.leave()


def find_server_group(found: list[Hierarchy]) -> ServerGroup | None:
    """The group in which this process gets priority, in these hierarchies. Only reads."""
    for each in found:
        if each.version == 1 and "cpu" in each.controllers:
            return _server_group_v1(each)
    unified = next((each for each in found if each.version == 2), None)
    return None if unified is None else _server_group_v2(unified)


def _server_group_v1(hierarchy: Hierarchy) -> ServerGroup | None:
    if hierarchy.own is None or v1.unusable_reason(hierarchy):
        return None
    directory = os.path.join(above_leaf(hierarchy.own), HOST_LEAF)
    return ServerGroup(os.fsencode(directory), b"/cpu.shares", 1024 * WEIGHT)


def _server_group_v2(hierarchy: Hierarchy) -> ServerGroup | None:
    """The leaf that `cgroups_v2.move_to_leaf` has put us in, or one below the real root.

    The process never leaves another service's group.
    """
    own = hierarchy.own
    if own is None or not (os.path.basename(own) == HOST_LEAF or v2.is_real_root(own)):
        return None
    above = os.fsencode(above_leaf(own))
    try:
        enabled = read_control(above + b"/cgroup.subtree_control").split()
    except OSError:
        return None
    return ServerGroup(above + b"/" + HOST_LEAF.encode(), b"/cpu.weight", 100 * WEIGHT) if b"cpu" in enabled else None
