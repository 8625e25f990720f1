"""The default backend: Linux namespaces, cgroups, seccomp and landlock. No Docker, no KVM, no root daemon."""

from __future__ import annotations

import asyncio
import contextlib
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
from cloche.isolation.backend_cgroups import BackendCgroups
from cloche.isolation.base import CellMounts, CellSpec, SandboxCell
from cloche.isolation.channel import close_all
from cloche.isolation.ids import volume_maps
from cloche.isolation.nursery import (
    SOCKET_BYTES,
    VolumeTrees,
    ZygoteNursery,
    ZygoteOrder,
    limit_imports,
    start_process,
)
from cloche.isolation.probe import guarded_ids, refuse_unless_possible
from cloche.linux import cgroups, seccomp
from cloche.linux.lock_guard import LockGuard
from cloche.model import KIB, Limits, Template

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

    async def open_tree(self, share: dict[str, Any], *, read_only: bool, subpath: str) -> int:
        fds = await self._zygote.ask_volume(
            "tree", volume=self._name, read_only=read_only, subpath=subpath, **volume_maps(share)
        )
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
        for mount in mounts.volumes.values():
            fds.append(await mount.volume.open_tree(share, read_only=mount.read_only, subpath=mount.subpath))
        yield VolumeTrees(list(mounts.volumes), fds, mounts.bytes)
    finally:
        close_all(fds)


_DEFAULTS = Limits()
_SPARE_SECONDS = 0.02
_SWEEPS, _SWEEP_SECONDS = 200, 0.01


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
        self._cgroups = BackendCgroups(run_dir, instance, is_live)
        self._parent = self._cgroups.parent
        self.weighs_cells = self._cgroups.weigh_cells
        self._programs = {name: compiled_policy(name) for name in ("nursery", "nursery-uncharged", "cell")}
        self._nurseries: list[NamespaceNursery] = []
        self._started = 0
        self._guarding: asyncio.Future[LockGuard | None] | None = None

    async def start(self, template: Template) -> NamespaceNursery:
        self._started += 1
        await self._guard_locks()
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

    async def _guard_locks(self) -> None:
        """Before any code of a template runs. Where the host has no such guard, `cloche doctor` says so."""
        if self._guarding is None:
            self._guarding = asyncio.get_running_loop().run_in_executor(None, _attach_guard, self._ids)
        await asyncio.shield(self._guarding)

    def _make_order(self, template: Template) -> ZygoteOrder:
        rootfs.compile_programs(template)
        uncharged = self._parent is None or "memory" in self._parent.missing
        env = rootfs.program_environment(template)
        stdin: dict[str, Any] = {
            "host_pid": os.getpid(),
            "ids": self._ids.order(),
            "root": str(self._root),
            "plan": msgspec.to_builtins(rootfs.plan_root(template, packages=self._packages)),
            "open_files": 80 << 10,  # more than any sandbox may have
            "uncharged": uncharged,
            "seccomp": self._programs["nursery-uncharged" if uncharged else "nursery"].hex(),
            "python": f"{rootfs.ENV_DIRECTORY}/bin/python3",
            "env": rootfs.import_environment(template),
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
        self._cgroups.disown()

    async def aclose(self) -> bool:
        for nursery in self._nurseries:
            await nursery.wait_for_cells()
            await nursery.aclose()
        if self._guarding is not None and (guard := await self._guarding) is not None:
            guard.close()
        return await self._cgroups.aclose()


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
        group.set_memory(_DEFAULTS.memory_and_space_bytes)
        group.set_sockets(SOCKET_BYTES)
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


def _attach_guard(mapping: ids.IdMapping) -> LockGuard | None:
    guarded = guarded_ids(mapping)
    if guarded is not None:
        with contextlib.suppress(OSError):
            return LockGuard(guarded)
    return None


def compiled_policy(name: str) -> bytes:
    policy = files("cloche.isolation") / "policy" / f"{name}.toml"
    return seccomp.compile_policy(seccomp.load_policy(Path(str(policy))))
