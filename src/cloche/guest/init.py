"""Pid 1 of a sandbox: reaps, starts kernels, commands and terminals, does all file work, connects to ports.

One thread, one poll loop. It stays small: what it touches is paid for by every sandbox.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # typeshed knows only `signal`
import os
import select
import socket

from cloche.guest import (
    branches,
    door,
    elevation,
    failures,
    files,
    identity,
    images,
    memory,
    ports,
    processes,
    sessions,
    stillness,
    trust,
    warm_python,
    watches,
    wire,
)
from cloche.guest.defaults import Defaults
from cloche.linux import namespaces, syscalls

_IDLE_SECONDS = 3600.0
# What bad input, or a disk or memory that is full, can raise from a verb: an answer, and nothing that ends a sandbox.
_REFUSALS = (OSError, LookupError, ValueError, TypeError, ArithmeticError, MemoryError, RecursionError, wire.WireError)


def _on_child(*_) -> None:
    """A handler must be set for the wake-up descriptor to be written to."""


def main(served: Init, walls, spec: dict, fds: list, door: socket.socket) -> None:
    """Never returns. Without `walls` there are none: see `cloche.isolation.plain`.

    `fds`: init's channel, kernel 0's channel, stdout and stderr, then the entrances of our cgroups.
    """
    channel, first_kernel, entrances = socket.socket(fileno=fds[0]), fds[1:4], fds[4:]
    try:
        for entrance in entrances:
            os.write(entrance, b"0")
        trees = [tree for _, tree in spec.get("volumes", ())]
        _leave_zygote([*fds[:4], door.fileno(), *trees])
        served.take(spec, bool(walls))
        if walls:
            _go_behind(walls, served, spec, first_kernel, door)
        else:
            syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)  # what our descendants leave behind comes to us
            served.start_first_kernel(spec, first_kernel)
        door.close()
        served.serve(channel)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the host must hear of it
        _last_words(channel, error)
    served.end(1)


def be_first_kernel(served: Init, walls, spec: dict, fds: list, door: socket.socket, pid: int) -> None:
    """The sandbox's other process. Never returns. It gets ready while init, which is `pid` here, raises the walls.

    It runs none of its user's code until it has gone behind them: all that it waits for is the way in.
    """
    try:
        for entrance in fds[4:]:
            os.write(entrance, b"0")
        _write_maps(door, pid, spec)
        served.take(spec, True)
        served.be_first_kernel(spec, fds[1:4], door.fileno(), walls)
    finally:  # the host may have given up the sandbox, and its cgroups: we must not go on as a second zygote
        os._exit(1)


def _write_maps(door: socket.socket, pid: int, spec: dict) -> None:
    """In the first kernel, as soon as init has made its user namespace. Not if it ended before."""
    if door.recv(1):
        namespaces.write_maps(pid, spec["uids"], spec["gids"])
        door.send(b"m")


def _go_behind(walls, served: Init, spec: dict, first_kernel: list, door: socket.socket) -> None:
    """Raises the walls around us, and lets the first kernel, which the zygote has forked beside us, in."""
    doors = walls.raise_walls(spec, first_kernel[1:], lambda: _ask_for_maps(door))
    pid = door.recv(16)
    if not pid:
        raise RuntimeError("the first kernel died before it was let in")
    socket.send_fds(door, [b"d"], doors)
    served.know_first_kernel(int(pid))
    for fd in (*doors, *first_kernel):
        os.close(fd)


def _leave_zygote(keep: list) -> None:
    """Nothing of the zygote's but these descriptors comes with us."""
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    lowest = 3
    for fd in sorted(keep):
        if fd > lowest:
            syscalls.close_range(lowest, fd - 1)
        lowest = fd + 1
    syscalls.close_from(lowest)
    os.setsid()


def _ask_for_maps(door: socket.socket) -> None:
    door.send(b"u")
    if not door.recv(1):
        raise RuntimeError("the first kernel ended before it had written the id maps")


def _last_words(channel: socket.socket, error: BaseException) -> None:
    try:
        wire.send(channel, {"ev": "fatal", "message": f"{type(error).__name__}: {error}"})
    except OSError:
        pass


