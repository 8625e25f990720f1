"""The backend without walls, to test the interface of backends. It must be requested by its name,
`plain-unsafe`.

Programs run as Cloche's own user, see the host's files and network, and have no limits but the host's.
Nothing is private but the working directory. Never give it code that you would not run yourself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

from cloche import errors
from cloche.isolation.base import CellMounts, CellSpec, CellStats, CellVolume, SandboxCell
from cloche.isolation.cell import ProcessCell
from cloche.isolation.channel import Header
from cloche.isolation.nursery import ZygoteNursery, ZygoteOrder, start_process
from cloche.linux.remove_tree import remove_tree
from cloche.model import Limits, Template

BACKEND_NAME = "plain-unsafe"
_BOOT = """
import sys, types
sys.path.insert(0, sys.argv[2])
package = types.ModuleType("cloche"); package.__path__ = [sys.argv[1]]; sys.modules["cloche"] = package
from cloche.guest.zygote.main import main
main(int(sys.argv[3]))
"""


class PlainBackend:
    name = BACKEND_NAME
    weighs_cells = False
    seals_network = False

    def __init__(self, run_dir: Path, *, asked_for: str):
        if asked_for != BACKEND_NAME:
            raise errors.IsolationUnavailable(
                f"the backend without isolation must be requested by its name, {BACKEND_NAME!r}"
            )
        self._cells = run_dir / "cells"
        self._nurseries: list[PlainNursery] = []

    async def start(self, template: Template) -> PlainNursery:
        if template.image is not None:
            raise errors.NurseryFailed(f"{template.ref} is an imported image, which {BACKEND_NAME} cannot run")
        ours, theirs = socket.socketpair()
        order = self._make_order(template)
        with theirs:
            process = start_process(order, theirs, None, [str(theirs.fileno())])
        zygote = ZygoteNursery(template, process, None, None, pid_namespaces=0)
        await zygote.begin(ours, order)
        self._nurseries.append(PlainNursery(template, zygote, self._cells / str(process.pid)))
        return self._nurseries[-1]

    def _make_order(self, template: Template) -> ZygoteOrder:
        minor = ".".join(template.python_version.split(".")[:2])
        site = f"{template.root}/env/lib/python{minor}/site-packages"
        package = str(Path(__file__).parent.parent)
        env = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LANG": "C.UTF-8", "MPLBACKEND": "Agg", **template.env}
        first = {"do": "start", "imports": list(template.imports), "env": env, "walls": False, "single": True}
        return ZygoteOrder([template.python, "-I", "-S", "-c", _BOOT, package, site], b"", first, b"")

    def disown(self) -> None:
        """There is nothing to release."""

    async def aclose(self) -> bool:
        for nursery in self._nurseries:
            await nursery.aclose()
        remove_tree(self._cells)
        return True


class PlainNursery:
    def __init__(self, template: Template, zygote: ZygoteNursery, cells: Path):
        self.template = template
        self._zygote = zygote
        self._cells = cells
        self._made = 0

    @property
    def alive(self) -> bool:
        return self._zygote.alive

    async def make_volume(self, size_bytes: int) -> CellVolume:
        raise errors.Unavailable(f"volumes require isolation, which the backend {BACKEND_NAME} does not have")

    async def spawn(self, spec: CellSpec, mounts: CellMounts | None = None) -> SandboxCell:
        if mounts is not None:
            raise errors.Unavailable(f"volumes require isolation, which the backend {BACKEND_NAME} does not have")
        self._made += 1
        home = self._cells / str(self._made)
        places = {"/mnt/data": str(home / "data"), "/workspace": str(home / "workspace"), "/home/user": str(home)}
        for place in places.values():
            Path(place).mkdir(parents=True, exist_ok=True)
        extra = {"single": True, "places": places}
        cell = await self._zygote.spawn(spec, extra, None, lambda: remove_tree(home))
        return PlainCell(cell)

    async def raw_cost_seconds(self) -> float:
        return await self._zygote.raw_cost_seconds()

    async def aclose(self) -> None:
        await self._zygote.aclose()


class PlainCell:
    """A cell without a pid namespace: its init must be let to end its descendants before it ends itself."""

    passes_descriptors = True

    def __init__(self, cell: ProcessCell):
        self._cell = cell
        self.name = cell.name
        self.socket = cell.socket
        self.first_kernel = cell.first_kernel

    @property
    def alive(self) -> bool:
        return self._cell.alive

    def listen(self, on_event: Callable[[Header], None]) -> None:
        """Init sees everything here."""

    def make_fork_server(self) -> None:
        """Init has everything imported itself."""

    def set_limits(self, limits: Limits) -> None:
        self._cell.set_limits(limits)

    def limits_for_init(self, limits: Limits) -> dict[str, int]:
        return {}  # this backend has no limits but the host's

    def stats(self) -> CellStats:
        return self._cell.stats()

    def oom_kills(self) -> int:
        return self._cell.oom_kills()

    def cpu_seconds(self) -> float | None:
        return self._cell.cpu_seconds()

    def memory_peak_bytes(self) -> int | None:
        return self._cell.memory_peak_bytes()

    async def freeze(self) -> bool:
        return False  # this backend makes no cgroups

    def thaw(self) -> None:
        """There is nothing to thaw: `freeze` does nothing."""

    def open_guest_socket(self, name: str) -> socket.socket:
        return self._cell.open_guest_socket(name)

    def rest(self) -> None:
        """Costs nothing while it waits."""

    def wake(self) -> None:
        """It does not rest."""

    async def aclose(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        for _ in range(200):
            if not self._cell.alive:
                break
            await asyncio.sleep(0.005)
        await self._cell.aclose()
