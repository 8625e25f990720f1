"""The output of a program: read from its pipes, decoded, coalesced and bounded."""

from __future__ import annotations

import asyncio
import codecs
import errno
import fcntl
import os
import stat
import sys
import threading
from collections.abc import Callable

from cloche.events import AnyEvent, Output, Truncated
from cloche.model import Stream

# Decodes, coalesces and bounds a program's output.

COALESCE_SECONDS = 0.005
COALESCE_BYTES = 64 << 10

PARSED_BYTES_FACTOR = 2  # JSON of displays may take twice the limit once more, as the objects that it becomes

Emit = Callable[[AnyEvent, int], None]  # an event, and how much memory its content takes

_decoder = codecs.getincrementaldecoder("utf-8")


def memory_of_text(text: str) -> int:
    """The memory that a text takes: with a single emoji in it, four bytes for every character."""
    return sys.getsizeof(text)


class OutputLimiter:
    """Turns the bytes of stdout and stderr into Output events, up to `limit_bytes` together with all displays.

    Output over the limit is counted and dropped: never kept, never a reason to stop the program.
    """

    def __init__(self, emit: Emit, limit_bytes: int):
        self._emit = emit
        self._limit = limit_bytes
        self._room = limit_bytes
        self._parsed_room = limit_bytes * PARSED_BYTES_FACTOR
        self._decoders = {"stdout": _decoder("replace"), "stderr": _decoder("replace")}
        self._dropped: dict[str, int] = {}
        self._stream: Stream = "stdout"
        self._texts: list[str] = []
        self._size = 0
        self._timer: asyncio.TimerHandle | None = None

    def feed(self, stream: Stream, data: bytes) -> None:
        """More bytes of that stream."""
        if len(data) > self._room:
            self.drop(stream, len(data) - self._room)
            data = data[: self._room]
        if not data:
            return
        self._room -= len(data)
        self._add_text(stream, self._decoders[stream].decode(data), len(data))

    def charge(self, size: int, parsed_bytes: int = 0) -> bool:
        """Whether a display of that size still fits; if so it is counted, else it is dropped and counted as that.

        `parsed_bytes`: the memory of its parsed JSON. It has a limit of its own, which only JSON that is made to be
        large meets (`[[],[],..]` takes 30 times its length), so that the memory of an execution is bounded as well.
        """
        if size > self._room or parsed_bytes > self._parsed_room:
            self.drop("display", size)
            return False
        self._room -= size
        self._parsed_room -= parsed_bytes
        return True

    def drop(self, stream: str, size: int) -> None:
        self._dropped[stream] = self._dropped.get(stream, 0) + size

    def flush(self) -> None:
        """Emits the buffered text. To be called before any other event is emitted."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._texts:
            return
        text = "".join(self._texts)
        self._texts, self._size = [], 0
        self._emit(Output(stream=self._stream, text=text), memory_of_text(text))

    def finish(self) -> None:
        """Emits the rest, then a Truncated event for each stream with dropped bytes, and one last line on stderr."""
        streams: tuple[Stream, Stream] = ("stdout", "stderr")
        for stream in streams:
            tail = self._decoders[stream].decode(b"", final=True)
            if tail and stream not in self._dropped:
                self._add_text(stream, tail, len(tail))
        self.flush()
        for name, size in self._dropped.items():
            self._emit(Truncated(stream=name, dropped_bytes=size), 0)
        if self._dropped:
            self._emit(Output(stream="stderr", text=self._truncation_notice()), 0)

    def close(self) -> None:
        """Emits nothing any more, and drops its reference to the callback."""
        self._emit = _ignore_event

    def _add_text(self, stream: Stream, text: str, size: int) -> None:
        if stream != self._stream:
            self.flush()
            self._stream = stream
        if text:
            self._texts.append(text)
        self._size += size
        if self._size >= COALESCE_BYTES:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(COALESCE_SECONDS, self.flush)

    def _truncation_notice(self) -> str:
        parts = ", ".join(f"{size} bytes of {name}" for name, size in self._dropped.items())
        return f"\n[cloche] the output limit of {self._limit} bytes was reached; dropped: {parts}\n"


def _ignore_event(_event: AnyEvent, _size: int) -> None:
    """The callback of a closed limiter."""


# Reads an output pipe on the event loop, without ever blocking.

READ_BYTES = 64 << 10
MAX_CAPACITY_BYTES = 1 << 20


class _ReadBuffer(threading.local):
    """The read buffer of all pipes of a thread: a new one each time would be 64 KiB of zeros to write."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(READ_BYTES))


_read_buffer = _ReadBuffer()


class OutputPipe:
    """Passes the bytes of `fd` to `on_data`; calls `on_end` once when all writers are gone. Owns `fd`.

    `gate`, if given, is called before each read; when it returns False, nothing is read this time.
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
            self._loop.add_reader(self._fd, self._on_readable)

    def pause(self) -> None:
        if not self.closed and self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def read_now(self) -> int:
        """Reads once, without waiting: the number of bytes, 0 when there is nothing now or ever."""
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
        """The most bytes that were written before now and are not read yet; later bytes are newer."""
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

    def _on_readable(self) -> None:
        if self._gate is None or self._gate():
            self.read_now()


def read_available(fd: int) -> bytes:
    """Up to READ_BYTES that are there now; b"" at the end. Raises BlockingIOError if there is nothing.

    Whether `os.read` waits is a property of the open file, which the guest that passed it shares with us and can change
    at any moment; this asks for it call by call. (Terminals, and pipes before Linux 6.4, do not know it.)
    """
    view = _read_buffer.view
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
    """Whether a descriptor that a guest passed is a pipe, or a terminal for a PTY."""
    mode = os.fstat(fd).st_mode
    return stat.S_ISFIFO(mode) or (stat.S_ISCHR(mode) and os.isatty(fd))
