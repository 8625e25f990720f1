"""Reading an output pipe on the event loop, without ever blocking."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import stat
import threading
from collections.abc import Callable

READ_BYTES = 64 << 10
MAX_CAPACITY_BYTES = 1 << 20


class _Buffer(threading.local):
    """What is read into, by all pipes of a thread: a new one each time would be 64 KiB of zeros to write."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(READ_BYTES))


_buffer = _Buffer()


class Pipe:
    """Hands what comes out of `fd` to `on_data`; `on_end` is called once when all writers are gone. Owns `fd`.

    `gate`, if given, is asked before each read; when it says no, nothing is read this time.
    """

    def __init__(
        self,
        fd: int,
        on_data: Callable[[bytes], None],
        on_end: Callable[[], None] | None = None,
        gate: Callable[[], bool] | None = None,
    ):
        os.set_blocking(fd, False)
        self._fd = fd
        self._on_data = on_data
        self._on_end = on_end
        self._gate = gate
        self._loop = asyncio.get_running_loop()
        self._reading = False
        self.closed = False

    def resume(self) -> None:
        if not self.closed and not self._reading:
            self._reading = True
            self._loop.add_reader(self._fd, self._readable)

    def pause(self) -> None:
        if not self.closed and self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def read_now(self) -> int:
        """One read of what is there: the number of bytes, 0 when there is nothing now or ever."""
        if self.closed:
            return 0
        try:
            data = read_available(self._fd)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:  # EIO: the other side of a PTY was closed
            data = b""
        if data:
            self._on_data(data)
        else:
            self.close()
            if self._on_end is not None:
                self._on_end()
        return len(data)

    @property
    def capacity_bytes(self) -> int:
        """At most so much was written before now and is not read yet; what follows is newer."""
        try:
            return min(fcntl.fcntl(self._fd, fcntl.F_GETPIPE_SZ), MAX_CAPACITY_BYTES)
        except OSError:  # a terminal, or closed
            return MAX_CAPACITY_BYTES

    def close(self) -> None:
        if self.closed:
            return
        self.pause()
        self.closed = True
        os.close(self._fd)

    def _readable(self) -> None:
        if self._gate is None or self._gate():
            self.read_now()


def read_available(fd: int) -> bytes:
    """Up to READ_BYTES that are there now; b"" at the end. Raises BlockingIOError if there is nothing.

    Whether `os.read` waits is a property of the open file, which the guest that passed it shares with us and can change
    at any moment; this asks for it call by call. (Terminals, and pipes before Linux 6.4, do not know it.)
    """
    view = _buffer.view
    try:
        return bytes(view[: os.preadv(fd, [view], -1, os.RWF_NOWAIT)])
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
    return os.read(fd, READ_BYTES)


def write_available(fd: int, data: memoryview) -> int:
    """The same for writing: how many bytes were taken. Raises BlockingIOError if there is no room."""
    try:
        return os.pwritev(fd, [data], -1, os.RWF_NOWAIT)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
    return os.write(fd, data)


def is_readable_pipe(fd: int) -> bool:
    """Whether a descriptor that a guest passed is what it should be: a pipe, or a terminal for a PTY."""
    mode = os.fstat(fd).st_mode
    return stat.S_ISFIFO(mode) or (stat.S_ISCHR(mode) and os.isatty(fd))
