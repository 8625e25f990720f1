"""The fork server: a process with everything imported, behind a sandbox's walls, that forks warm processes.

Init has nothing imported (see `init_factory`). When the first program is started that is to find everything
imported (a second kernel, `python3`), the host has the zygote fork a fork server, which init admits as it
admitted the first kernel. From then on init asks it for forks. It runs no program's code, and receives no
data: a fork's order is sent to the fork.

Its forks are its children: it tells init how each has ended. Programs of the sandbox's root can stop or kill
it. One that does not answer is killed: its forks become init's own then.

INIT <-> FORK SERVER, once it is admitted
  init -> server    {"fork":"kernel|script|attend"}                 fds=[a socket of the fork's]
  server -> init    {"pid":n} | {"full":true} | {"error":..}        its answer, and in between
                    {"ended":pid,"status":wait status,"cpu":s,"rss":KiB}
INIT -> FORK        its order, body and descriptors: see `Processes.become`. At its end, the fork ends
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time

from cloche.guest import wire
from cloche.guest.init import sessions
from cloche.guest.init.programs import NoForkServer, TooManyProcesses, detach_from_parent, ignore_own_signals
from cloche.guest.zygote.enclosure import wait_for_admission

ANSWER_SECONDS = 5.0  # in which it must have come to the door and have forked: init does nothing else meanwhile
RETRY_SECONDS = 10.0  # after which another is asked for, where there was none to be had, or it did not answer
_KILLED = 9


class ForkUsage:
    """The resource usage of a process, as far as the fork server reports it."""

    def __init__(self, cpu_seconds: float, peak_kib: int):
        self.ru_utime, self.ru_stime, self.ru_maxrss = cpu_seconds, 0.0, peak_kib


class ForkServerClient:
    """Init's side of the fork server.

    `ended(pid, status, usage)` is called for each fork that ended; `event` sends an event to the host.
    """

    def __init__(self, watch_fd, event, ended):
        self._watch_fd = watch_fd
        self._event = event
        self._ended = ended
        self._sock: socket.socket | None = None
        self._reader: wire.FrameReader | None = None
        self._pid = 0  # once it is let in
        self._forks: set = set()  # that have not ended
        self._ends: list = []  # that were told, and nobody has heard of yet
        self._waiting: list = []  # what to call when there is one, or it is known that there will be none
        self._none_until = 0.0
        self.doors: list = []  # what whoever is let in goes through

    @property
    def is_there(self) -> bool:
        """Whether there is one, or it is on its way."""
        return self._sock is not None

    @property
    def is_let_in(self) -> bool:
        return self._pid != 0

    @property
    def may_come(self) -> bool:
        """False for a while after none could be had."""
        return time.monotonic() >= self._none_until

    def ask_for(self, then) -> None:
        """Requests one from the host, if none is on its way.

        Calls `then()` when it is admitted, or there will be none.
        """
        if not self._waiting and not self.is_there:
            self._event({"ev": "seed_wanted"})
        self._waiting.append(then)

    def take(self, fds: list) -> None:
        """Takes the socket of a fork server that is on its way from the host. Without one there is none to be had."""
        if fds:
            self._drop_server()
            self._sock = socket.socket(fileno=fds.pop())
            self._reader = wire.FrameReader(self._sock)
            self._none_until = 0.0
            self._watch_fd(self._sock.fileno(), select.POLLIN, self._on_readable)
        elif not self.is_there:
            self._give_up()

    def fork(self, order: dict, body: bytes, fds: tuple) -> int:
        """Returns the pid of a new process that executes `order`.

        Raises NoForkServer, TooManyProcesses; WireError if the order is too long.
        """
        wire.encode_frame(order)
        ours, theirs = socket.socketpair()
        with ours:
            try:
                with theirs:
                    pid = self._request_fork(order["kind"], theirs.fileno(), time.monotonic() + ANSWER_SECONDS)
            except (OSError, ValueError, wire.WireError):
                self._give_up()
                raise NoForkServer("what has everything imported does not answer") from None
            self._send_order(pid, ours, order, body, fds)
        return pid

    def _request_fork(self, kind: str, fd: int, until: float) -> int:
        sock = self._set_timeout(until)
        if not self.is_let_in:
            self._admit_server()
        wire.send_frame(sock, {"fork": kind}, fds=(fd,))
        while not (answer := self._read_answer()):
            self._set_timeout(until)
        if answer.get("full"):
            raise TooManyProcesses
        if "error" in answer:
            raise NoForkServer(answer["error"])
        self._forks.add(answer["pid"])
        return int(answer["pid"])

    def _set_timeout(self, until: float) -> socket.socket:
        if self._sock is None:
            raise BrokenPipeError
        self._sock.settimeout(max(until - time.monotonic(), 0.001))
        return self._sock

    def _send_order(self, pid: int, ours: socket.socket, order: dict, body: bytes, fds: tuple) -> None:
        """Sends a fork its order. A fork that does not read it, because it was stopped, is killed."""
        try:
            ours.settimeout(ANSWER_SECONDS)
            wire.send_frame(ours, order, body, fds)
        except OSError:
            _kill_process(pid)

    def _admit_server(self) -> None:
        """Sends it the way behind the walls, once it has arrived. Raises OSError, ValueError."""
        sock: socket.socket = self._sock  # type: ignore[assignment]  # there is one, or nobody comes
        self._pid = int(sock.recv(16))
        socket.send_fds(sock, [b"d"], self.doors)

    def _on_readable(self) -> None:
        """Reads from the socket, unless a fork request of the same round has read it empty already."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)  # type: ignore[arg-type]  # it is watched
        if not poll.poll(0):
            return
        try:
            self._set_timeout(time.monotonic() + ANSWER_SECONDS)
            if self.is_let_in:
                self._read_answer()
            else:
                self._admit_server()
                self._call_waiting()
        except (OSError, ValueError, wire.WireError):
            if not self.is_let_in:
                self._give_up()
            self._drop_server()

    def _read_answer(self) -> dict | None:
        """Reads once; returns the answer, if it came. Ends before it are reported at once: a pid may be reused."""
        if not self._reader.pump():  # type: ignore[union-attr]  # it comes with the socket
            raise BrokenPipeError
        answer = None
        for header, _, _ in self._reader.take():  # type: ignore[union-attr]  # as above
            if "ended" not in header:
                answer = header
            else:
                self._ends.append(header)
                if answer is None:
                    self._report_ends()
        return answer

    def settle(self) -> None:
        """Between two requests: the caller of a fork knows its pid by now, so the ends of forks can be reported."""
        if self._ends:
            self._report_ends()
            sessions.remove_empty_sessions()
        if self._waiting and self.is_let_in:
            self._call_waiting()

    def _report_ends(self) -> None:
        ends, self._ends = self._ends, []
        for header in ends:
            self._forks.discard(header["ended"])
            self._ended(header["ended"], header["status"], ForkUsage(header["cpu"], header["rss"]))

    def _call_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then()

    def _give_up(self) -> None:
        """Drops the fork server; there will be none for a while."""
        self._none_until = time.monotonic() + RETRY_SECONDS
        self._drop_server()
        self._call_waiting()

    def _drop_server(self) -> None:
        """Ends it. Forks that it had reaped and not reported count as killed; all others are init's own now."""
        if self._sock is None:
            return
        sock, self._sock = self._sock, None
        self._watch_fd(sock.fileno(), 0, None)
        self._read_rest(sock)
        sock.close()
        _kill_process(self._pid)
        self._pid = 0
        told = {header["ended"] for header in self._ends}
        lost = [pid for pid in self._forks - told if not os.path.exists(f"/proc/{pid}")]
        self._ends += [{"ended": pid, "status": _KILLED, "cpu": 0.0, "rss": 0} for pid in lost]
        self._forks.clear()
        self._event({"ev": "seed_lost"})

    def _read_rest(self, sock: socket.socket) -> None:
        """Reads the reported ends that were not read yet."""
        sock.setblocking(False)
        try:
            while self._reader.pump():  # type: ignore[union-attr]
                pass
        except (OSError, wire.WireError):
            pass
        self._ends += [header for header, _, _ in self._reader.take() if "ended" in header]  # type: ignore[union-attr]


