"""The init factory: the process that forks the inits of sandboxes. It has only init's own modules imported.

The zygote forks it before a template's code has run. To fork a process of a few megabytes takes a fraction of
a fork of the zygote, in time and in every sandbox's memory, and init is no place for a template's code.

An init is forked as a pending init: pid 1 of a new pid namespace, in a network of its own, without a sandbox
yet. As networks take long to be made, one is made in a lull, for the next sandbox.

ZYGOTE <-> FACTORY
  factory -> zygote {"embryo":pid}              fds=[its socket, its pid namespace, pidfd]
                    {"error":..,"errno":n}      there is none, and why
                    {"ended":pid}
  zygote -> factory {"next":"now"}              one is needed
ZYGOTE -> PENDING   {"spec":{..}}               fds=[init's channel, its door, cgroup entrances..,
                                                mounts of volumes..]
PENDING <-> FACTORY (the zygote forks the first kernel meanwhile, and has no time)
  pending -> factory {"uids":[..],"gids":[..]}   it has made its user namespace
  factory -> pending a byte                      its id maps are written
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys

from cloche.guest import wire
from cloche.guest.init import init, sessions
from cloche.guest.init.programs import close_others
from cloche.guest.zygote import heap, write_trial
from cloche.guest.zygote.rehearsal import rehearse_init
from cloche.linux import memory_layout, namespaces, syscalls

_LULL_MILLISECONDS = 12  # longer than until a first result: nothing is to disturb that


class PendingInit:
    """An init that has no sandbox yet, as the zygote holds it."""

    def __init__(self, pid: int, sock: int, pid_namespace: int, pidfd: int):
        self.pid = pid
        self.pid_namespace = pid_namespace  # nobody but init itself could open that later
        self.pidfd = pidfd
        self._sock = socket.socket(fileno=sock)

    def become(self, spec: dict, fds: list) -> None:
        """Assigns it a sandbox: it raises the walls and is on its own from then on. Raises OSError if it has ended."""
        wire.send_frame(self._sock, {"spec": spec}, fds=tuple(fds))
        self._sock.close()

    def discard(self) -> None:
        self._sock.close()
        os.close(self.pid_namespace)
        os.close(self.pidfd)


class InitFactory:
    """The zygote's side of the init factory. `ended(pid)` is called for each init that has ended."""

    def __init__(self, served: init.Init, walls, ended):
        self._ended = ended
        self._embryo: PendingInit | None = None
        self._sock, theirs = socket.socketpair()
        self._reader = wire.FrameReader(self._sock)
        zygote = os.getpid()
        if syscalls.fork_bare() == 0:
            _run_factory(theirs, served, walls, zygote)
        theirs.close()

    def fileno(self) -> int:
        return self._sock.fileno()

    def wait(self) -> None:
        """Waits for the first pending init. Raises OSError."""
        while self._embryo is None:
            self.hear()

    def take(self) -> PendingInit:
        """Returns the next pending init. Raises OSError."""
        if self._embryo is None:
            self._send_request({"next": "now"})
            self.wait()
        embryo, self._embryo = self._embryo, None
        return embryo  # type: ignore[return-value]  # that is what was waited for

    def _send_request(self, header: dict) -> None:
        """Sends a request. Exits if the factory is gone: without it there can be no sandbox.

        The host then makes another nursery.
        """
        try:
            wire.send_frame(self._sock, header)
        except ConnectionError:
            os._exit(1)

    def hear(self) -> None:
        """Reads once. Exits as above. Raises OSError if no pending init could be made."""
        try:
            alive = self._reader.pump()
        except ConnectionError:  # it has died with something unread
            alive = False
        if not alive:
            os._exit(1)
        failure = None
        for header, _, fds in self._reader.take():
            if "embryo" in header:
                if self._embryo is not None:
                    self._embryo.discard()
                self._embryo = PendingInit(header["embryo"], *fds)
            elif "ended" in header:
                self._ended(header["ended"])
            else:
                failure = OSError(header["errno"], header["error"])
        if failure is not None and self._embryo is None:
            raise failure


def _run_factory(sock: socket.socket, served: init.Init, walls, zygote: int) -> None:
    """In the fork. Never returns."""
    try:
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != zygote:
            os._exit(1)
        close_others([sock.fileno()])
        _InitFactoryProcess(sock, served, walls).serve()
    finally:
        sys.excepthook(*sys.exc_info())  # the host keeps the last words of its nurseries
        os._exit(1)