class Init:
    """Made once in the zygote, so that a sandbox inherits it ready; `serve` is where a sandbox's own life begins."""

    def __init__(self, single: bool, program: bytes, env: dict):
        self._poll = select.poll()
        self._on_ready: dict = {}
        defaults = Defaults()
        identities = identity.Identities(single, program)
        self._defaults = defaults
        self.adopt_environment = lambda: defaults.adopt(env)
        self._processes = processes.Processes(identities, defaults, self._event, self._reap)
        self._files = files.Files(identities, defaults, self._watch_fd)
        self._watches = watches.Watches(identities, defaults, self._watch_fd, self._event)
        self._images = images.Images(self._processes, identities, defaults, self._event)
        self._elevation = elevation.reception(self._processes, self._watch_fd)
        self._python = warm_python.reception(self._processes, self._watch_fd)
        self._memory = memory.Watchman(self._processes, self._event)
        self._verbs = {
            "configure": self._configure,
            "port_connect": ports.connect,
            "port_list": ports.listening,
            "door_open": door.open_door,
            "trust": trust.trust,
            "usage": lambda header, body: memory.usage(),
            **self._processes.verbs(),
            **branches.Branches(self._processes, identities, self._watch_fd, self._event).verbs(),
            **self._files.verbs(),
            **self._watches.verbs(),
            **self._images.verbs(),
            **stillness.Stillness(self._memory, (self._elevation, self._python)).verbs(),
        }

    def take(self, spec: dict, walled: bool) -> None:
        """What is this sandbox's own, of all that was prepared for every one."""
        self._defaults.user = spec["user"]
        self._defaults.places = spec.get("places", {})
        self._defaults.open_files = spec["open_files"] if walled else None

    def start_first_kernel(self, spec: dict, fds: list) -> None:
        self._processes.start_first_kernel(spec["token"], tuple(fds))

    def be_first_kernel(self, spec: dict, fds: list, door: int, walls) -> None:
        self._processes.be_first_kernel(spec["token"], tuple(fds), door, lambda doors: walls.enter(spec, doors))

    def know_first_kernel(self, pid: int) -> None:
        self._processes.know_first_kernel(pid)

    def serve(self, channel: socket.socket) -> None:
        """Never returns."""
        self.listen(channel)
        if os.getpid() == 1:  # without walls the name would be the host's
            self._python.open()
        while True:
            for fd, _ in self._poll.poll(self._memory.pause_seconds(_IDLE_SECONDS) * 1000):
                if fd in self._on_ready:
                    self._on_ready[fd]()
            self._memory.look()

    def listen(self, channel: socket.socket) -> None:
        self._channel = channel
        self._reader = wire.Reader(channel)
        self._wakeup, wakeup_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        _signal.signal(_signal.SIGCHLD, _on_child)
        for ignored in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGPIPE):
            _signal.signal(ignored, _signal.SIG_IGN)
        _signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        self._watch_fd(self._wakeup, select.POLLIN, self._reap)
        self._watch_fd(self._channel.fileno(), select.POLLIN, self._serve_host)

    def fall_silent(self) -> None:
        """Undoes `listen`, but for the signals."""
        self._watch_fd(self._wakeup, 0, None)
        self._watch_fd(self._channel.fileno(), 0, None)
        os.close(_signal.set_wakeup_fd(-1))
        os.close(self._wakeup)

    def _watch_fd(self, fd: int, events: int, callback) -> None:
        """Calls `callback()` when `fd` is ready; `events` 0 forgets it."""
        if events:
            self._on_ready[fd] = callback
            self._poll.register(fd, events)
        else:
            del self._on_ready[fd]
            self._poll.unregister(fd)

    def _event(self, header: dict, body: bytes = b"") -> None:
        wire.send(self._channel, header, body)

    def _serve_host(self) -> None:
        if not self._reader.pump():
            self.end(0)
        for header, body, fds in self._reader.take():
            for fd in fds:
                os.close(fd)
            self._answer(header, body)

    def end(self, status: int) -> None:
        """The host is gone, or has closed us. With pid 1 goes everything; without walls we must see to it."""
        if os.getpid() != 1:
            self._processes.kill_descendants()
        os._exit(status)

    def _answer(self, header: dict, body: bytes) -> None:
        number, verb = header.pop("id", None), header.pop("do", None)
        fds: tuple = ()
        try:
            answer = self._verbs[verb](header, body)
            ok, content, fds = answer if isinstance(answer, tuple) else (answer, b"", ())
            wire.send(self._channel, {"id": number, "ok": ok}, content, fds)
        except _REFUSALS as error:
            wire.send(self._channel, {"id": number, "err": failures.describe(error)})
        finally:
            for fd in fds:
                os.close(fd)

    def _configure(self, header: dict, _: bytes) -> dict:
        self._processes.configure(header)
        self._memory.limit_bytes = header.get("watch_memory_bytes")
        if header.get("sudo") and os.getpid() == 1:  # without walls there is nobody else to become
            self._elevation.open()
        return {}

    def _reap(self) -> None:
        try:
            os.read(self._wakeup, 4096)
        except BlockingIOError:
            pass
        for pid, status, usage in sessions.reap():
            self._elevation.ended(pid, status)
            self._python.ended(pid, status)
            self._images.ended(pid, status)
            self._processes.ended(pid, status, usage)
            self._processes.credit(sessions.ended(pid), usage)
        sessions.forget_empty()
