"""The events of one execution or process between the guest and whoever consumes them."""

from __future__ import annotations

import asyncio
import codecs
import errno
import fcntl
import os
import stat
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from cloche.events import AnyEvent, Output, Truncated
from cloche.model import Stream

E = TypeVar("E")

HIGH_BYTES = 4 << 20
LOW_BYTES = 1 << 20
EVENT_BYTES = 256  # what an event costs beside its content
ALL_BYTES = 32 << 20  # of the queues of one sandbox together; beyond that each of them is full with LEAST_BYTES
LEAST_BYTES = 128 << 10


class Bell:
    """Wakes everybody who waits for it."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    def heard(self) -> asyncio.Future[None]:
        """Done when it rings next. Each caller gets one of its own, so that cancelling one wakes nobody else."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting = [future, *(each for each in self._waiting if not each.done())]
        return future

    def ring(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)


class Share:
    """What the queues of one sandbox hold together. It is the host's memory, which no limit of a sandbox bounds:
    whoever starts hundreds of programs there, and reads none of them, would have megabytes for each."""

    __slots__ = ("held_bytes",)

    def __init__(self) -> None:
        self.held_bytes = 0

    @property
    def high_bytes(self) -> int:
        """When one of them is full."""
        return HIGH_BYTES if self.held_bytes <= ALL_BYTES else LEAST_BYTES


class Gap(Protocol[E]):
    """What stands where events were dropped."""

    def add(self, dropped: E) -> None: ...

    def take(self) -> list[E]:
        """Says it, once."""


class EventQueue(Generic[E]):
    """Single producer; each event goes to one consumer, and the end to all.

    Calls `pause` above 4 MiB and `resume` below 1 MiB. After `lose(gap)`, until `keep()`, it drops the oldest events
    above 4 MiB instead, and has `gap` say so where they were. `heard(event, size)` is told of all that is put in.
    Where it has a `share` with others that hold too much together, it is a smaller number than 4 MiB.
    """

    def __init__(
        self,
        pause: Callable[[], None] | None = None,
        resume: Callable[[], None] | None = None,
        heard: Callable[[E, int], None] | None = None,
        share: Share | None = None,
    ):
        self._heard = heard
        self._share = share or Share()
        self._pause = pause or _nothing
        self._resume = resume or _nothing
        self._gap: Gap[E] | None = None
        self._losing = False
        self._events: deque[tuple[E, int]] = deque()
        self._bytes = 0
        self._paused = False
        self._closed = False
        self._bell = Bell()
        self._divert: Callable[[E], None] | None = None

    def put(self, event: E, size: int) -> None:
        if self._heard is not None:
            self._heard(event, size)
        if self._divert is not None:
            self._divert(event)
            return
        self._events.append((event, size + EVENT_BYTES))
        self._bytes += size + EVENT_BYTES
        self._share.held_bytes += size + EVENT_BYTES
        self._check_room()
        self._bell.ring()

    def __del__(self) -> None:
        self._share.held_bytes -= self._bytes  # what nobody ever read

    def slow_down(self, pause: Callable[[], None], resume: Callable[[], None], share: Share) -> None:
        """From now on it is these that are called: what writes is known only now."""
        self._pause, self._resume = pause, resume
        share.held_bytes += self._bytes
        self._share = share

    def lose(self, gap: Gap[E]) -> None:
        """From now on nothing is paused: what is too much is lost, the oldest first."""
        self._gap, self._losing = gap, True
        self._check_room()
        self._let_resume()

    def keep(self) -> None:
        """From now on nothing is lost: what is too much pauses whoever writes it."""
        self._losing = False
        self._check_room()

    def close(self) -> None:
        """No more events will come, and nobody is paused or resumed any more: whoever made it can be forgotten."""
        self._closed = True
        self._pause = self._resume = _nothing
        self._bell.ring()

    def divert(self, to: Callable[[E], None]) -> None:
        """From now on events go straight to `to`, first those that wait. `wait_closed` tells the end."""
        for event in self.take():
            to(event)
        self._divert = to

    async def wait_closed(self) -> None:
        while not self._closed:
            await self._bell.heard()

    async def next_events(self) -> list[E]:
        """All events that are there, at least one; an empty list at the end."""
        while not self._events and not self._closed:
            await self._bell.heard()
        return self.take()

    async def next_event(self) -> E | None:
        """The next event; None at the end."""
        while not self._events and not self._closed:
            await self._bell.heard()
        self._tell_gap()
        if not self._events:
            return None
        event, size = self._events.popleft()
        self._freed(size)
        return event

    def take(self) -> list[E]:
        """What is there now."""
        self._tell_gap()
        events = [event for event, _size in self._events]
        self._events.clear()
        self._freed(self._bytes)
        return events

    def _check_room(self) -> None:
        if self._losing and self._gap is not None:
            while self._bytes > self._share.high_bytes:
                event, size = self._events.popleft()
                self._bytes -= size
                self._share.held_bytes -= size
                self._gap.add(event)
        elif self._bytes > self._share.high_bytes and not self._paused:
            self._paused = True
            self._pause()

    def _tell_gap(self) -> None:
        if self._gap is not None:
            self._events.extendleft((event, 0) for event in reversed(self._gap.take()))

    def _freed(self, size: int) -> None:
        self._bytes -= size
        self._share.held_bytes -= size
        if self._bytes < LOW_BYTES:
            self._let_resume()

    def _let_resume(self) -> None:
        if self._paused:
            self._paused = False
            self._resume()


