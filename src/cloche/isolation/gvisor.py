"""The backend `gvisor`: each sandbox has a kernel of its own, gVisor's, which runs as a process of the host.

A template's guest is started once (`cloche.guest.zygote.standalone`), saved with everything imported, and restored for
every sandbox. Restored ones that wait in a pool are frozen by the host: gVisor's own threads would use
CPU time for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from cloche import errors
from cloche.guest.paths import HOST_DIRECTORY, STANDALONE_FILTER, STANDALONE_ORDER
from cloche.isolation import rootfs
from cloche.isolation.backend_cgroups import BackendCgroups
from cloche.isolation.base import CellMounts, CellSpec, CellStats, CellVolume, SandboxCell
from cloche.isolation.cell import CellSockets, ProcessCell, wait_ended
from cloche.isolation.launch import link_root_paths, make_mount_point, write_root_files
from cloche.isolation.namespaces import compiled_policy
from cloche.isolation.nursery import IMPORT_SECONDS, spec_fields
from cloche.isolation.runsc import Runsc, SandboxBundle, find_runsc
from cloche.linux.cgroups import Group, InstanceGroups
from cloche.linux.remove_tree import remove_tree
from cloche.model import MIB, Limits, Template

BACKEND_NAME = "gvisor"
# Of gVisor itself, of what was imported, of which each sandbox has a copy, and of what programs can take before init's
# watch has looked: at this limit the whole sandbox ends.
OVERHEAD_BYTES = 512 * MIB
OVERHEAD_THREADS = 512
THREADS_PER_PROCESS = 4  # of gVisor, for one thread of a program
BACKLOG = 512  # of connections that init relays
REST_SECONDS = 0.25  # after which a cell in a pool has done what its making has begun
RESTORE_SECONDS = 60.0
_BOOT = "import sys; sys.path.insert(0, '/opt/cloche/lib'); from cloche.guest.zygote.standalone import main; main()"
# Waits for its stdin's first line: it has been moved into its cgroup by then. Mounts that runsc makes (of a network
# namespace, in its own directory) are in a mount namespace that ends with it.
_WHEN_TOLD = ["/bin/sh", "-c", 'read -r _; exec unshare --mount --propagation private "$@"', "sh"]
_DEFAULTS = Limits()


class GvisorBackend:
    name = BACKEND_NAME
    seals_network = True

    def __init__(
        self,
        run_dir: Path,
        instance: str,
        is_live: Callable[[str], bool] = lambda _: True,
        *,
        packages: bool = False,
    ):
        """As that of `NamespacesBackend`. Raises IsolationUnavailable."""
        if os.geteuid() != 0:
            raise errors.IsolationUnavailable("the backend gvisor needs root: runsc restores sandboxes for root only")
        self._runsc = find_runsc()
        self._packages = packages
        self._directory = run_dir / BACKEND_NAME
        self._cgroups = BackendCgroups(run_dir, instance, is_live)
        self.weighs_cells = self._cgroups.weigh_cells
        self._filter = compiled_policy("cell")
        self._nurseries: list[GvisorNursery] = []

    async def start(self, template: Template) -> GvisorNursery:
        directory = self._directory / str(len(self._nurseries) + 1)
        bundle = await asyncio.to_thread(self._write_bundle, template, directory)
        nursery = GvisorNursery(template, directory, bundle, self._runsc, self._cgroups.parent)
        try:
            await nursery.save_image()
        except BaseException:
            await nursery.aclose()
            raise
        self._nurseries.append(nursery)
        return nursery

    def _write_bundle(self, template: Template, directory: Path) -> SandboxBundle:
        root = directory / "root"
        root.mkdir(parents=True)
        plan = rootfs.plan_root(template, packages=self._packages)
        built: dict[str, Any] = msgspec.to_builtins(plan)
        write_root_files(str(root), built)
        env = rootfs.program_environment(template)
        order = {"imports": list(template.imports), "env": {**env, **template.env}}
        (root / STANDALONE_ORDER[1:]).write_text(json.dumps(order))
        (root / STANDALONE_FILTER[1:]).write_bytes(self._filter)
        (root / HOST_DIRECTORY[1:]).mkdir()
        (root / "opt/cloche/nothing").touch()  # lies over files of /proc
        binds = [*plan.binds, *((f"{root}/{source}", name) for name, source in plan.covers.items())]
        for source, name in plan.binds:
            make_mount_point(source, f"{root}/{name}")
        link_root_paths(str(root), built)
        command = [f"{rootfs.ENV_DIRECTORY}/bin/python3", "-I", "-c", _BOOT]
        return SandboxBundle(root, binds, command, rootfs.import_environment(template))

    def disown(self) -> None:
        self._cgroups.disown()

    async def aclose(self) -> bool:
        for nursery in self._nurseries:
            await nursery.aclose()
        await asyncio.to_thread(remove_tree, self._directory)
        return await self._cgroups.aclose()


class GvisorNursery:
    def __init__(
        self,
        template: Template,
        directory: Path,
        bundle: SandboxBundle,
        runsc: Runsc,
        parent: InstanceGroups | None,
    ):
        self.template = template
        self._directory = directory
        self._bundle = bundle
        self._runsc = runsc
        self._parent = parent
        self._image = directory / "image"
        self._made = 0
        self._closed = False
        self._cells: set[GvisorCell] = set()

    @property
    def alive(self) -> bool:
        return not self._closed

    async def save_image(self) -> None:
        """Starts the guest, and saves it when its imports are done. Raises NurseryFailed."""
        start = RunscStart(self, self._directory / "seed", self._take_group("seed"))
        try:
            async with asyncio.timeout(IMPORT_SECONDS):
                await start.run_guest()
                await start.save(self._image)
        except TimeoutError:
            raise errors.NurseryFailed(
                f"template {self.template.ref}: its imports took longer than {IMPORT_SECONDS:.0f} s"
            ) from None
        finally:
            await start.discard()

    async def spawn(self, spec: CellSpec, mounts: CellMounts | None = None) -> SandboxCell:
        if mounts is not None:
            raise errors.Unavailable(f"the backend {BACKEND_NAME} has no volumes")
        if self._closed:
            raise errors.NurseryFailed(f"the nursery of {self.template.ref} has ended")
        self._made += 1
        name = str(self._made)
        group = self._take_group(f"cell-{self._directory.name}-{name}")
        start = RunscStart(self, self._directory / f"cell-{name}", group)
        wires = CellSockets()
        try:
            async with asyncio.timeout(RESTORE_SECONDS):
                pidfd = await start.restore(self._image, wires, {**spec_fields(spec), **_OWN_IDS, "token": wires.token})
        except BaseException as error:
            wires.close()
            await start.discard()
            if isinstance(error, TimeoutError):
                raise errors.NurseryFailed(f"no sandbox was restored in {RESTORE_SECONDS:.0f} s") from None
            raise
        cell = GvisorCell(name, wires, pidfd, group, start.sockets, lambda: self._on_closed(cell, start))
        self._cells.add(cell)
        return cell

    def _on_closed(self, cell: GvisorCell, start: RunscStart) -> None:
        self._cells.discard(cell)
        start.remove_directory()

    def bundle_for(self, directory: Path) -> Path:
        """Writes the bundle of a sandbox into its directory, made here. Returns the directory of its sockets."""
        sockets = directory / "host"
        directory.mkdir(parents=True)
        sockets.mkdir(mode=0o700)  # for init alone
        self._bundle.write(directory, sockets)
        return sockets

    def command(self, directory: Path, *words: str) -> list[str]:
        return self._runsc.command(directory / "state", *words)

    def failure(self, why: str) -> errors.NurseryFailed:
        return errors.NurseryFailed(f"the nursery of {self.template.ref} failed: {why}")

    def _take_group(self, name: str) -> Group | None:
        if self._parent is None:
            return None
        group = self._parent.create(name)
        group.set_memory(_DEFAULTS.memory_and_space_bytes + OVERHEAD_BYTES)
        group.set_processes(_DEFAULTS.processes * THREADS_PER_PROCESS + OVERHEAD_THREADS)
        return group

    async def make_volume(self, size_bytes: int) -> CellVolume:
        raise errors.Unavailable(f"the backend {BACKEND_NAME} has no volumes")

    async def raw_cost_seconds(self) -> float:
        """The cost of a whole restore: nothing less makes a sandbox."""
        began = asyncio.get_running_loop().time()
        cell = await self.spawn(CellSpec())
        cost = asyncio.get_running_loop().time() - began
        await cell.aclose()
        return cost

    async def aclose(self) -> None:
        self._closed = True
        await asyncio.gather(*(cell.aclose() for cell in list(self._cells)))
        await asyncio.to_thread(remove_tree, self._directory)


_OWN_IDS = {"single": False, "sparse": False, "base_id": 0}  # those of its own kernel


class RunscStart:
    """One start of a sandbox by runsc, in a directory and a cgroup of its own."""

    def __init__(self, nursery: GvisorNursery, directory: Path, group: Group | None):
        self._nursery = nursery
        self._directory = directory
        self._group = group
        self._process: subprocess.Popen[bytes] | None = None
        self.sockets = nursery.bundle_for(directory)

    async def run_guest(self) -> None:
        """Runs the guest until it says that its imports are done. Raises NurseryFailed."""
        process = self._start("run", "--bundle", str(self._directory), "s", stdout=subprocess.PIPE)
        if process.stdout is None:
            raise ValueError("stdout must be a pipe")
        line = await asyncio.to_thread(process.stdout.readline)
        try:
            said = msgspec.json.decode(line, type=dict[str, str])
        except msgspec.DecodeError:
            raise self._nursery.failure(f"runsc: {self._last_words()}") from None
        if said.get("ev") != "ready":
            raise self._nursery.failure(said.get("message", "it did not say why")[:2000])

    async def save(self, image: Path) -> None:
        """Saves the running guest, which ends with it. Raises NurseryFailed."""
        words = ("checkpoint", "--compression=none", f"--image-path={image}", "s")
        saving = await asyncio.to_thread(
            subprocess.run, self._nursery.command(self._directory, *words), capture_output=True, check=False
        )
        if saving.returncode != 0:
            raise self._nursery.failure(f"runsc could not save it: {saving.stderr.decode(errors='replace')[-2000:]}")

    async def restore(self, image: Path, wires: CellSockets, spec: dict[str, Any]) -> int:
        """Restores the guest and gives it its sandbox. Returns the pidfd of gVisor's process. Raises NurseryFailed."""
        pid_file = self._directory / "pid"
        with listen_in(self.sockets, "sock") as listener:
            words = ("--detach", "--pid-file", str(pid_file), "--bundle", str(self._directory))
            process = self._start("restore", *words, f"--image-path={image}", "s", stdout=subprocess.DEVNULL)
            await self._wait_for(process)
            pidfd = os.pidfd_open(int(pid_file.read_text()))
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
                with connection:
                    wires.send_to_guest(connection, {"spec": spec})
            except BaseException:
                os.close(pidfd)
                raise
        os.unlink(self.sockets / "sock")
        return pidfd

    def _start(self, *words: str, stdout: int) -> subprocess.Popen[bytes]:
        with open(self._directory / "stderr", "wb") as stderr:
            process = subprocess.Popen(
                [*_WHEN_TOLD, *self._nursery.command(self._directory, *words)],
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
                cwd="/",
                env={"PATH": os.environ.get("PATH", "/usr/bin:/bin")},
                start_new_session=True,
            )
        self._process = process
        if self._group is not None:
            self._group.add(process.pid)
        if process.stdin is None:
            raise ValueError("stdin must be a pipe")
        # The second line waits in the pipe for a guest that is restored.
        process.stdin.write(b"go\nrestored\n" if "restore" in words else b"go\n")
        process.stdin.flush()
        return process

    async def _wait_for(self, process: subprocess.Popen[bytes]) -> None:
        pidfd = os.pidfd_open(process.pid)
        try:
            await wait_ended(pidfd)
        finally:
            os.close(pidfd)
        if process.wait() != 0:
            raise self._nursery.failure(f"runsc could not restore it: {self._last_words()}")

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            return (self._directory / "stderr").read_text(errors="replace").strip()[-2000:]
        return ""

    async def discard(self) -> None:
        """Ends all of it, and removes its directory and its cgroup."""
        if self._group is not None:
            self._group.kill()
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        if self._group is not None:
            for _ in range(100):
                if self._group.remove():
                    break
                await asyncio.sleep(0.01)
        self.remove_directory()

    def remove_directory(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def listen_in(directory: Path, name: str) -> socket.socket:
    """A non-blocking listener in a directory whose path may be longer than an address. Raises Unavailable."""
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        opened = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            listener.bind(f"/proc/self/fd/{opened}/{name}")
            listener.listen(BACKLOG)
        finally:
            os.close(opened)
    except OSError as error:
        raise errors.Unavailable(f"no socket could be made for a sandbox: {error.strerror}") from None
    return listener


class GvisorCell(ProcessCell):
    """Its pid 1, as the host sees it, is gVisor itself."""

    passes_descriptors = False

    def __init__(
        self,
        name: str,
        wires: CellSockets,
        pidfd: int,
        group: Group | None,
        sockets: Path,
        on_closed: Callable[[], None],
    ):
        super().__init__(name, wires.init, wires.first_kernel(), pidfd, group, on_closed)
        self._sockets = sockets
        self._rest: asyncio.TimerHandle | None = None
        self._is_resting = False

    def set_limits(self, limits: Limits) -> None:
        if self._group is not None:
            self._group.set_memory(limits.memory_and_space_bytes + OVERHEAD_BYTES)
            self._group.set_cpus(limits.cpus)
            self._group.set_processes(limits.processes * THREADS_PER_PROCESS + OVERHEAD_THREADS)

    def limits_for_init(self, limits: Limits) -> dict[str, int]:
        """The host's limits are for gVisor and all in it: reaching them ends the sandbox. Init's are lower."""
        return {
            "watch_memory_bytes": limits.memory_and_space_bytes,
            "data_bytes": limits.memory_bytes,
            "processes": limits.processes,
        }

    def stats(self) -> CellStats:
        """With the memory of gVisor itself. How many processes there are, only it knows."""
        seen = super().stats()
        return CellStats(memory_bytes=seen.memory_bytes, cpu_seconds=seen.cpu_seconds)

    async def freeze(self) -> bool:
        return False  # the host sees no single program: init stops them

    def thaw(self) -> None:
        """`freeze` does nothing."""

    def open_guest_socket(self, name: str) -> socket.socket:
        return listen_in(self._sockets, name)

    def rest(self) -> None:
        self._rest = asyncio.get_running_loop().call_later(REST_SECONDS, self._freeze_all)

    def _freeze_all(self) -> None:
        self._rest = None
        if self._group is not None and not self._closed:
            self._is_resting = True
            self._group.freeze()

    def wake(self) -> None:
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None
        if self._is_resting and self._group is not None and not self._closed:
            self._group.thaw()
            self._is_resting = False

    async def _kill_and_close(self) -> None:
        if self._rest is not None:
            self._rest.cancel()
        if self._group is not None:
            self._group.kill()  # gVisor's other process too; and none that is frozen could die
        await super()._kill_and_close()
