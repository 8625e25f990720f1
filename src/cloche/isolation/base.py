"""The interface between the engine and isolation: the contract of a backend.

A *backend* starts *nurseries*; a nursery makes *cells*; a cell is one confined process tree with the guest's
init as pid 1. The protocol with init over `SandboxCell.socket` is the same for every backend (see
`cloche.guest.wire`).
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from cloche.model import Limits, Struct, Template, User

Socket = socket.socket  # a cell has one by the module's name


class CellSpec(Struct):
    """The properties that a cell is built with and cannot change later. Two equal specs may share a pool."""

    user: User = "user"  # the user of the first kernel
    space_bytes: int = Limits().space_bytes
    open_files: int = Limits().open_files


class CellStats(Struct):
    memory_bytes: int | None = None  # None: not known on this host
    file_bytes: int | None = None  # the part of it that is pages of files, with those of tmpfs
    shared_bytes: int | None = None  # the part of that which is tmpfs, where a sandbox's files are, and shared memory
    cpu_seconds: float | None = None
    processes: int | None = None


class FirstKernel(Struct):
    """Our ends of the kernel that every cell starts by itself, under the name "0". The taker closes them."""

    token: str
    fds: tuple[int, int, int]  # channel, stdout, stderr


class SandboxCell(Protocol):
    name: str
    first_kernel: FirstKernel
    socket: socket.socket  # the host's end of init's channel; early requests wait until isolation is complete

    passes_descriptors: bool  # whether its guest can; else what exists inside only is relayed

    def open_guest_socket(self, name: str) -> Socket:
        """A listener of the host's to which its init can connect by that name, where it passes no descriptors."""

    def listen(self, on_event: Callable[[dict[str, Any]], None]) -> None:
        """Calls `on_event` for events that init does not see, in init's format: that the first kernel has ended."""

    def set_limits(self, limits: Limits) -> None:
        """Applies memory, CPU and process limits. Cheap; may be called again."""

    def limits_for_init(self, limits: Limits) -> dict[str, int]:
        """The limits that init must enforce because the host cannot: fields of its `configure`, often none."""

    def stats(self) -> CellStats: ...

    def oom_kills(self) -> int:
        """The number of OOM kills alone: cheap enough to be read after every execution."""

    def cpu_seconds(self) -> float | None:
        """The CPU time used so far, as cheap; None where this host does not know."""

    def memory_peak_bytes(self) -> int | None:
        """The most that it ever used, with its files; None where this host does not know."""

    async def freeze(self) -> bool:
        """Stops every process of the cell but init, and returns when they stand still.

        False, and nothing done, if this host cannot: then init can be asked to (see `guest.init.freeze`). Raises
        Unavailable if it failed, or the cell has ended: then all run as before.
        """

    def thaw(self) -> None:
        """Lets them go on. Cheap. Nothing if they were not stopped, or the cell has ended."""

    def rest(self) -> None:
        """It waits in a pool from now on, and may stand still as a whole until `wake`, in a moment."""

    def wake(self) -> None:
        """It is wanted. Cheap; harmless if it does not rest."""

    def make_fork_server(self) -> Socket | None:
        """A socket for init, with a fork server that has everything imported at its other end; closed if there is
        none.

        None where init needs none, or the cell has ended.
        """

    @property
    def alive(self) -> bool: ...

    async def aclose(self) -> None:
        """Kills everything in the cell. Afterwards no process, mount, cgroup or file of it remains."""


class CellVolume(Protocol):
    """A directory with a size, which lives as long as it is not dropped, or a cell has it."""

    bytes: int

    @property
    def alive(self) -> bool:
        """Whether `tree` can work. Cells that have it keep it."""

    async def open_tree(self, share: dict[str, Any], *, read_only: bool, subpath: str) -> int:
        """A mount of it, or of a directory in it, for one cell, with those ids, as a descriptor.

        Raises NurseryFailed, and Unavailable also where it has no such directory.
        """

    def drop(self) -> None:
        """Cells that have it keep it. Never waits; harmless when its nursery has ended."""


class VolumeMount(NamedTuple):
    """A volume as one cell has it."""

    volume: CellVolume
    read_only: bool = False
    subpath: str = ""  # the directory in it that is mounted; empty: all of it


class CellMounts(NamedTuple):
    """The volumes that a cell has from its beginning on, and where."""

    volumes: dict[str, VolumeMount]  # by path
    let_go: Callable[[], None]  # called when the cell is gone; may be called again
    leave: Callable[[], None]  # called when its end has begun; may be called again, also when it is gone

    @property
    def bytes(self) -> int:
        return sum(each.volume.bytes for each in self.volumes.values())


class Nursery(Protocol):
    template: Template

    @property
    def alive(self) -> bool:
        """Whether `spawn` can work. A dead nursery's live cells stay alive."""

    async def spawn(self, spec: CellSpec, mounts: CellMounts | None = None) -> SandboxCell:
        """A new cell. If its walls cannot go up, its init reports that on the channel and ends.

        Raises NurseryFailed, and Unavailable where this host cannot mount volumes.
        """

    async def make_volume(self, size_bytes: int) -> CellVolume:
        """An empty one. Raises NurseryFailed, and Unavailable where this host has none."""

    async def raw_cost_seconds(self) -> float:
        """The present cost of a bare fork with all its namespaces and one byte back: no `spawn` can beat it."""

    async def aclose(self) -> None:
        """Ends the zygote; and, once its last cell is gone, everything that held them."""


class HostCheck(Struct):
    """One line of `cloche doctor`: the thing probed, the finding, and the advice."""

    name: str
    state: str  # "enforced" | "best effort" | "missing"
    detail: str
    advice: str = ""


class IsolationBackend(Protocol):
    name: str
    weighs_cells: bool  # whether a cell's CPU time is shared out apart from the host's
    seals_network: bool  # whether a cell reaches nothing but its own loopback, unless it is let through a door

    async def start(self, template: Template) -> Nursery:
        """A nursery for that template, imports done. Raises NurseryFailed or IsolationUnavailable."""

    def disown(self) -> None:
        """In a forked child: releases locks that must end with the parent."""

    async def aclose(self) -> bool:
        """Ends all nurseries. False if something of ours is left: the instance's directory must stay to tell of it."""
