"""The cgroups of one backend: made, swept when they were still busy, and removed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from cloche.linux import cgroups
from cloche.linux.cgroups import InstanceGroups

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


_SWEEPS, _SWEEP_SECONDS = 200, 0.01
_CGROUPS_RECORD = "cgroups"  # in an instance's directory: where its cgroups are


class BackendCgroups:
    """`parent` is None where this host has no cgroups for us. Removes those of dead instances first."""

    def __init__(self, run_dir: Path, instance: str, is_live: Callable[[str], bool]):
        found = cgroups.probe_cgroups()
        found.remove_leftovers(is_live)
        _remove_recorded(run_dir.parent, is_live)
        self.parent = found.parent(instance) if {"memory", "pids"} - found.missing else None
        self._sweeper = CgroupSweeper(self.parent) if self.parent is not None else None
        if self.parent is not None:
            (run_dir / _CGROUPS_RECORD).write_text("\n".join(self.parent.directories))

    @property
    def weigh_cells(self) -> bool:
        return self.parent is not None and "cpu" not in self.parent.missing

    def disown(self) -> None:
        """In a forked child: releases locks that must end with the parent."""
        if self.parent is not None:
            self.parent.disown()

    async def aclose(self) -> bool:
        """False if something of ours is left."""
        if self.parent is None or self._sweeper is None:
            return True
        self._sweeper.close()
        await _sweep_cgroups(self.parent)
        return self.parent.remove()


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
