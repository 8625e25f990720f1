"""Our stdin and stdout as the protocol's own: nothing else that is in this process reads or writes them.

In threads that nobody waits for: a client that neither writes nor reads must not keep us from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from collections.abc import Iterator
from typing import BinaryIO

MOST_LINE_BYTES = 64 << 20
MOST_WAITING = 16


class Lines:
    """What comes in, line by line, as the package reads it."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self._loop = asyncio.get_running_loop()
        self._came: asyncio.Queue[str] = asyncio.Queue()
        self._room = threading.Semaphore(MOST_WAITING)
        threading.Thread(target=self._read, name="mcp-stdin", daemon=True).start()

    def __aiter__(self) -> Lines:
        return self

    async def __anext__(self) -> str:
        line = await self._came.get()
        self._room.release()
        if not line:
            self._came.put_nowait("")  # for whoever asks again
            raise StopAsyncIteration
        return line

    def end(self) -> None:
        self._came.put_nowait("")

    def _read(self) -> None:
        line = b"-"
        while line:
            self._room.acquire()
            try:
                line = self._file.readline(MOST_LINE_BYTES)
            except (OSError, ValueError):
                line = b""
            try:
                self._loop.call_soon_threadsafe(self._came.put_nowait, line.decode("utf-8", "replace"))
            except RuntimeError:  # the loop has ended
                return


class Mouth:
    """What goes out. Once nobody reads it, the lines that come in end."""

    def __init__(self, fd: int, lines: Lines):
        self._fd = fd
        self._lines = lines
        self._loop = asyncio.get_running_loop()
        self._work: queue.SimpleQueue[tuple[bytes, asyncio.Future[None]]] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="mcp-stdout", daemon=True).start()

    async def write(self, text: str) -> None:
        written: asyncio.Future[None] = self._loop.create_future()
        self._work.put((text.encode("utf-8", "backslashreplace"), written))
        await written

    async def flush(self) -> None:
        """All that was written has gone."""

    def _write(self) -> None:
        while True:
            data, written = self._work.get()
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(self._fd, view) :]
                done = _finish
            except OSError:
                done = self._broken
            try:
                self._loop.call_soon_threadsafe(done, written)
            except RuntimeError:  # the loop has ended
                return

    def _broken(self, written: asyncio.Future[None]) -> None:
        self._lines.end()
        _finish(written)


def _finish(written: asyncio.Future[None]) -> None:
    if not written.done():
        written.set_result(None)


@contextlib.contextmanager
def own_pipes() -> Iterator[tuple[BinaryIO, int]]:
    """Our stdin, and the descriptor of our stdout.

    Meanwhile descriptor 0 has nothing to read, and what anybody writes to 1 goes to stderr.
    """
    read, write, nothing = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    try:
        # A thread may wait in it for good, so it is never closed.
        yield os.fdopen(read, "rb", closefd=False), write
    finally:
        os.dup2(read, 0)
        os.dup2(write, 1)
