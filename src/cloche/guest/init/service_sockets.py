"""Sockets of init's on which programs of the sandbox ask for something: `sudo`, `python3`.

Init itself only accepts connections and forks. What a program then says is read by a process of its own for each
connection, which can be kept waiting, confused or killed and harms nobody but its client.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time

from cloche.guest import wire
from cloche.guest.init import identity, sessions
from cloche.guest.init.programs import default_signals
from cloche.linux import syscalls

CONNECTION = 3  # of the forks
REQUEST_SECONDS = 10.0
_BACKLOG = 16


class Refused(Exception):
    """What the client is told."""


class Reception:
    """One socket, and the forks that attend to those who came through it: at most `most` of them at a time.

    `start(fd)` forks one for a connection and gives its pid; it raises Refused. With `keeps`, init keeps its side of a
    connection as long as its fork lives, never reads from it, calls `keeps(pid)` when the client is gone, and tells the
    client how the fork ended. `prepare(reception)` comes before anybody is let in: False if they have to wait.
    """

    def __init__(self, place: str | bytes, watch_fd, start, *, most: int, full: str, keeps=None, prepare=None):
        self._place = place
        self._watch_fd = watch_fd
        self._start = start
        self._most = most
        self._full = full
        self._keeps = keeps
        self._prepare = prepare
        self._listener: socket.socket | None = None
        self._rests: set = set()  # why nobody is let in just now
        self._forks: dict = {}  # pid -> the connection that is kept, or None

    def open(self) -> None:
        """Lets every program of the sandbox in. A place of bytes is a name in its network, and no file."""
        if self._listener is None:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            self._listener.bind(self._place)
            if isinstance(self._place, str):
                os.chmod(self._place, 0o666)
            self._listener.listen(_BACKLOG)
            self._watch_fd(self._listener.fileno(), select.POLLIN, self._accept)

    def rest(self, why: str) -> None:
        """Who comes now waits until `go_on`. Harmless when it is not open, or rests already."""
        if self._listener is not None:
            if not self._rests:
                self._watch_fd(self._listener.fileno(), 0, None)
            self._rests.add(why)

    def go_on(self, why: str) -> None:
        if why in self._rests:
            self._rests.remove(why)
            if not self._rests:
                self._watch_fd(self._listener.fileno(), select.POLLIN, self._accept)  # type: ignore[union-attr]

    def ended(self, pid: int, status: int) -> None:
        """A child of init has ended, whosever it was."""
        connection = self._forks.pop(pid, None)
        if connection is not None:
            if connection.fileno() >= 0:
                self._watch_fd(connection.fileno(), 0, None)
                _say(connection, {"status": status})
            connection.close()

    def _accept(self) -> None:
        """One at a time: whoever connects without end waits between our other work."""
        if self._prepare is not None and not self._prepare(self):
            return
        try:
            connection, _ = self._listener.accept()  # type: ignore[union-attr]  # it is open, or nobody comes
        except OSError:
            return
        try:
            if len(self._forks) >= self._most:
                raise Refused(self._full)
            pid = self._start(connection.fileno())
        except Refused as error:
            _say(connection, {"error": str(error)})
            connection.close()
            return
        self._know(pid, connection)

    def _know(self, pid: int, connection: socket.socket) -> None:
        self._forks[pid] = connection if self._keeps else None
        if self._keeps:
            sessions.adopt(pid, peer(connection)[0])
            self._watch_fd(connection.fileno(), select.POLLRDHUP, lambda: self._lose(pid, connection))
        else:
            connection.close()

    def _lose(self, pid: int, connection: socket.socket) -> None:
        """The client is gone; or was the one whose descriptor had this number a moment ago."""
        poll = select.poll()
        poll.register(connection, select.POLLRDHUP)
        if not poll.poll(0):
            return
        self._watch_fd(connection.fileno(), 0, None)
        connection.close()
        self._keeps(pid)


def _say(connection: socket.socket, header: dict) -> None:
    """Init waits for nobody: this fits into what an unread socket holds, or is not said."""
    connection.setblocking(False)
    with contextlib.suppress(OSError):
        wire.send(connection, header)


def forking(attend):
    """For a `Reception`: has a fork of init attend to a connection. `attend(fd)` never returns."""

    def start(fd: int) -> int:
        pid = fork()
        if pid == 0:
            attend(fd)
        return pid

    return start


def fork() -> int:
    """Raises Refused."""
    try:
        return syscalls.fork_bare()
    except OSError as error:
        raise Refused(f"the command cannot be started: {error.strerror}") from None


def forget_init(fd: int) -> socket.socket:
    """In a fork: lets go of what is init's, its channel above all, and gives the connection, which is `fd`."""
    os.dup2(fd, CONNECTION)
    syscalls.close_from(CONNECTION + 1)
    default_signals()
    os.setsid()
    return socket.socket(fileno=CONNECTION)


def request(connection: socket.socket, reader: wire.Reader) -> tuple:
    """The first frame: header, body, descriptors. It has to come whole in time, however it is cut into pieces."""
    until = time.monotonic() + REQUEST_SECONDS
    while not (frames := reader.take()):
        connection.settimeout(max(until - time.monotonic(), 0.001))
        if not reader.pump():
            os._exit(0)
    if len(frames) != 1:
        raise Refused("a request was expected, and nothing after it before it is answered")
    connection.settimeout(REQUEST_SECONDS)
    return frames[0]


def peer(connection: socket.socket) -> tuple:
    """Pid and uid of who has connected."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[:2]


def caller(connection: socket.socket) -> tuple:
    """The same. Raises Refused unless that is a user of the sandbox."""
    pid, uid = peer(connection)
    if uid not in identity.UIDS.values():
        raise Refused(f"a program with the uid {uid} may not ask for that")
    return pid, uid
