"""The zygote: one process with everything imported, from which kernels are forked.

`init_factory` forks their inits. The zygote runs as root of the nursery's user namespace. It has no threads
and no event loop: both would not survive a fork. Modules imported here are in every init factory, too: all
others are imported after it was forked.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from typing import Any

from cloche.guest import wire
from cloche.guest.init import init, memory_watch, sessions
from cloche.guest.init.limits import own_data_bytes
from cloche.guest.zygote import enclosure, fork_server
from cloche.guest.zygote.init_factory import InitFactory, PendingInit, prepare_for_forks
from cloche.guest.zygote.rehearsal import rehearse_kernel
from cloche.guest.zygote.uv_warmup import UvWarmup
from cloche.guest.zygote.volumes import VolumeMounts
from cloche.linux import memory_layout, namespaces, syscalls

_WALLS = (
    namespaces.NEWNS
    | namespaces.NEWNET
    | namespaces.NEWIPC
    | namespaces.NEWUTS
    | namespaces.NEWCGROUP
    | namespaces.NEWUSER
)


def main(channel_fd: int) -> None:
    """Never returns. The host's first frame lists the imports."""
    channel = socket.socket(fileno=channel_fd)
    reader = wire.FrameReader(channel)
    order, program, _ = reader.next() or sys.exit(0)
    began = time.monotonic()
    try:
        os.environ.update(order["env"])
        memory_layout.join_libraries()  # before there is a fork: what lies beside each other cannot be joined in that
        zygote = Zygote(channel, reader, order, program)  # before the imports: what sandboxes touch first lies together
        asked = UvWarmup(order["env"]) if order["walls"] else None
        zygote.prepare(order["imports"])
        if asked is not None:
            asked.finish()
        zygote.settle()
    except BaseException as error:  # noqa: BLE001 - a template's code may raise anything
        wire.send_frame(channel, {"ev": "failed", "message": f"{type(error).__name__}: {error}"})
        os._exit(1)
    wire.send_frame(channel, {"ev": "ready", "seconds": time.monotonic() - began})
    zygote.serve()