class _InitFactoryProcess:
    """The init factory's own process."""

    def __init__(self, sock: socket.socket, served: init.Init, walls):
        self._sock = sock
        self._reader = wire.FrameReader(sock)
        self._served = served
        self._walls = walls
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._own_network = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self._pause_milliseconds: int | None = None  # after which an embryo is made, if nothing else is to do
        self._poll = select.poll()
        self._asking: dict = {}  # descriptor -> the socket on which an embryo will ask for its id maps, and its pid

    def serve(self) -> None:
        """Serves until the zygote is gone. Sandboxes live on when this process ends."""
        self._prepare_process()
        ended = sessions.listen_for_children()
        self._poll.register(self._sock, select.POLLIN)
        self._poll.register(ended, select.POLLIN)
        self._send_pending_init()
        while True:
            ready = [fd for fd, _ in self._poll.poll(self._pause_milliseconds)]
            for fd in ready:
                if fd in self._asking:
                    self._write_maps(*self._asking.pop(fd))
            if not ready:
                self._pause_milliseconds = None
                if not self._asking:  # else there is one
                    self._send_pending_init()
            if self._sock.fileno() in ready:
                self._serve_zygote()
            if ended in ready:
                os.read(ended, 4096)
            for pid, _, _ in sessions.reap_children():
                wire.send_frame(self._sock, {"ended": pid})

    def _prepare_process(self) -> None:
        """Makes this process differ from an init as little as it can."""
        self._served.adopt_environment()
        rehearse_init(os.environ.copy())
        prepare_for_forks()

    def _serve_zygote(self) -> None:
        if not self._reader.pump():
            os._exit(0)
        for _ in self._reader.take():
            self._send_pending_init()

    def _send_pending_init(self) -> None:
        self._pause_milliseconds = None
        given: list = []
        try:
            namespaces.make_network()  # which we move into, having no use for one, and leave to the embryo
            pid, sock = self._fork_init()
            syscalls.setns(self._own_network, namespaces.NEWNET)
            # Ours is the one of which the embryo is the first process.
            given.append(os.open("/proc/self/ns/pid_for_children", os.O_RDONLY | os.O_CLOEXEC))
            given.append(os.pidfd_open(pid))
            wire.send_frame(self._sock, {"embryo": pid}, fds=(sock.fileno(), *given))
            sock.close()
        except OSError as error:
            wire.send_frame(self._sock, {"error": str(error), "errno": error.errno})
        for fd in given:
            os.close(fd)

    def _fork_init(self) -> tuple:
        """Forks an init; returns its pid, and the zygote's socket to it."""
        (zygotes, theirs), (ours, to_us) = socket.socketpair(), socket.socketpair()
        with theirs, to_us:
            syscalls.setns(self._own_pids, namespaces.NEWPID)
            syscalls.unshare(namespaces.NEWPID)
            pid = syscalls.fork_bare()
            if pid == 0:
                init.main(self._served, self._walls, theirs, to_us)
        self._asking[ours.fileno()] = ours, pid
        self._poll.register(ours, select.POLLIN)
        return pid, zygotes

    def _write_maps(self, sock: socket.socket, pid: int) -> None:
        """Writes the id maps of a pending init that has asked for them, or has ended before."""
        self._poll.unregister(sock)
        with sock:
            try:
                asked = wire.FrameReader(sock).next()
                if asked is not None:
                    namespaces.write_maps(pid, asked[0]["uids"], asked[0]["gids"])
                    sock.send(b"m")
                    self._pause_milliseconds = _LULL_MILLISECONDS  # it was taken: somebody may want the next
            except OSError:
                pass  # whatever it is, init hears no answer, and says so


def prepare_for_forks(first_steps=None) -> None:
    """The last step before forks are made: minimizes the pages that they copy and write to.

    `first_steps()`: the first actions of every fork.
    """
    gc.collect()  # which also lets go of what is kept to be used again, wherever it lies
    gc.disable()
    heap.fill_heap()
    gc.freeze()
    memory_layout.join_libraries()
    memory_layout.collapse_anonymous(but=write_trial.areas_written(first_steps) if first_steps else ())
