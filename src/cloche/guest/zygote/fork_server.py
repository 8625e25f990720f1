"""A process in which everything is imported, behind a sandbox's walls: what starts warm there is forked from it.

Init has nothing imported (see `cradle.py`). When the first program is started that is to find everything imported (a
second kernel, `python3`), the host has the zygote fork a seed, which init lets in as it let the first kernel in. From
then on init asks it for forks. It runs nobody's code, and is told nothing: what a fork is to be is told to the fork.

Its forks are its children: it tells init how each has ended. Programs of the sandbox's root can stop or kill it. One
that does not answer is killed: its forks become init's own then.

INIT <-> SEED, once it is let in
  init -> seed      {"fork":"kernel|script|attend"}                 fds=[a socket of the fork's]
  seed -> init      {"pid":n} | {"full":true} | {"error":..}        its answer, and in between
                    {"ended":pid,"status":wait status,"cpu":s,"rss":KiB}
INIT -> FORK        what to be, body and descriptors: see `Processes.become`. At its end, the fork ends
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time

from cloche.guest import wire
from cloche.guest.init import sessions
from cloche.guest.init.programs import NoRoom, NoSeed, ignore_own_signals, leave_parent
from cloche.guest.zygote.enclosure import wait_at

ANSWER_SECONDS = 5.0  # in which it must have come to the door and have forked: init does nothing else meanwhile
NONE_SECONDS = 10.0  # after which another is asked for, where there was none to be had, or it did not answer
_KILLED = 9


class Usage:
    """What a process has used, as far as it is told on."""

    def __init__(self, cpu_seconds: float, peak_kib: int):
        self.ru_utime, self.ru_stime, self.ru_maxrss = cpu_seconds, 0.0, peak_kib


class Seed:
    """Init's side. `ended(pid, status, usage)` hears how its forks ended; `event` tells the host what is needed."""

    def __init__(self, watch_fd, event, ended):
        self._watch_fd = watch_fd
        self._event = event
        self._ended = ended
        self._sock: socket.socket | None = None
        self._reader: wire.Reader | None = None
        self._pid = 0  # once it is let in
        self._forks: set = set()  # that have not ended
        self._ends: list = []  # that were told, and nobody has heard of yet
        self._waiting: list = []  # what to call when there is one, or it is known that there will be none
        self._none_until = 0.0
        self.doors: list = []  # what whoever is let in goes through

    @property
    def is_there(self) -> bool:
        """Or on its way."""
        return self._sock is not None

    @property
    def is_let_in(self) -> bool:
        return self._pid != 0

    @property
    def may_come(self) -> bool:
        """Unless there was none to be had not long ago."""
        return time.monotonic() >= self._none_until

    def ask_for(self, then) -> None:
        """Has the host give us one, if none is on its way; calls `then()` when it is let in, or there will be none."""
        if not self._waiting and not self.is_there:
            self._event({"ev": "seed_wanted"})
        self._waiting.append(then)

    def take(self, fds: list) -> None:
        """What the host gives: the socket of one that is on its way. Without one there is none to be had."""
        if fds:
            self._let_go()
            self._sock = socket.socket(fileno=fds.pop())
            self._reader = wire.Reader(self._sock)
            self._none_until = 0.0
            self._watch_fd(self._sock.fileno(), select.POLLIN, self._hear)
        elif not self.is_there:
            self._give_up()

    def fork(self, order: dict, body: bytes, fds: tuple) -> int:
        """The pid of a new process that becomes what `order` says. Raises NoSeed, NoRoom; WireError if that is long."""
        wire.encode(order)
        ours, theirs = socket.socketpair()
        with ours:
            try:
                with theirs:
                    pid = self._forked(order["kind"], theirs.fileno(), time.monotonic() + ANSWER_SECONDS)
            except (OSError, ValueError, wire.WireError):
                self._give_up()
                raise NoSeed("what has everything imported does not answer") from None
            self._tell(pid, ours, order, body, fds)
        return pid

    def _forked(self, kind: str, fd: int, until: float) -> int:
        sock = self._in_time(until)
        if not self.is_let_in:
            self._let_in()
        wire.send(sock, {"fork": kind}, fds=(fd,))
        while not (answer := self._pump()):
            self._in_time(until)
        if answer.get("full"):
            raise NoRoom
        if "error" in answer:
            raise NoSeed(answer["error"])
        self._forks.add(answer["pid"])
        return int(answer["pid"])

    def _in_time(self, until: float) -> socket.socket:
        if self._sock is None:
            raise BrokenPipeError
        self._sock.settimeout(max(until - time.monotonic(), 0.001))
        return self._sock

    def _tell(self, pid: int, ours: socket.socket, order: dict, body: bytes, fds: tuple) -> None:
        """What it is to be. One that does not listen, because somebody has stopped it, is killed."""
        try:
            ours.settimeout(ANSWER_SECONDS)
            wire.send(ours, order, body, fds)
        except OSError:
            _kill(pid)

    def _let_in(self) -> None:
        """Gives it the way behind the walls, once it has come to the door. Raises OSError, ValueError."""
        sock: socket.socket = self._sock  # type: ignore[assignment]  # there is one, or nobody comes
        self._pid = int(sock.recv(16))
        socket.send_fds(sock, [b"d"], self.doors)

    def _hear(self) -> None:
        """What made it ready may have been read already, by who asked for a fork in the same round."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)  # type: ignore[arg-type]  # it is watched
        if not poll.poll(0):
            return
        try:
            self._in_time(time.monotonic() + ANSWER_SECONDS)
            if self.is_let_in:
                self._pump()
            else:
                self._let_in()
                self._stop_waiting()
        except (OSError, ValueError, wire.WireError):
            if not self.is_let_in:
                self._give_up()
            self._let_go()

    def _pump(self) -> dict | None:
        """Reads once; gives the answer, if that came. Ends before it are told at once: a pid may come again."""
        if not self._reader.pump():  # type: ignore[union-attr]  # it comes with the socket
            raise BrokenPipeError
        answer = None
        for header, _, _ in self._reader.take():  # type: ignore[union-attr]  # as above
            if "ended" not in header:
                answer = header
            else:
                self._ends.append(header)
                if answer is None:
                    self._tell_ends()
        return answer

    def settle(self) -> None:
        """Between two requests: whoever has asked for a fork knows it by now, and can hear that it has ended."""
        if self._ends:
            self._tell_ends()
            sessions.forget_empty()
        if self._waiting and self.is_let_in:
            self._stop_waiting()

    def _tell_ends(self) -> None:
        ends, self._ends = self._ends, []
        for header in ends:
            self._forks.discard(header["ended"])
            self._ended(header["ended"], header["status"], Usage(header["cpu"], header["rss"]))

    def _stop_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then()

    def _give_up(self) -> None:
        """There is none, and will be none for a while."""
        self._none_until = time.monotonic() + NONE_SECONDS
        self._let_go()
        self._stop_waiting()

    def _let_go(self) -> None:
        """Ends it. Forks that it had collected and not told of are told as killed; all others are our own now."""
        if self._sock is None:
            return
        sock, self._sock = self._sock, None
        self._watch_fd(sock.fileno(), 0, None)
        self._read_rest(sock)
        sock.close()
        _kill(self._pid)
        self._pid = 0
        told = {header["ended"] for header in self._ends}
        lost = [pid for pid in self._forks - told if not os.path.exists(f"/proc/{pid}")]
        self._ends += [{"ended": pid, "status": _KILLED, "cpu": 0.0, "rss": 0} for pid in lost]
        self._forks.clear()
        self._event({"ev": "seed_lost"})

    def _read_rest(self, sock: socket.socket) -> None:
        """The ends that it has told of and that were not read."""
        sock.setblocking(False)
        try:
            while self._reader.pump():  # type: ignore[union-attr]
                pass
        except (OSError, wire.WireError):
            pass
        self._ends += [header for header, _, _ in self._reader.take() if "ended" in header]  # type: ignore[union-attr]


def _kill(pid: int) -> None:
    if pid > 1:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


class Itself:
    """In the place of a seed where there are no walls: init has everything imported itself."""

    is_there = is_let_in = may_come = True

    def __init__(self, processes):
        self._processes = processes

    def fork(self, order: dict, body: bytes, fds: tuple) -> int:
        """As `Seed.fork`."""
        try:
            pid = self._processes.fork()
        except OSError as error:
            raise NoSeed(str(error)) from None
        if pid == 0:
            self._processes.become(order, body, list(fds))
        return int(pid)

    def take(self, fds: list) -> None:
        """Nobody gives us one."""

    def settle(self) -> None:
        """Its forks are init's own children."""