def _nothing() -> None:
    """There is nobody to pause or resume."""


# What a program writes, on its way to its reader: decoded, coalesced, and bounded.

COALESCE_SECONDS = 0.005
COALESCE_BYTES = 64 << 10

PARSED_TIMES = 2  # JSON of displays may take twice the limit once more, as the objects that it becomes

Emit = Callable[[AnyEvent, int], None]  # an event, and how much memory its content takes

_decoder = codecs.getincrementaldecoder("utf-8")


def text_bytes(text: str) -> int:
    """What a text takes in our memory: with a single emoji in it, four bytes for every character."""
    return sys.getsizeof(text)


class Outlet:
    """Turns the bytes of stdout and stderr into Output events, up to `limit_bytes` together with all displays.

    What is over the limit is counted and forgotten: never kept, never a reason to stop the program.
    """

    def __init__(self, emit: Emit, limit_bytes: int):
        self._emit = emit
        self._limit = limit_bytes
        self._room = limit_bytes
        self._parsed_room = limit_bytes * PARSED_TIMES
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
        self._add(stream, self._decoders[stream].decode(data), len(data))

    def charge(self, size: int, parsed_bytes: int = 0) -> bool:
        """Whether a display of that size still fits; if so it is counted, else it is dropped and counted as that.

        `parsed_bytes`: what its JSON takes in our memory. It has a limit of its own, which only JSON that is made to be
        large meets (`[[],[],..]` takes 30 times its length), so that what an execution costs us is bounded as well.
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
        """Emits what waits. To be called before any other event is emitted."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._texts:
            return
        text = "".join(self._texts)
        self._texts, self._size = [], 0
        self._emit(Output(stream=self._stream, text=text), text_bytes(text))

    def finish(self) -> None:
        """Emits the rest, and what was dropped: a Truncated event each, and one last line on stderr."""
        streams: tuple[Stream, Stream] = ("stdout", "stderr")
        for stream in streams:
            tail = self._decoders[stream].decode(b"", final=True)
            if tail and stream not in self._dropped:
                self._add(stream, tail, len(tail))
        self.flush()
        for name, size in self._dropped.items():
            self._emit(Truncated(stream=name, dropped_bytes=size), 0)
        if self._dropped:
            self._emit(Output(stream="stderr", text=self._notice()), 0)

    def close(self) -> None:
        """Emits nothing any more: whoever took the events can be forgotten."""
        self._emit = _nobody

    def _add(self, stream: Stream, text: str, size: int) -> None:
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

    def _notice(self) -> str:
        parts = ", ".join(f"{size} bytes of {name}" for name, size in self._dropped.items())
        return f"\n[cloche] the output limit of {self._limit} bytes was reached; dropped: {parts}\n"


def _nobody(_event: AnyEvent, _size: int) -> None:
    """It has ended."""


# Reading an output pipe on the event loop, without ever blocking.

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