def _kill_process(pid: int) -> None:
    if pid > 1:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


class InProcessForkServer:
    """The fork server where there are no walls: init has everything imported itself."""

    is_there = is_let_in = may_come = True

    def __init__(self, processes):
        self._processes = processes

    def fork(self, order: dict, body: bytes, fds: tuple) -> int:
        """As `ForkServerClient.fork`."""
        try:
            pid = self._processes.fork()
        except OSError as error:
            raise NoForkServer(str(error)) from None
        if pid == 0:
            self._processes.become(order, body, list(fds))
        return int(pid)

    def take(self, fds: list) -> None:
        """Does nothing: there is no other fork server."""

    def settle(self) -> None:
        """Does nothing: its forks are init's own children."""


def main(served, walls, spec: dict, sock: socket.socket, entrances: list) -> None:
    """In a fork of the zygote, in the pid namespace of the sandbox. Never returns."""
    try:
        detach_from_parent([sock.fileno(), *entrances])  # first: in its cgroup it may be stopped at any time
        for entrance in entrances:
            os.write(entrance, b"0")
            os.close(entrance)
        served.take(spec, True)
        doors = wait_for_admission(sock)
        walls.enter(spec, doors)
        for fd in doors:
            os.close(fd)
        _ForkServer(served.processes, sock).serve()
    finally:  # a fork must never run on into its parent's code
        os._exit(1)


class _ForkServer:
    """The fork server's own process."""

    def __init__(self, processes, sock: socket.socket):
        self._processes = processes
        self._sock = sock
        self._reader = wire.FrameReader(sock)
        processes.reap = self._report_ended

    def serve(self) -> None:
        """Serves until init is gone, and with it the sandbox."""
        ended = sessions.listen_for_children()
        ignore_own_signals()
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(ended, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll()]
            if self._sock.fileno() in ready:
                self._serve_init()
            if ended in ready:
                os.read(ended, 4096)
            self._report_ended()

    def _serve_init(self) -> None:
        if not self._reader.pump():
            os._exit(0)
        for header, _, fds in self._reader.take():
            wire.send_frame(self._sock, self._fork_child(header["fork"], fds[0]))
            for fd in fds:
                os.close(fd)

    def _fork_child(self, kind: str, fd: int) -> dict:
        """Forks, without patience for `python3`: a request of it does not make init wait where there is no room."""
        try:
            pid = self._processes.fork(patient=kind != "attend")
        except TooManyProcesses:
            return {"full": True}
        except OSError as error:
            return {"error": str(error)}
        if pid == 0:
            _become_ordered(self._processes, fd)
        return {"pid": pid}

    def _report_ended(self) -> None:
        for pid, status, usage in sessions.reap_children():
            used = {"cpu": usage.ru_utime + usage.ru_stime, "rss": usage.ru_maxrss}
            wire.send_frame(self._sock, {"ended": pid, "status": status, **used})


def _become_ordered(processes, fd: int) -> None:
    """In the fork: receives its order from init and executes it. Never returns."""
    try:
        with socket.socket(fileno=fd) as told:
            order, body, fds = wire.FrameReader(told).next() or os._exit(0)
        processes.become(order, body, fds)
    finally:
        os._exit(127)
