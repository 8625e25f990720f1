"""A process in which everything is imported, behind a sandbox's walls: what starts warm there is forked from it.

Init has nothing imported (see `cradle.py`). When the first program is started that is to find everything imported (a
second kernel, `python3`), the host has the zygote fork a seed, which init lets in as it let the first kernel in. From
then on init asks it for forks. It runs nobody's code, and is told nothing but what its forks are to be.

Its forks are its children: it tells init how each has ended. Should it be killed itself, they become init's own.

INIT <-> SEED, once it is let in
  init -> seed      {"kind":"kernel|script|attend",..} [body] [fds]      see `Processes.become`
  seed -> init      {"pid":n} | {"full":true} | {"error":..}             its answer, and in between
                    {"ended":pid,"status":wait status,"cpu":s,"rss":KiB}
"""

from __future__ import annotations

import os
import select
import socket
import time

from cloche.guest import sessions, wire
from cloche.guest.enclosure import wait_at
from cloche.guest.programs import NoRoom, NoSeed, ignore_own_signals, leave_parent

ANSWER_SECONDS = 30.0  # in which it must have come to the door, or have forked: others may have all CPUs
NONE_SECONDS = 10.0  # after which the host is asked again that had none to give


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
        self._is_in = False
        self._waiting: list = []  # what to call when there is one, or it is known that there will be none
        self._ends: list = []  # that were told, and nobody has heard of yet
        self._none_until = 0.0
        self.doors: list = []  # what whoever is let in goes through

    @property
    def is_there(self) -> bool:
        return self._sock is not None

    @property
    def may_come(self) -> bool:
        """Unless the host has said, not long ago, that there is none to be had."""
        return time.monotonic() >= self._none_until

    def ask_for(self, then) -> None:
        """Has the host give us one; calls `then()` when it has, or cannot."""
        if not self._waiting:
            self._event({"ev": "seed_wanted"})
        self._waiting.append(then)

    def take(self, fds: list) -> None:
        """What the host gives: the socket of one that is on its way. Without one there is none to be had."""
        self._lose()
        self._none_until = 0.0 if fds else time.monotonic() + NONE_SECONDS
        if fds:
            self._sock = socket.socket(fileno=fds.pop())
            self._sock.settimeout(ANSWER_SECONDS)
            self._reader = wire.Reader(self._sock)
            self._watch_fd(self._sock.fileno(), select.POLLIN, self._hear)
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then()

    def fork(self, order: dict, body: bytes, fds: tuple) -> int:
        """The pid of a new process that becomes what `order` says. Raises NoSeed, NoRoom."""
        try:
            self._let_in()
            wire.send(self._sock, order, body, fds)  # type: ignore[arg-type]  # there is one, or nobody is let in
            while not (answer := self._pump()):
                continue
        except (OSError, wire.WireError):
            self._lose()
            raise NoSeed("it does not answer") from None
        if answer.get("full"):
            raise NoRoom
        if "error" in answer:
            raise NoSeed(answer["error"])
        return answer["pid"]

    def _let_in(self) -> None:
        """Gives it the way behind the walls, once it has come to the door."""
        if self._sock is None:
            raise BrokenPipeError
        if not self._is_in:
            if not self._sock.recv(16):
                raise BrokenPipeError
            socket.send_fds(self._sock, [b"d"], self.doors)
            self._is_in = True

    def _hear(self) -> None:
        try:
            if self._is_in:
                self._pump()
            else:
                self._let_in()
        except (OSError, wire.WireError):
            self._lose()

    def _pump(self) -> dict | None:
        """Reads once; gives the answer, if that came. One that has just been forked may have ended behind it."""
        if not self._reader.pump():  # type: ignore[union-attr]
            raise BrokenPipeError
        frames = [header for header, _, _ in self._reader.take()]  # type: ignore[union-attr]
        self._ends += [header for header in frames if "ended" in header]
        return next((header for header in frames if "ended" not in header), None)

    def tell_ends(self) -> None:
        """Between two requests: whoever has asked for a fork knows it by now."""
        ends, self._ends = self._ends, []
        for header in ends:
            self._ended(header["ended"], header["status"], Usage(header["cpu"], header["rss"]))

    def _lose(self) -> None:
        if self._sock is not None:
            self._watch_fd(self._sock.fileno(), 0, None)
            self._sock.close()
            self._sock, self._is_in = None, False
            self._event({"ev": "seed_lost"})


class Itself:
    """In the place of a seed where there are no walls: init has everything imported itself."""

    is_there = may_come = True

    def __init__(self, processes):
        self._processes = processes

    def fork(self, order: dict, body: bytes, fds: tuple) -> int:
        """As `Seed.fork`."""
        pid = self._processes.fork()
        if pid == 0:
            self._processes.become(order, body, list(fds))
        return pid

    def take(self, fds: list) -> None:
        """The host does not know that we need none."""

    def tell_ends(self) -> None:
        """They are init's own children."""


def main(processes, walls, spec: dict, sock: socket.socket, entrances: list) -> None:
    """In a fork of the zygote, in the pid namespace of the sandbox. Never returns."""
    try:
        for entrance in entrances:
            os.write(entrance, b"0")
        leave_parent([sock.fileno()])
        doors = wait_at(sock)
        walls.enter(spec, doors)
        for fd in doors:
            os.close(fd)
        _Forks(processes, sock).serve()
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
        for order, body, fds in self._reader.take():
            wire.send(self._sock, self._fork(order, body, fds))
            for fd in fds:
                os.close(fd)

    def _fork(self, order: dict, body: bytes, fds: list) -> dict:
        try:
            pid = self._processes.fork()
        except NoRoom:
            return {"full": True}
        except OSError as error:
            return {"error": str(error)}
        if pid == 0:
            self._processes.become(order, body, fds)
        return {"pid": pid}

    def _reap(self) -> None:
        for pid, status, usage in sessions.reap():
            used = {"cpu": usage.ru_utime + usage.ru_stime, "rss": usage.ru_maxrss}
            wire.send(self._sock, {"ended": pid, "status": status, **used})
