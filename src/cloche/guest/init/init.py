"""Pid 1 of a sandbox: reaps, starts kernels, commands and terminals, does all file work, connects to ports.

One thread, one poll loop. It stays small: every sandbox pays for each page that it touches.
"""

from __future__ import annotations

import os
import select
import socket
from typing import Any

from cloche.guest import wire
from cloche.guest.files import files, image, watch
from cloche.guest.init import (
    certificates,
    errors,
    freeze,
    identity,
    kernel_copies,
    memory_watch,
    ports,
    processes,
    sessions,
    sudo_server,
    warm_python,
)
from cloche.guest.init.defaults import Defaults
from cloche.guest.init.programs import detach_from_parent, ignore_own_signals
from cloche.guest.zygote import fork_server
from cloche.guest.zygote.enclosure import tidy_own_kernel
from cloche.linux import syscalls

_IDLE_SECONDS = 3600.0
# What bad input, or a disk or memory that is full, can raise from a verb: an answer, and nothing that ends a sandbox.
_REFUSALS = (
    OSError,
    LookupError,
    ValueError,
    TypeError,
    ArithmeticError,
    MemoryError,
    RecursionError,
    ImportError,
    wire.WireError,
)


def main(served: Init, walls, zygote: socket.socket, cradle: socket.socket) -> None:
    """In a fork of the init factory: waits for a sandbox and is its init. Never returns.

    Exits if it hears that there is no sandbox.
    """
    try:
        detach_from_parent([zygote.fileno(), cradle.fileno()])
        order, _, fds = wire.FrameReader(zygote).next() or os._exit(0)
        zygote.close()
        _run_init(served, walls, order["spec"], fds, cradle)
    finally:
        os._exit(1)


def _run_init(served: Init, walls, spec: dict, fds: list, cradle: socket.socket) -> None:
    """`fds`: our channel, the socket of the first kernel, entrances of our cgroups, mounts of volumes."""
    _take_volumes(spec, fds)
    channel, door, entrances = socket.socket(fileno=fds[0]), socket.socket(fileno=fds[1]), fds[2:]
    try:
        for entrance in entrances:
            os.write(entrance, b"0")
            os.close(entrance)
        served.take(spec, True)
        walls.prepare_for(spec)
        doors = walls.raise_walls(spec, lambda: _ask_for_maps(cradle, spec))
        served.admit_first_kernel(door, doors)
        served.serve(channel)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the host must hear of it
        _report_fatal(channel, error)
    served.end(1)


def main_without_walls(served: Init, spec: dict, fds: list) -> None:
    """In a fork of the zygote: see `cloche.isolation.plain`. Never returns.

    `fds`: init's channel, kernel 0's channel, stdout and stderr.
    """
    channel = socket.socket(fileno=fds[0])
    try:
        detach_from_parent(fds)
        served.take(spec, False)
        syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)  # what our descendants leave behind comes to us
        served.start_first_kernel(spec, fds[1:4])
        served.serve(channel)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the host must hear of it
        _report_fatal(channel, error)
    served.end(1)


def begin_with_own_kernel(
    served: Init, walls, spec: dict, channel: socket.socket, door: socket.socket, server: socket.socket
) -> None:
    """As pid 1 of a kernel of its own: see `cloche.guest.zygote.standalone`. Never returns."""
    try:
        served.take(spec, True)
        walls.prepare_for(spec)
        tidy_own_kernel()
        doors = walls.raise_walls(spec, lambda: None)
        served.take_fork_server(server)
        served.admit_first_kernel(door, doors)
        served.serve(channel)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the host must hear of it
        _report_fatal(channel, error)
    served.end(1)


def be_first_kernel(served: Init, walls, spec: dict, fds: list, door: socket.socket) -> None:
    """The sandbox's other process, a fork of the zygote. Never returns. It gets ready while init raises the walls.

    It runs none of its user's code until it has gone behind them: all that it waits for is the way in. `fds`: its
    channel, stdout and stderr, the entrances of its cgroups.
    """
    try:
        for entrance in fds[3:]:
            os.write(entrance, b"0")
        served.take(spec, True)
        served.be_first_kernel(spec, fds[:3], door.fileno(), walls)
    finally:  # the host may have given up the sandbox, and its cgroups: we must not go on as a second zygote
        os._exit(1)


