"""Relays: what exists inside only, carried over sockets of the host's.

To some hosts no descriptor can be passed (gVisor's sandboxes can take them, and give none). A request that would be
answered with one comes with an end of the host's, and says `relay`: init then copies between the two, in its loop. Of a
listener, the connections are carried: each has a socket of its own, which init connects to the host's.

A relay ends with the host's end: a terminal is closed then, a connection too. At the end of the other side, the host's
end is closed when all is sent.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import stat
import struct
import termios

from cloche.guest.paths import HOST_DIRECTORY

_PIECE_BYTES = 128 << 10
_CONNECT_MILLISECONDS = 50  # a refusal comes sooner; a program that does not accept shall not keep init


class UnknownTerminal(LookupError):
    code = "process_not_found"


class Relays:
    def __init__(self, watch_fd):
        self._watch_fd = watch_fd
        self._terminals: dict = {}  # by the process

    def verb_handlers(self) -> dict:
        return {"terminal_resize": self._resize_terminal}

    def carry(self, header: dict, fd: int) -> None:
        """Carries a copy of `fd`, the answer to the request `header`. Raises OSError where it is no connection."""
        if isinstance(header["relay"], str):
            RelayedListener(self._watch_fd, os.dup(fd), header["relay"])
            return
        if _is_socket(fd):
            _check_connected(fd)
        relay = Relay(self._watch_fd, os.dup(fd), os.dup(header["wires"][0]))
        if os.isatty(fd):
            self._terminals = {name: each for name, each in self._terminals.items() if not each.closed}
            self._terminals[header["process"]] = relay

    def flush_terminals(self) -> None:
        """Sends what programs have written to them, before their ends are told."""
        for relay in list(self._terminals.values()):
            relay.flush()

    def _resize_terminal(self, header: dict, _: bytes) -> dict:
        relay = self._terminals.get(header["process"])
        if relay is None or relay.closed:
            raise UnknownTerminal("the process has no terminal")
        size = struct.pack("HHHH", header["rows"], header["columns"], 0, 0)
        fcntl.ioctl(relay.inner, termios.TIOCSWINSZ, size)
        return {}


class RelayedListener:
    """Accepts connections inside, and carries each over one to the host's socket of that name."""

    def __init__(self, watch_fd, listener: int, name: str):
        self._watch_fd = watch_fd
        self._listener = socket.socket(fileno=listener)
        self._path = f"{HOST_DIRECTORY}/{name}"
        self._watch_fd(self._listener.fileno(), select.POLLIN, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        host = socket.socket(socket.AF_UNIX)
        try:
            host.connect(self._path)
        except OSError:  # the host has closed its own, or there are too many files open
            host.close()
            connection.close()
            return
        Relay(self._watch_fd, connection.detach(), host.detach())


class Relay:
    """Copies between two descriptors, which it owns, both ways."""

    def __init__(self, watch_fd, inner: int, outer: int):
        self._watch_fd = watch_fd
        self.inner = inner
        self._outer = outer
        self.closed = False
        self._unsent = {inner: b"", outer: b""}  # by the one that it is to be written to
        self._open = {inner, outer}  # there may be more to read
        self._watched = {inner: 0, outer: 0}
        for fd in (inner, outer):
            os.set_blocking(fd, False)
        self._watch()

    def flush(self) -> None:
        """Sends what is there to be read inside, as far as the host has room for it."""
        while not self.closed and self.inner in self._open and not self._unsent[self._outer]:
            if not self._read(self.inner):
                break
        self._watch()

    def _other(self, fd: int) -> int:
        return self._outer if fd == self.inner else self.inner

    def _watch(self) -> None:
        if not self._open and not any(self._unsent.values()):
            self._close()
        for fd, before in self._watched.items() if not self.closed else ():
            events = select.POLLOUT if self._unsent[fd] else 0
            if fd in self._open and not self._unsent[self._other(fd)]:
                events |= select.POLLIN
            if events != before:
                self._watched[fd] = events
                if before:
                    self._watch_fd(fd, 0, None)
                if events:
                    self._watch_fd(fd, events, lambda fd=fd: self._on_ready(fd))

    def _on_ready(self, fd: int) -> None:
        if self._unsent[fd]:
            self._write(fd)
        if not self.closed and fd in self._open and not self._unsent[self._other(fd)]:
            self._read(fd)
        self._watch()

    def _read(self, fd: int) -> bool:
        """Reads once, and passes it on. False if there was nothing."""
        try:
            data = os.read(fd, _PIECE_BYTES)
        except BlockingIOError:
            return False
        except OSError:  # EIO: the other side of a terminal was closed
            data = b""
        other = self._other(fd)
        if data:
            self._unsent[other] = data
            self._write(other)
        else:
            self._open.discard(fd)
            self._end_writing(other)
        return bool(data)

    def _write(self, fd: int) -> None:
        try:
            sent = os.write(fd, self._unsent[fd])
        except BlockingIOError:
            return
        except OSError:
            self._stop_writing(fd)
            return
        self._unsent[fd] = self._unsent[fd][sent:]
        if not self._unsent[fd] and self._other(fd) not in self._open:
            self._end_writing(fd)

    def _stop_writing(self, fd: int) -> None:
        """It takes no more. A server that has answered, and does not read on, is still to be heard."""
        self._unsent[fd] = b""
        self._open.discard(self._other(fd))
        if fd == self._outer:
            self._close()

    def _end_writing(self, fd: int) -> None:
        """All of the other side was passed on. Terminals and files have no half that could be closed."""
        if not _is_socket(fd):
            self._close()
        elif not self._unsent[fd]:
            with socket.socket(fileno=os.dup(fd)) as ended:
                try:
                    ended.shutdown(socket.SHUT_WR)
                except OSError:
                    pass  # it is closed already

    def _close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for fd, events in self._watched.items():
            if events:
                self._watch_fd(fd, 0, None)
            os.close(fd)


def _is_socket(fd: int) -> bool:
    return stat.S_ISSOCK(os.fstat(fd).st_mode)


def _check_connected(fd: int) -> None:
    """Raises OSError if the connection was refused. One that is still on its way is carried as it is."""
    ready = select.poll()
    ready.register(fd, select.POLLOUT)
    ready.poll(_CONNECT_MILLISECONDS)
    with socket.socket(fileno=os.dup(fd)) as connection:
        error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        raise OSError(error, os.strerror(error))
