"""The limits of a program, of an execution or a command: its time, which stops while it is frozen, and its output."""

from __future__ import annotations

import asyncio
import codecs
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from cloche.events import AnyEvent, Output, Truncated
from cloche.model import Stream

# Timers that can be held, and that stop while the programs of a sandbox are frozen.


class ProgramTimeFollower(Protocol):
    """Is told at once when program time stops and when it goes on."""

    def hold(self) -> None: ...

    def go_on(self) -> None: ...


class ProgramTime:
    """The time of a sandbox's programs: it stops while they are frozen.

    A frozen program cannot end, so all limits on programs that take too long are measured by this time.
    """

    def __init__(self) -> None:
        self._still_since: float | None = None
        self._still_seconds = 0.0
        self._followers: set[ProgramTimeFollower] = set()

    @property
    def is_frozen(self) -> bool:
        return self._still_since is not None

    def now(self) -> float:
        """In seconds, as `time.monotonic`."""
        return (time.monotonic() if self._still_since is None else self._still_since) - self._still_seconds

    def follow(self, follower: ProgramTimeFollower) -> None:
        """Adds a follower until `leave`. One that comes while time is stopped is told so."""
        self._followers.add(follower)
        if self.is_frozen:
            follower.hold()

    def leave(self, follower: ProgramTimeFollower) -> None:
        self._followers.discard(follower)

    def hold(self) -> None:
        """Stops the time. Harmless when it is stopped."""
        if self._still_since is None:
            self._still_since = time.monotonic()
            for follower in tuple(self._followers):
                follower.hold()

    def go_on(self) -> None:
        """Lets the time go on. Harmless when it does."""
        if self._still_since is not None:
            self._still_seconds += time.monotonic() - self._still_since
            self._still_since = None
            for follower in tuple(self._followers):
                follower.go_on()

    def call_later(self, seconds: float, call: Callable[[], None]) -> PausableTimer:
        """As a loop's, by this time."""
        return PausableTimer(seconds, call, self)

    @asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncIterator[None]:
        """As `asyncio.timeout`, by this time. Raises TimeoutError."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(None) as limit:
            clock = PausableTimer(seconds, lambda: limit.reschedule(loop.time()), self)
            try:
                yield
            finally:
                clock.stop()


class PausableTimer:
    """Calls `on_end()` after `seconds` of program time during which it was not held. Runs from now on."""

    def __init__(self, seconds: float, on_end: Callable[[], None], time: ProgramTime):
        self._left_seconds = seconds
        self._on_end = on_end
        self._time = time
        self._loop = asyncio.get_running_loop()
        self._holds = 0
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False
        time.follow(self)
        self._start_timer()

    def hold(self) -> None:
        """Until `go_on` was called as often as this."""
        self._holds += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._left_seconds -= self._loop.time() - self._since

    def go_on(self) -> None:
        self._holds = max(self._holds - 1, 0)
        self._start_timer()

    def stop(self) -> None:
        """Stops for good, and drops its reference to the callback."""
        self._stopped = True
        self._on_end = _ignore_end
        self._time.leave(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start_timer(self) -> None:
        if not self._stopped and not self._holds and self._timer is None:
            self._since = self._loop.time()
            self._timer = self._loop.call_later(max(self._left_seconds, 0.0), self._on_elapsed)

    def _on_elapsed(self) -> None:
        on_end = self._on_end
        self.stop()
        on_end()


class FreezeCallback:
    """Calls `on_still()` once, a moment after programs are frozen, or soon if they are already."""

    def __init__(self, on_still: Callable[[], None], time: ProgramTime):
        self._on_still = on_still
        self._time = time
        self._call: asyncio.Handle | None = None
        time.follow(self)

    def hold(self) -> None:
        self._time.leave(self)
        self._call = asyncio.get_running_loop().call_soon(self._on_still)

    def go_on(self) -> None:
        """Does nothing: programs may have moved before the callback, which is called nevertheless."""

    def stop(self) -> None:
        """Stops for good, and drops its reference to the callback."""
        self._on_still = _ignore_end
        self._time.leave(self)
        if self._call is not None:
            self._call.cancel()


def _ignore_end() -> None:
    """The callback of a stopped timer."""


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
