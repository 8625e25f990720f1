"""Lines of our own stdin, read only when somebody asks for one, without a thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
import termios
from collections.abc import Callable, Iterator

READ_BYTES = 64 << 10


class Lines:
    """Reads the descriptor itself: what Python's `sys.stdin` has buffered is not seen."""

    def __init__(self, fd: int = 0):
        self._fd = fd
        self._buffer = bytearray()
        self._over = False

    async def next(self, *, secret: bool = False, ask: Callable[[], object] = lambda: None) -> str | None:
        """The next line without its end; None at the end of the input. May be cancelled: nothing is lost.

        `ask` shows what is asked for, when all is ready for the answer.
        """
        with _echo_off(self._fd) if secret else contextlib.nullcontext():
            ask()
            while b"\n" not in self._buffer and not self._over:
                await readable(self._fd)
                data = _read(self._fd)
                self._over = not data
                self._buffer += data
        return self._take()

    def _take(self) -> str | None:
        if not self._buffer:
            self._over = False  # a terminal can go on after Ctrl-D
            return None
        line, end, rest = self._buffer.partition(b"\n")
        self._buffer = rest
        return line.decode("utf-8", "replace").removesuffix("\r" if end else "")


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, READ_BYTES)
    except OSError:  # closed, or a terminal that hung up
        return b""


async def readable(fd: int) -> None:
    """Returns at once for what cannot be waited for, such as a regular file: reading it never takes long."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def set_ready() -> None:
        if not ready.done():
            ready.set_result(None)

    try:
        loop.add_reader(fd, set_ready)
    except OSError:
        return
    try:
        await ready
    finally:
        loop.remove_reader(fd)


@contextlib.contextmanager
def _echo_off(fd: int) -> Iterator[None]:
    """For passwords, where `fd` is a terminal."""
    try:
        before = termios.tcgetattr(fd)
    except termios.error:
        yield
        return
    silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(fd, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
        os.write(fd, b"\n")  # the user's own was not echoed
