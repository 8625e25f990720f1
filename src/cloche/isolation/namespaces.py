"""The default backend: Linux namespaces, cgroups, seccomp and landlock. No Docker, no KVM, no root daemon."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from cloche import errors
from cloche.isolation import ids, rootfs
from cloche.isolation.base import CellMounts, CellSpec, SandboxCell
from cloche.isolation.channel import close_all
from cloche.isolation.ids import volume_maps
from cloche.isolation.nursery import VolumeTrees, ZygoteNursery, ZygoteOrder, limit_imports, start_process
from cloche.isolation.probe import refuse_unless_possible
from cloche.linux import cgroups, seccomp
from cloche.linux.cgroups import InstanceGroups
from cloche.model import KIB, Limits, Template

# Removes cgroups that were still busy when they were to be removed, a moment later.

FIRST_SWEEP_SECONDS = 0.5
MAX_SWEEP_SECONDS = 30.0  # a process blocked in the kernel (a disk that does not answer) dies when that is over


class CgroupSweeper:
    """Looks again while there is something left, less and less often. Without it they would last as long as we do.

    A cell that was forked just when its zygote was killed, or its maker cancelled, takes a moment to die.
    """

    def __init__(self, parent: InstanceGroups):
        self._parent = parent
        self._pause_seconds = FIRST_SWEEP_SECONDS
        self._next: asyncio.TimerHandle | None = None
        parent.on_busy = self._sweep_later

    def close(self) -> None:
        self._parent.on_busy = None
        if self._next is not None:
            self._next.cancel()

    def _sweep_later(self) -> None:
        if self._next is None:
            self._next = asyncio.get_running_loop().call_later(self._pause_seconds, self._sweep_once)

    def _sweep_once(self) -> None:
        self._next = None
        if self._parent.sweep_busy():
            self._pause_seconds = FIRST_SWEEP_SECONDS
        else:
            self._pause_seconds = min(2 * self._pause_seconds, MAX_SWEEP_SECONDS)
            self._sweep_later()


# Volumes as the host sees them: a name known to a zygote, and descriptors of mounts that go from it into
# cells.
#
# The host never opens a path in one. A mount comes from the zygote that made the volume, and goes with the
# order for a cell to that cell's own zygote, which may be another one.

_BYTES_PER_INODE = 4 * KIB


class ZygoteVolume:
    """Made by `make`."""

    def __init__(self, zygote: ZygoteNursery, name: str, size_bytes: int):
        self._zygote = zygote
        self._name = name
        self.bytes = size_bytes

    @classmethod
    async def make(cls, zygote: ZygoteNursery, size_bytes: int, owner: int) -> ZygoteVolume:
        """A new volume. `owner`: the owner's id inside it. Raises NurseryFailed, Unavailable."""
        volume = cls(zygote, secrets.token_hex(8), size_bytes)
        inodes = max(size_bytes // _BYTES_PER_INODE, 1024)
        try:
            asked = zygote.ask_volume("make", volume=volume._name, bytes=size_bytes, inodes=inodes, owner=owner)
            close_all(await asked)
        except BaseException:  # a cancelled caller does not know whether it was made
            volume.drop()
            raise
        return volume

    @property
    def alive(self) -> bool:
        return self._zygote.alive

    async def open_tree(self, share: dict[str, Any]) -> int:
        fds = await self._zygote.ask_volume("tree", volume=self._name, **volume_maps(share))
        if len(fds) != 1:
            close_all(fds)
            raise errors.NurseryFailed("the zygote passed no mount for a volume")
        return fds[0]

    def drop(self) -> None:
        self._zygote.tell_volume("drop", volume=self._name)


@asynccontextmanager
async def volume_trees(mounts: CellMounts, share: dict[str, Any]) -> AsyncIterator[VolumeTrees]:
    """Mounts for a cell with those ids, until its zygote has them. Raises as `Volume.tree` does."""
    fds: list[int] = []
    try:
        for volume in mounts.volumes.values():
            fds.append(await volume.open_tree(share))
        yield VolumeTrees(list(mounts.volumes), fds, mounts.bytes)
    finally:
        close_all(fds)


_PROGRAM_ENV = {
    "PATH": "/home/user/.local/bin:/opt/cloche/front/bin:/opt/cloche/env/bin:/opt/cloche/programs:"
    "/usr/local/sbin:/usr/local/bin:/usr/sbin:/opt/cloche/python/bin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "SHELL": "/bin/bash",
    "MPLBACKEND": "Agg",
    "TZ": "UTC",
}
# One thread while importing: threads do not survive a fork. The kernel lifts this in the child.
_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_DEFAULTS = Limits()
_SPARE_SECONDS = 0.02
_SWEEPS, _SWEEP_SECONDS = 200, 0.01
_CGROUPS_RECORD = "cgroups"  # in an instance's directory: where its cgroups are
_ONE_THREAD = dict.fromkeys(_THREAD_VARIABLES, "1")


PID_NAMESPACES = 3  # the one that hides the host's, the nursery's, the cell's: see `launch`


class NamespacesBackend:
    name = "namespaces"
    seals_network = True

    def __init__(
        self,
        run_dir: Path,
        instance: str,
        is_live: Callable[[str], bool] = lambda _: True,
        *,
        packages: bool = False,
    ):
        """`run_dir` is this instance's own directory. `is_live(instance)` tells whether another one still runs.

        `packages`: whether installers inside find the host's package index.
        """
        refuse_unless_possible()
        self._packages = packages
        self._root = run_dir / "root"
        self._root.mkdir(parents=True, exist_ok=True)
        self._ids = ids.find_mapping()
        self._slices = ids.IdRanges(self._ids)
        found = cgroups.probe_cgroups()
        found.remove_leftovers(is_live)
        _remove_recorded(run_dir.parent, is_live)
        self._parent = found.parent(instance) if {"memory", "pids"} - found.missing else None
        self.weighs_cells = self._parent is not None and "cpu" not in self._parent.missing
        self._sweeper = CgroupSweeper(self._parent) if self._parent is not None else None
        if self._parent is not None:
            (run_dir / _CGROUPS_RECORD).write_text("\n".join(self._parent.directories))
        self._programs = {name: _compiled_policy(name) for name in ("nursery", "cell")}
        self._nurseries: list[NamespaceNursery] = []
        self._started = 0

    async def start(self, template: Template) -> NamespaceNursery:
        self._started += 1
        group = self._parent.create(f"nursery-{self._started}") if self._parent else None
        if group is not None:
            limit_imports(group)
        ours, theirs = socket.socketpair()
        order = self._make_order(template)
        with theirs:
            process = start_process(order, theirs, group, [str(theirs.fileno())])
        zygote = ZygoteNursery(template, process, self._parent, group, pid_namespaces=PID_NAMESPACES)
        await zygote.begin(ours, order)
        nursery = NamespaceNursery(template, zygote, self._slices, self._parent, self._started)
        self._nurseries = [*(each for each in self._nurseries if not each.is_gone), nursery]
        return nursery

    def _make_order(self, template: Template) -> ZygoteOrder:
        rootfs.compile_programs(template)
        env = {**_PROGRAM_ENV, **rootfs.program_environment(template)}
        stdin: dict[str, Any] = {
            "host_pid": os.getpid(),
            "ids": self._ids.order(),
            "root": str(self._root),
            "plan": msgspec.to_builtins(rootfs.plan_root(template, packages=self._packages)),
            "open_files": 80 << 10,  # more than any sandbox may have
            "seccomp": self._programs["nursery"].hex(),
            "python": f"{rootfs.ENV_DIRECTORY}/bin/python3",
            "env": {**env, **_ONE_THREAD, "HOME": "/tmp", "MPLCONFIGDIR": "/tmp"},
        }
        first = {
            "do": "start",
            "imports": list(template.imports),
            "env": {**env, **template.env},
            "walls": True,
            "single": self._ids.single,
        }
        command = [sys.executable, "-I", "-m", "cloche.isolation.launch"]
        return ZygoteOrder(command, json.dumps(stdin).encode(), first, self._programs["cell"])

    def disown(self) -> None:
        if self._parent is not None:
            self._parent.disown()

    async def aclose(self) -> bool:
        for nursery in self._nurseries:
            await nursery.wait_for_cells()
            await nursery.aclose()
        if self._parent is None or self._sweeper is None:
            return True
        self._sweeper.close()
        await _sweep_cgroups(self._parent)
        return self._parent.remove()


class NamespaceNursery:
    def __init__(
        self,
        template: Template,
        zygote: ZygoteNursery,
        slices: ids.IdRanges,
        parent: cgroups.InstanceGroups | None,
        number: int,
    ):
        self.template = template
        self._zygote = zygote
        self._slices = slices
        self._parent = parent
        self._number = number
        self._made = 0
        self._spare: cgroups.Group | None = None  # the next cell's cgroup: making one takes as long as a fork

    @property
    def alive(self) -> bool:
        return self._zygote.alive

    @property
    def is_gone(self) -> bool:
        return self._zygote.is_gone

    async def spawn(self, spec: CellSpec, mounts: CellMounts | None = None) -> SandboxCell:
        try:
            share = self._slices.take()
        except LookupError as error:
            raise errors.NurseryFailed(str(error)) from None
        if mounts is not None:
            return await self._spawn_with_volumes(spec, share, mounts)
        group = self._take_group(spec)
        try:
            return await self._zygote.spawn(spec, share, group, lambda: self._slices.give_back(share))
        except BaseException:
            self._give_up(share, group)
            raise

    async def _spawn_with_volumes(self, spec: CellSpec, share: dict[str, Any], mounts: CellMounts) -> SandboxCell:
        """As `spawn`, with volumes."""

        def on_closed() -> None:
            self._slices.give_back(share)
            mounts.let_go()

        group: cgroups.Group | None = None
        try:
            async with volume_trees(mounts, share) as trees:
                group = self._take_group(spec)
                return await self._zygote.spawn(spec, share, group, on_closed, trees)
        except BaseException:
            self._give_up(share, group)
            raise

    def _give_up(self, share: dict[str, Any], group: cgroups.Group | None) -> None:
        """Kills a cell that may have been forked before its zygote died or its maker was cancelled, and has no
        owner.
        """
        if group is not None:
            group.kill()
            group.remove()
        self._slices.give_back(share)

    async def make_volume(self, size_bytes: int) -> ZygoteVolume:
        return await ZygoteVolume.make(self._zygote, size_bytes, self._slices.volume_owner)

    def _take_group(self, spec: CellSpec) -> cgroups.Group | None:
        """The cell's cgroup, with limits from the start: until it is taken, a cell must not be able to grow either."""
        if self._parent is None:
            return None
        group, self._spare = self._spare or self._new_group(self._parent), None
        if spec.space_bytes != _DEFAULTS.space_bytes:
            group.set_memory(_DEFAULTS.memory_bytes + spec.space_bytes)
        asyncio.get_running_loop().call_later(_SPARE_SECONDS, self._prepare_spare, self._parent)
        return group

    def _new_group(self, parent: cgroups.InstanceGroups) -> cgroups.Group:
        self._made += 1
        group = parent.create(f"cell-{self._number}-{self._made}")
        group.set_memory(_DEFAULTS.memory_bytes + _DEFAULTS.space_bytes)
        group.set_processes(_DEFAULTS.processes)
        return group

    def _prepare_spare(self, parent: cgroups.InstanceGroups) -> None:
        if self._spare is None and self.alive:
            self._spare = self._new_group(parent)

    async def raw_cost_seconds(self) -> float:
        return await self._zygote.raw_cost_seconds()

    async def wait_for_cells(self) -> None:
        """Waits a while for cells that are being closed: their makers are just being refused."""
        for _ in range(_SWEEPS):
            if not self._zygote.cells:
                return
            await asyncio.sleep(_SWEEP_SECONDS)

    async def aclose(self) -> None:
        await self._zygote.aclose()
        if self._spare is not None:
            self._spare.remove()
            self._spare = None


async def _sweep_cgroups(parent: cgroups.InstanceGroups) -> None:
    """Waits a while for the last of the dead to be gone: on a busy machine that takes long."""
    for _ in range(_SWEEPS):
        if parent.sweep_busy():
            return
        await asyncio.sleep(_SWEEP_SECONDS)


def _remove_recorded(instances: Path, is_live: Callable[[str], bool]) -> None:
    """Cgroups of dead instances that started in another cgroup than ours, so that they lie where we would not look."""
    for record in instances.glob(f"*/{_CGROUPS_RECORD}"):
        if not is_live(record.parent.name):
            cgroups.remove_dead(record.read_text().splitlines())


def _compiled_policy(name: str) -> bytes:
    policy = files("cloche.isolation") / "policy" / f"{name}.toml"
    return seccomp.compile_policy(seccomp.load_policy(Path(str(policy))))
