"""What a program writes, on its way to its reader: decoded, coalesced, and bounded."""

from __future__ import annotations

import asyncio
import codecs
import sys
from collections.abc import Callable

from cloche.events import AnyEvent, Output, Truncated
from cloche.model import Stream

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
