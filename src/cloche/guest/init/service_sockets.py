"""Sockets of init on which programs of the sandbox request services: `sudo`, `python3`.

Init itself only accepts connections and forks. A process of its own reads each connection; it can be kept
waiting, confused or killed and harms only its client.
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

CONNECTION_FD = 3  # of the forks
REQUEST_SECONDS = 10.0
_BACKLOG = 16


class RequestRefused(Exception):
    """The request was refused. The client gets the message."""


class ServiceSocket:
    """One socket, and the forks that serve its connections: at most `most` of them at a time.

    `start(fd)` forks one for a connection and returns its pid; it raises RequestRefused. With `keeps`, init keeps
    its side of a connection as long as its fork lives, never reads from it, calls `keeps(pid)` when the client is
    gone, and tells the client how the fork ended. `prepare(socket)` comes before a connection is accepted: False
    if clients have to wait.
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
        """Opens it to every program of the sandbox.

        A place of bytes is an abstract name in its network, and no file.
        """
        if self._listener is None:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            self._listener.bind(self._place)
            if isinstance(self._place, str):
                os.chmod(self._place, 0o666)
            self._listener.listen(_BACKLOG)
            self._watch_fd(self._listener.fileno(), select.POLLIN, self._accept_connection)

    def rest(self, why: str) -> None:
        """Makes new clients wait until `go_on`. Harmless when it is not open, or rests already."""
        if self._listener is not None:
            if not self._rests:
                self._watch_fd(self._listener.fileno(), 0, None)
            self._rests.add(why)

    def go_on(self, why: str) -> None:
        if why in self._rests:
            self._rests.remove(why)
            if not self._rests:
                self._watch_fd(self._listener.fileno(), select.POLLIN, self._accept_connection)  # type: ignore[union-attr]

    def ended(self, pid: int, status: int) -> None:
        """Handles the end of any child of init."""
        connection = self._forks.pop(pid, None)
        if connection is not None:
            if connection.fileno() >= 0:
                self._watch_fd(connection.fileno(), 0, None)
                _send_quietly(connection, {"status": status})
            connection.close()

    def _accept_connection(self) -> None:
        """Accepts one connection per event, so that a flood of them cannot keep init from its other work."""
        if self._prepare is not None and not self._prepare(self):
            return
        try:
            connection, _ = self._listener.accept()  # type: ignore[union-attr]  # it is open, or nobody comes
        except OSError:
            return
        try:
            if len(self._forks) >= self._most:
                raise RequestRefused(self._full)
            pid = self._start(connection.fileno())
        except RequestRefused as error:
            _send_quietly(connection, {"error": str(error)})
            connection.close()
            return
        self._keep_connection(pid, connection)

    def _keep_connection(self, pid: int, connection: socket.socket) -> None:
        self._forks[pid] = connection if self._keeps else None
        if self._keeps:
            sessions.adopt_session(pid, peer_ids(connection)[0])
            self._watch_fd(connection.fileno(), select.POLLRDHUP, lambda: self._on_client_gone(pid, connection))
        else:
            connection.close()

    def _on_client_gone(self, pid: int, connection: socket.socket) -> None:
        """The client is gone; or the event is of an earlier connection with the same descriptor number."""
        poll = select.poll()
        poll.register(connection, select.POLLRDHUP)
        if not poll.poll(0):
            return
        self._watch_fd(connection.fileno(), 0, None)
        connection.close()
        self._keeps(pid)


def _send_quietly(connection: socket.socket, header: dict) -> None:
    """Sends without waiting: the message fits into the buffer of an unread socket, or is dropped."""
    connection.setblocking(False)
    with contextlib.suppress(OSError):
        wire.send_frame(connection, header)


def fork_per_connection(attend):
    """For a `ServiceSocket`: has a fork of init serve a connection. `attend(fd)` never returns."""

    def start(fd: int) -> int:
        pid = fork_process()
        if pid == 0:
            attend(fd)
        return pid

    return start


def fork_process() -> int:
    """Forks. Raises RequestRefused."""
    try:
        return syscalls.fork_bare()
    except OSError as error:
        raise RequestRefused(f"the command cannot be started: {error.strerror}") from None


def detach_from_init(fd: int) -> socket.socket:
    """In a fork: closes init's descriptors, its channel above all, and returns the connection `fd`."""
    os.dup2(fd, CONNECTION_FD)
    syscalls.close_from(CONNECTION_FD + 1)
    default_signals()
    os.setsid()
    return socket.socket(fileno=CONNECTION_FD)


def request(connection: socket.socket, reader: wire.FrameReader) -> tuple:
    """Returns the first frame: header, body, descriptors.

    It has to come whole in time, however it is cut into pieces.
    """
    until = time.monotonic() + REQUEST_SECONDS
    while not (frames := reader.take()):
        connection.settimeout(max(until - time.monotonic(), 0.001))
        if not reader.pump():
            os._exit(0)
    if len(frames) != 1:
        raise RequestRefused("a request was expected, and nothing after it before it is answered")
    connection.settimeout(REQUEST_SECONDS)
    return frames[0]


def peer_ids(connection: socket.socket) -> tuple:
    """Pid and uid of the client."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[:2]


def caller(connection: socket.socket) -> tuple:
    """Pid and uid of the client. Raises RequestRefused unless that is a user of the sandbox."""
    pid, uid = peer_ids(connection)
    if uid not in identity.UIDS.values():
        raise RequestRefused(f"a program with the uid {uid} may not ask for that")
    return pid, uid