def main(served, walls, spec: dict, sock: socket.socket, entrances: list) -> None:
    """In a fork of the zygote, in the pid namespace of the sandbox. Never returns."""
    try:
        leave_parent([sock.fileno(), *entrances])  # first: in its cgroup it may be stopped at any time
        for entrance in entrances:
            os.write(entrance, b"0")
            os.close(entrance)
        served.take(spec, True)
        doors = wait_at(sock)
        walls.enter(spec, doors)
        for fd in doors:
            os.close(fd)
        _Forks(served.processes, sock).serve()
    finally:  # a fork must never run on into its parent's code
        os._exit(1)


class _Forks:
    """The seed's own side."""

    def __init__(self, processes, sock: socket.socket):
        self._processes = processes
        self._sock = sock
        self._reader = wire.Reader(sock)
        processes.reap = self._reap

    def serve(self) -> None:
        """Until init is gone; and then everything is."""
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
            self._reap()

    def _serve_init(self) -> None:
        if not self._reader.pump():
            os._exit(0)
        for header, _, fds in self._reader.take():
            wire.send(self._sock, self._fork(header["fork"], fds[0]))
            for fd in fds:
                os.close(fd)

    def _fork(self, kind: str, fd: int) -> dict:
        """Whoever asks for `python3` does not make init wait where there is no room."""
        try:
            pid = self._processes.fork(patient=kind != "attend")
        except NoRoom:
            return {"full": True}
        except OSError as error:
            return {"error": str(error)}
        if pid == 0:
            _become(self._processes, fd)
        return {"pid": pid}

    def _reap(self) -> None:
        for pid, status, usage in sessions.reap():
            used = {"cpu": usage.ru_utime + usage.ru_stime, "rss": usage.ru_maxrss}
            wire.send(self._sock, {"ended": pid, "status": status, **used})


def _become(processes, fd: int) -> None:
    """In the fork: hears what it is to be, from init, and is it. Never returns."""
    try:
        with socket.socket(fileno=fd) as told:
            order, body, fds = wire.Reader(told).next() or os._exit(0)
        processes.become(order, body, fds)
    finally:
        os._exit(127)
