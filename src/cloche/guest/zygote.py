"""The zygote: one process with everything imported, from which sandboxes are forked.

It runs as root of the nursery's user namespace. It has no threads and no event loop: both would not survive a fork.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
import time

from cloche.guest import enclosure, heap, init, running, sessions, warmup, wire
from cloche.guest.rehearsal import rehearse
from cloche.guest.uv_warmup import UvWarmup
from cloche.guest.volumes import Volumes
from cloche.linux import hugepages, mappings, namespaces, syscalls

_WALLS = (
    namespaces.NEWNS
    | namespaces.NEWNET
    | namespaces.NEWIPC
    | namespaces.NEWUTS
    | namespaces.NEWCGROUP
    | namespaces.NEWUSER
)

_LULL_MILLISECONDS = 5


def main(channel_fd: int) -> None:
    """Never returns. The host's first frame says what to import."""
    channel = socket.socket(fileno=channel_fd)
    reader = wire.Reader(channel)
    order, program, _ = reader.next() or sys.exit(0)
    began = time.monotonic()
    try:
        zygote = Zygote(channel, reader, order, program)  # before the imports: what sandboxes touch first lies together
        os.environ.update(order["env"])
        asked = UvWarmup(order["env"]) if order["walls"] else None
        warmup.prepare(order["imports"])
        if asked is not None:
            asked.finish()
        zygote.settle()
    except BaseException as error:  # noqa: BLE001 - a template's code may raise anything
        wire.send(channel, {"ev": "failed", "message": f"{type(error).__name__}: {error}"})
        os._exit(1)
    wire.send(channel, {"ev": "ready", "seconds": time.monotonic() - began})
    zygote.serve()


