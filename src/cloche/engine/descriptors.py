"""Descriptors that a guest passed: what they really are, and reading and writing them without blocking the loop."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import stat
import struct
import termios

from cloche import errors
from cloche.engine.guest import Reply
from cloche.engine.pipe import is_readable_pipe, write_available
from cloche.isolation.channel import close_all
from cloche.linux import syscalls

CHUNK_BYTES = 1 << 20
PIPE_BYTES = 1 << 20

# File systems whose "regular files" are doors into a kernel or into somebody's daemon.
REFUSED_TYPES = frozenset(
    {
        0x9FA0,  # proc
        0x62656572,  # sysfs
        0x64626720,  # debugfs
        0x74726163,  # tracefs
        0x27E0EB,  # cgroup
        0x63677270,  # cgroup2
        0x65735546,  # fuse: a read may never return
        0x19800202,  # mqueue
    }
)


def only_fd(reply: Reply) -> int:
    """The one descriptor of a reply. Raises ProtocolViolation."""
    if len(reply.fds) != 1:
        close_all(reply.fds)
        raise errors.ProtocolViolation("the guest's init did not pass the one descriptor that was asked for")
    return reply.fds[0]


def check_regular(fd: int) -> os.stat_result:
    """What a passed file is. Raises PermissionDenied unless it is a regular file that can be read like one."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or syscalls.filesystem_type(fd) in REFUSED_TYPES:
        raise errors.PermissionDenied("only regular files can be read; this one is a door to something else")
    return status


def is_kernel(reply: Reply) -> bool:
    """Whether what init passed is what the host needs of a kernel."""
    token = reply.ok.get("token")
    if len(reply.fds) != 3 or not isinstance(token, str) or len(token) != 16 or not token.isascii():
        return False
    return _is_unix_stream(reply.fds[0]) and all(is_readable_pipe(fd) for fd in reply.fds[1:])


def _is_unix_stream(fd: int) -> bool:
    try:
        probe = socket.socket(fileno=fd)
    except OSError:
        return False
    try:
        return probe.family == socket.AF_UNIX and probe.type == socket.SOCK_STREAM
    finally:
        probe.detach()


def read_whole(fd: int, size: int) -> bytes:
    """The first `size` bytes, fewer at the end of the file. Blocking: for a thread.

    A regular file gives all at once, so that the content is in memory once only.
    """
    content = os.pread(fd, size, 0)
    while len(content) < size and (rest := os.pread(fd, size - len(content), len(content))):
        content += rest
    return content


class PipeWriter:
    """Writes to a pipe or terminal that a guest reads, on the event loop. Owns `fd`."""

    def __init__(self, fd: int):
        os.set_blocking(fd, False)
        self._fd: int | None = fd
        self._room: asyncio.Future[None] | None = None  # done when there is room to write, or nothing to write to
        self._turn = asyncio.Lock()
        with contextlib.suppress(OSError):  # EPERM: this user has too many large pipes; small ones work
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    async def write(self, data: bytes) -> None:
        """Waits until all is in the pipe. Raises BrokenPipeError when nobody reads, or after `close`."""
        async with self._turn:
            rest = memoryview(data)
            while rest:
                rest = rest[await self._write_some(rest) :]

    def resize(self, rows: int, columns: int) -> None:
        """Gives a terminal that size. Raises OSError if it is none, or after `close`."""
        if self._fd is None:
            raise BrokenPipeError("closed")
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    @property
    def closed(self) -> bool:
        return self._fd is None

    def close(self) -> None:
        """Whoever waits in `write` is told."""
        if self._fd is not None:
            asyncio.get_running_loop().remove_writer(self._fd)
            os.close(self._fd)
            self._fd = None
        if self._room is not None:
            _set(self._room)

    async def _write_some(self, data: memoryview) -> int:
        if self._fd is None:
            raise BrokenPipeError("closed")
        try:
            return write_available(self._fd, data)
        except (BlockingIOError, InterruptedError):
            await self._wait_for_room(self._fd)
            return 0

    async def _wait_for_room(self, fd: int) -> None:
        loop = asyncio.get_running_loop()
        self._room = loop.create_future()
        loop.add_writer(fd, _set, self._room)
        try:
            await self._room
        finally:
            self._room = None
            if self._fd is not None:
                loop.remove_writer(fd)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