def _take_volumes(spec: dict, fds: list) -> None:
    """The last descriptors are a sandbox's volumes, in the order of their paths; the spec has them from now on."""
    paths = spec.get("volumes")
    if paths:
        spec["volumes"] = list(zip(paths, fds[-len(paths) :], strict=True))
        del fds[-len(paths) :]


def _ask_for_maps(cradle: socket.socket, spec: dict) -> None:
    with cradle:
        wire.send_frame(cradle, {"uids": spec["uids"], "gids": spec["gids"]})
        if not cradle.recv(1):
            raise RuntimeError("the id maps were not written")


def _report_fatal(channel: socket.socket, error: BaseException) -> None:
    try:
        wire.send_frame(channel, {"ev": "fatal", "message": f"{type(error).__name__}: {error}"})
    except OSError:
        pass


class Init:
    """Made once, so that a sandbox inherits it ready; `serve` is where a sandbox's own life begins.

    With `walls` it is forked from the init factory, and has nothing imported; without, from the zygote.
    """

    def __init__(self, single: bool, program: bytes, env: dict, *, walls: bool):
        self._poll = select.poll()
        self._on_ready: dict = {}
        defaults = Defaults()
        identities = identity.Identities(single, program)
        self._defaults = defaults
        self.adopt_environment = lambda: defaults.adopt(env)
        self.processes = self._processes = processes.Processes(
            identities, defaults, self._send_event, self._reap_children
        )
        self._seed: Any = (
            fork_server.ForkServerClient(self._watch_fd, self._send_event, self._on_child_end)
            if walls
            else fork_server.InProcessForkServer(self._processes)
        )
        self._processes.warm = self._seed
        self._files = files.FileHandlers(identities, defaults, self._watch_fd)
        self._watches = watch.WatchHandlers(identities, defaults, self._watch_fd, self._send_event)
        self._images = image.ImageHandlers(self._processes, identities, defaults, self._send_event)
        self._elevation = sudo_server.sudo_socket(self._processes, self._watch_fd)
        self._python = warm_python.reception(self._processes, self._seed, self._watch_fd)
        self._memory = memory_watch.MemoryWatch(self._processes, self._send_event)
        self._relays: Any = None  # where the host takes no descriptors
        self._verbs = {
            "configure": self._configure,
            "port_connect": ports.connect_port,
            "port_list": ports.list_listening,
            "door_open": ports.open_listener,
            "trust": certificates.write_certificates,
            "usage": self._memory.usage,
            **self._processes.verb_handlers(),
            **kernel_copies.KernelCopies(self._processes, identities, self._watch_fd, self._send_event).verb_handlers(),
            **self._files.verb_handlers(),
            **self._watches.verb_handlers(),
            **self._images.verb_handlers(),
            **freeze.SignalFreezer(self._memory, (self._elevation, self._python)).verb_handlers(),
        }

    def take(self, spec: dict, walled: bool) -> None:
        """Takes over this sandbox's own settings, after all that was prepared for every one."""
        self._defaults.user = spec["user"]
        self._defaults.places = spec.get("places", {})
        self._defaults.open_files = spec["open_files"] if walled else None
        self._memory.zygote_bytes = spec.get("zygote_bytes", 0)
        self._memory.kernel_bytes = spec.get("kernel_bytes")
        self._defaults.reserved_bytes = spec.get("reserved_bytes")

    def start_first_kernel(self, spec: dict, fds: list) -> None:
        self._processes.start_first_kernel(spec["token"], tuple(fds))

    def be_first_kernel(self, spec: dict, fds: list, door: int, walls) -> None:
        self._processes.be_first_kernel(spec["token"], tuple(fds), door, lambda doors: walls.enter(spec, doors))

    def take_fork_server(self, sock: socket.socket) -> None:
        """One that is there from the beginning."""
        self._seed.take([sock.detach()])

    def admit_first_kernel(self, door: socket.socket, doors: list) -> None:
        """Sends the first kernel the descriptors that it needs, whenever it comes. Others can follow."""
        self._seed.doors = doors
        try:
            socket.send_fds(door, [b"d"], doors)
        except ConnectionError:
            raise RuntimeError("the first kernel died before it was let in") from None
        self._watch_fd(door.fileno(), select.POLLIN, lambda: self._meet_first_kernel(door))

    def _meet_first_kernel(self, door: socket.socket) -> None:
        self._watch_fd(door.fileno(), 0, None)
        with door:
            pid = door.recv(16)
        if not pid:
            raise RuntimeError("the first kernel died before it was let in")
        self._processes.register_first_kernel(int(pid))

    def serve(self, channel: socket.socket) -> None:
        """Never returns."""
        self.listen(channel)
        if os.getpid() == 1:  # without walls the name would be the host's
            self._python.open()
        while True:
            for fd, _ in self._poll.poll(self._memory.pause_seconds(_IDLE_SECONDS) * 1000):
                if fd in self._on_ready:
                    self._on_ready[fd]()
            self._seed.settle()
            self._memory.look()

    def listen(self, channel: socket.socket) -> None:
        self._channel = channel
        self._reader = wire.FrameReader(channel)
        self._wakeup = sessions.listen_for_children()
        ignore_own_signals()
        self._watch_fd(self._wakeup, select.POLLIN, self._reap_children)
        self._watch_fd(self._channel.fileno(), select.POLLIN, self._serve_host)

    def undo_listen(self) -> None:
        """Undoes `listen`, but for the signals."""
        self._watch_fd(self._wakeup, 0, None)
        self._watch_fd(self._channel.fileno(), 0, None)
        sessions.stop_listening(self._wakeup)

    def _watch_fd(self, fd: int, events: int, callback) -> None:
        """Calls `callback()` when `fd` is ready; `events` 0 removes it."""
        if events:
            self._on_ready[fd] = callback
            self._poll.register(fd, events)
        else:
            del self._on_ready[fd]
            self._poll.unregister(fd)

    def _send_event(self, header: dict, body: bytes = b"") -> None:
        wire.send_frame(self._channel, header, body)

    def _serve_host(self) -> None:
        if not self._reader.pump():
            self.end(0)
        for header, body, fds in self._reader.take():
            if header["do"] == "seed":
                self._seed.take(fds)
            else:
                self._answer_request({**header, "wires": fds} if fds else header, body)
            for fd in fds:
                os.close(fd)

    def end(self, status: int) -> None:
        """Exits: the host is gone, or has closed the channel.

        With pid 1 goes everything; without walls the descendants are killed here.
        """
        if os.getpid() != 1:
            self._processes.kill_descendants()
        os._exit(status)

    def _answer_request(self, header: dict, body: bytes) -> None:
        number, verb = header.pop("id", None), header.pop("do", None)
        fds: tuple = ()
        try:
            answer = self._verbs[verb](header, body)
            ok, content, fds = answer if isinstance(answer, tuple) else (answer, b"", ())
            if fds and "relay" in header:
                self._relay(header, fds[0])
                ok = {**ok, "relayed": True}
            wire.send_frame(self._channel, {"id": number, "ok": ok}, content, () if "relay" in header else fds)
        except _REFUSALS as error:
            wire.send_frame(self._channel, {"id": number, "err": errors.describe_error(error)})
        finally:
            for fd in fds:
                os.close(fd)

    def _relay(self, header: dict, fd: int) -> None:
        if self._relays is None:
            from cloche.guest.init import relays  # most sandboxes need none

            self._relays = relays.Relays(self._watch_fd)
            self._verbs.update(self._relays.verb_handlers())
        self._relays.carry(header, fd)

    def _configure(self, header: dict, _: bytes) -> dict:
        self._processes.configure(header)
        self._memory.limit_bytes = header.get("watch_memory_bytes")
        if header.get("sudo") and os.getpid() == 1:  # without walls there is nobody else to become
            self._elevation.open()
        return {}

    def _reap_children(self) -> None:
        try:
            os.read(self._wakeup, 4096)
        except BlockingIOError:
            pass
        for pid, status, usage in sessions.reap_children():
            self._on_child_end(pid, status, usage)
        sessions.remove_empty_sessions()

    def _on_child_end(self, pid: int, status: int, usage) -> None:
        """Handles the end of a process started by init, or by the fork server for it, or reparented to init."""
        self._elevation.ended(pid, status)
        self._python.ended(pid, status)
        self._images.ended(pid, status)
        if self._relays is not None:
            self._relays.flush_terminals()
        self._processes.ended(pid, status, usage)
        self._processes.add_usage(sessions.ended(pid), usage)