class Zygote:
    def __init__(self, channel: socket.socket, reader: wire.FrameReader, order: dict, program: bytes):
        self._channel = channel
        self._reader = reader
        self._walls = enclosure.Enclosure(order["single"], program) if order["walls"] else None
        self._init = init.Init(order["single"], program, order["env"], walls=order["walls"])
        self._cells: dict = {}  # pid of an init -> the name of its cell
        self._pids: dict = {}  # name of a cell -> its pid namespace
        self._cradle = InitFactory(self._init, self._walls, self._remove_cell) if self._walls else None
        self._poll = select.poll()
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC) if self._walls else -1
        self._volumes = VolumeMounts(order["single"], self._own_pids) if self._walls else None
        self._kernels: dict = {}  # pid of a first kernel -> its cell

    def prepare(self, imports: list) -> None:
        """Imports a template's modules, and warms up. Raises the exceptions of the template's code."""
        # `interpreter`, which `command_line` needs, keeps what an interpreter has before a kernel is made.
        from cloche.guest.python import command_line, run  # noqa: F401, I001 - before the kernel, as said
        from cloche.guest.kernel import kernel
        from cloche.guest.zygote import warmup

        warmup.prepare_kernel(imports)
        run.record_own_modules()
        self._init.processes.kernels = kernel
        self._first_steps = warmup.take_first_steps

    def settle(self) -> None:
        """The imports are done: from here on this process differs from a sandbox's as little as it can."""
        self._init.adopt_environment()
        if self._cradle is not None:
            rehearse_kernel()
        prepare_for_forks(self._first_steps)
        own = {"zygote_bytes": memory_watch.anonymous_bytes(os.getpid()), "reserved_bytes": own_data_bytes()}
        self._facts = own if self._walls else {}  # what every sandbox has to know of us
        if self._cradle is not None:
            self._cradle.wait()

    def serve(self) -> None:
        """Until the host closes the channel. Sandboxes live on when we end."""
        ended = sessions.listen_for_children()
        self._poll.register(self._channel, select.POLLIN)
        self._poll.register(ended, select.POLLIN)
        if self._cradle is not None:
            self._poll.register(self._cradle, select.POLLIN)
        while True:
            ready = [fd for fd, _ in self._poll.poll()]
            if self._cradle is not None and self._cradle.fileno() in ready:
                self._hear_factory()  # first: should it be gone, nothing is begun that cannot be finished
            if self._channel.fileno() in ready:
                self._serve_host()
            if ended in ready:
                os.read(ended, 4096)
            self._reap_children()

    def _reap_children(self) -> None:
        """Reaps children. The host watches inits by pidfd; the ends of first kernels are reported to it."""
        for pid, status, usage in sessions.reap_children():
            cell = self._kernels.pop(pid, None)
            if cell is not None:
                used = {"cpu": usage.ru_utime + usage.ru_stime, "rss": usage.ru_maxrss * 1024}
                wire.send_frame(self._channel, {"ev": "kernel_exited", "cell": cell, "status": status, **used})

    def _serve_host(self) -> None:
        if not self._reader.pump():
            os._exit(0)
        for header, _, fds in self._reader.take():
            if header["do"] == "spawn":
                self._spawn_cell(header, fds)
            elif header["do"] == "seed":
                self._start_fork_server(header, fds)
            elif header["do"] == "raw":
                wire.send_frame(self._channel, {"ev": "raw", "seconds": self._measure_fork()})
            elif header["do"] == "volume":
                self._serve_volume(header)

    def _serve_volume(self, header: dict) -> None:
        tree = None
        try:
            tree = self._volumes.do(header) if self._volumes else None
            wire.send_frame(self._channel, {"ev": "volume", "ask": header["ask"]}, fds=() if tree is None else (tree,))
        except (OSError, LookupError) as error:
            wire.send_frame(self._channel, {"ev": "volume", "ask": header["ask"], "message": str(error)})
        finally:
            if tree is not None:
                os.close(tree)

    def _spawn_cell(self, header: dict, fds: list) -> None:
        fork = self._fork_cell if self._cradle is not None else self._fork_without_walls
        try:
            fork(header, fds)
        except OSError as error:
            wire.send_frame(self._channel, {"ev": "spawn_failed", "cell": header["cell"], "message": str(error)})
        for fd in fds:
            os.close(fd)

    def _fork_cell(self, header: dict, fds: list) -> None:
        """Has init forked; forks, while init raises the walls, its first kernel, which waits to be admitted.

        Should the kernel's fork fail, init finds its socket closed, and says so, or has said before why it ended. The
        host is told after the fork: where it has no other CPU, it would have been woken to run before it.
        """
        name, spec, channel, kernel_wires = header["cell"], {**header["spec"], **self._facts}, fds[0], fds[1:4]
        others = fds[4:]
        entrances = others[: len(others) - len(spec.get("volumes", ()))]
        door, theirs = socket.socketpair()
        with door, theirs:
            embryo = self._make_init([channel, door.fileno(), *others], spec)
            self._cells[embryo.pid], self._pids[name] = name, embryo.pid_namespace
            try:
                kernel = _fork_into_pids(embryo.pid_namespace)
                if kernel == 0:
                    door.close()
                    init.be_first_kernel(self._init, self._walls, spec, [*kernel_wires, *entrances], theirs)
                self._kernels[kernel] = name
            except OSError:
                pass
            wire.send_frame(self._channel, {"ev": "spawned", "cell": name}, fds=(embryo.pidfd,))
            os.close(embryo.pidfd)

    def _make_init(self, fds: list, spec: dict) -> PendingInit:
        """Gives a pending init its sandbox. One that has died while it waited is replaced by the next."""
        cradle: Any = self._cradle
        while True:
            embryo: PendingInit = cradle.take()
            try:
                embryo.become(spec, fds)
                return embryo
            except OSError as error:
                embryo.discard()
                if not isinstance(error, ConnectionError):
                    raise

    def _hear_factory(self) -> None:
        try:
            self._cradle.hear()  # type: ignore[union-attr]  # it is registered
        except OSError:
            pass  # it could not make one beforehand: whoever needs it asks again, and is told why

    def _remove_cell(self, pid: int) -> None:
        name = self._cells.pop(pid, None)
        if name is not None:
            os.close(self._pids.pop(name))

    def _fork_without_walls(self, header: dict, fds: list) -> None:
        pid = syscalls.fork_bare()
        if pid == 0:
            init.main_without_walls(self._init, header["spec"], fds[:4])
        pidfd = os.pidfd_open(pid)
        wire.send_frame(self._channel, {"ev": "spawned", "cell": header["cell"]}, fds=(pidfd,))
        os.close(pidfd)

    def _start_fork_server(self, header: dict, fds: list) -> None:
        """Forks a fork server for a cell: see `fork_server`. If that fails, init finds its socket closed."""
        sock, entrances = socket.socket(fileno=fds[0]), fds[1:]
        with sock:
            try:
                if header["cell"] in self._pids and _fork_into_pids(self._pids[header["cell"]]) == 0:
                    fork_server.main(self._init, self._walls, header["spec"], sock, entrances)
            except OSError:
                pass
        for fd in entrances:
            os.close(fd)

    def _fork_into_new_pids(self) -> int:
        if self._walls:
            syscalls.setns(self._own_pids, namespaces.NEWPID)
            syscalls.unshare(namespaces.NEWPID)
        return syscalls.fork_bare()

    def _measure_fork(self) -> float:
        """Measures a fork into new namespaces, with one byte back: the lower limit of any creation."""
        began = time.monotonic()
        ours, theirs = socket.socketpair()
        pid = self._fork_into_new_pids()
        if pid == 0:
            if self._walls:
                syscalls.unshare(_WALLS)
            theirs.send(b"1")
            os._exit(0)
        ours.recv(1)
        cost = time.monotonic() - began
        ours.close()
        theirs.close()
        os.waitpid(pid, 0)
        return cost


def _fork_into_pids(pids: int) -> int:
    """Forks into that pid namespace."""
    syscalls.setns(pids, namespaces.NEWPID)
    return syscalls.fork_bare()