class Zygote:
    def __init__(self, channel: socket.socket, reader: wire.Reader, order: dict, program: bytes):
        self._channel = channel
        self._reader = reader
        self._walls = enclosure.Enclosure(order["single"], program) if order["walls"] else None
        self._env = order["env"]
        self._init = init.Init(order["single"], program, order["env"])
        self._poll = select.poll()
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC) if self._walls else -1
        self._own_network = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC) if self._walls else -1
        self._volumes = Volumes(order["single"], self._own_pids) if self._walls else None
        self._network_is_fresh = False
        self._pause_milliseconds: int | None = None  # after which a new network is made, if nothing else is to do
        self._kernels: dict = {}  # pid of a first kernel -> its cell

    def settle(self) -> None:
        """The imports are done: from here on this process differs from a sandbox's as little as it can."""
        self._init.adopt_environment()
        running.know_ourselves()
        if self._walls:
            rehearse(self._env)
        gc.collect()
        gc.disable()
        gc.freeze()
        mappings.join_libraries()
        hugepages.collapse_anonymous()
        self._renew_network()
        heap.fill_pools()

    def serve(self) -> None:
        """Until the host closes the channel. Sandboxes live on when we end."""
        ended = self._listen_for_children()
        self._poll.register(self._channel, select.POLLIN)
        self._poll.register(ended, select.POLLIN)
        while True:
            ready = [fd for fd, _ in self._poll.poll(self._pause_milliseconds)]
            if not ready:
                self._use_lull()
            if self._channel.fileno() in ready:
                self._serve_host()
            if ended in ready:
                os.read(ended, 4096)
            self._reap()

    def _listen_for_children(self) -> int:
        """A descriptor that can be read when a child has ended. Children set their own signals."""
        ended, wakeup = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        return ended

    def _reap(self) -> None:
        """Collects children that ended. The host watches inits by pidfd; of first kernels it has to be told."""
        for pid, status, usage in sessions.reap():
            cell = self._kernels.pop(pid, None)
            if cell is not None:
                used = {"cpu": usage.ru_utime + usage.ru_stime, "rss": usage.ru_maxrss * 1024}
                wire.send(self._channel, {"ev": "kernel_exited", "cell": cell, "status": status, **used})

    def _serve_host(self) -> None:
        if not self._reader.pump():
            os._exit(0)
        for header, _, fds in self._reader.take():
            if header["do"] == "spawn":
                self._spawn(header, fds)
            elif header["do"] == "raw":
                wire.send(self._channel, {"ev": "raw", "seconds": self._raw_cost()})
            elif header["do"] == "volume":
                self._serve_volume(header)

    def _serve_volume(self, header: dict) -> None:
        tree = None
        try:
            tree = self._volumes.do(header) if self._volumes else None
            wire.send(self._channel, {"ev": "volume", "ask": header["ask"]}, fds=() if tree is None else (tree,))
        except (OSError, LookupError) as error:
            wire.send(self._channel, {"ev": "volume", "ask": header["ask"], "message": str(error)})
        finally:
            if tree is not None:
                os.close(tree)

    def _spawn(self, header: dict, fds: list) -> None:
        (out_read, out), (err_read, err) = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
        fds[2:2] = [out, err]
        trees = _take_trees(header["spec"], fds)
        if self._walls:
            self._walls.prepare_for(header["spec"])
        try:
            if not self._network_is_fresh:
                self._renew_network()
            self._network_is_fresh = False
            self._fork_cell(header, fds, (out_read, err_read))
        except OSError as error:
            wire.send(self._channel, {"ev": "spawn_failed", "cell": header["cell"], "message": str(error)})
        for fd in (*fds, *trees, out_read, err_read):
            os.close(fd)

    def _renew_network(self) -> None:
        """Moves this process, which has no use for a network, into a new one. The next sandbox gets it by the fork."""
        if self._walls:
            namespaces.make_network()
        self._network_is_fresh = True

    def _leave_network(self) -> None:
        """Leaves the network to the sandbox that was forked into it, before the first kernel, which enters it later."""
        if self._walls:
            syscalls.setns(self._own_network, namespaces.NEWNET)
        self._pause_milliseconds = _LULL_MILLISECONDS

    def _use_lull(self) -> None:
        """To make a network takes as long as half a fork, so it is made when the last sandbox is ready."""
        self._pause_milliseconds = None
        try:
            self._renew_network()
        except OSError:
            pass  # the next spawn tries again, and says why it cannot

    def _fork_cell(self, header: dict, fds: list, outputs: tuple) -> None:
        """Forks init, and then, while init raises the walls, its first kernel, which waits at a door to be let in.

        The kernel writes init's id maps, too: it has our rights until it goes through that door, and we are busy with
        other cells. The host hears of it in between, so that what it does then does not hold up the kernel, which
        comes last. Should the kernel's fork fail, init finds its door closed, and says so.
        """
        ours, theirs = socket.socketpair()
        with ours, theirs:
            pid = self._fork_into_new_pids()
            if pid == 0:
                init.main(self._init, self._walls, header["spec"], fds, ours)
            self._announce(header["cell"], pid, outputs)
            self._leave_network()
            if self._walls:
                kernel = syscalls.fork_bare()  # into the same pid namespace
                if kernel == 0:
                    init.be_first_kernel(self._init, self._walls, header["spec"], fds, theirs, pid)
                self._kernels[kernel] = header["cell"]

    def _announce(self, cell: str, pid: int, outputs: tuple) -> None:
        pidfd = os.pidfd_open(pid)
        wire.send(self._channel, {"ev": "spawned", "cell": cell}, fds=(pidfd, *outputs))
        os.close(pidfd)

    def _fork_into_new_pids(self) -> int:
        if self._walls:
            syscalls.setns(self._own_pids, namespaces.NEWPID)
            syscalls.unshare(namespaces.NEWPID)
        return syscalls.fork_bare()

    def _raw_cost(self) -> float:
        """What a fork into new namespaces costs here and now, with one byte back: the limit for any creation."""
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


def _take_trees(spec: dict, fds: list) -> list:
    """The last descriptors are a sandbox's volumes, in the order of their paths; the spec has them from now on."""
    paths = spec.get("volumes")
    if not paths:
        return []
    trees = fds[-len(paths) :]
    del fds[-len(paths) :]
    spec["volumes"] = list(zip(paths, trees, strict=True))
    return trees
