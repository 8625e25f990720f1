"""A program whose output is wanted whole at its end, as bytes: of what is too long, the beginning and the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import TracebackType

from cloche.engine.guest import Guest
from cloche.engine.program import Exited, Program
from cloche.engine.queue import Bell
from cloche.model import Stream, Struct


class Kept(Struct):
    """What is left of a stream. `dropped_bytes` are missing between `head` and `tail`."""

    head: bytes = b""
    tail: bytes = b""
    dropped_bytes: int = 0


class HeadAndTail:
    """Keeps the first and the last bytes of all that comes, `limit_bytes` together, and counts the rest."""

    def __init__(self, limit_bytes: int):
        self._head_room = (limit_bytes + 1) // 2
        self._tail_room = limit_bytes // 2
        self._head: list[bytes] = []
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self._dropped = 0

    def add(self, data: bytes) -> None:
        if self._head_room:
            self._head.append(data[: self._head_room])
            data = data[self._head_room :]
            self._head_room -= len(self._head[-1])
        if data:
            self._tail.append(data)
            self._tail_bytes += len(data)
            self._forget(self._tail_bytes - self._tail_room)

    def _forget(self, excess: int) -> None:
        """Whole pieces only: what is cut off exactly, is when it is asked for."""
        while self._tail and len(self._tail[0]) <= excess:
            gone = len(self._tail.popleft())
            excess -= gone
            self._tail_bytes -= gone
            self._dropped += gone

    def kept(self) -> Kept:
        tail = b"".join(self._tail)
        excess = max(len(tail) - self._tail_room, 0)
        return Kept(head=b"".join(self._head), tail=tail[excess:], dropped_bytes=self._dropped + excess)


class Capture(Program):
    """Made by `Commands.capture`. Nobody slows it down, and leaving its `async with` kills it."""

    def __init__(
        self,
        guest: Guest,
        id: str,
        *,
        keep_bytes: int,
        oom_kills: Callable[[], int],
        on_end: Callable[[Program], None],
    ):
        super().__init__(guest, id, oom_kills=oom_kills, on_end=on_end)
        self._streams: dict[Stream, HeadAndTail] = {
            "stdout": HeadAndTail(keep_bytes),
            "stderr": HeadAndTail(keep_bytes),
        }
        self._ended = Bell()

    async def __aenter__(self) -> Capture:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def so_far(self, stream: Stream) -> Kept:
        """What it has written until now."""
        return self._streams[stream].kept()

    async def wait(self) -> Exited:
        """Waits for its end."""
        while self.exited is None:
            await self._ended.heard()
        return self.exited

    async def aclose(self) -> None:
        """Kills it with its session if it runs, and waits for its end."""
        if self.exited is None:
            self.kill()
            await self.wait()

    def _feed(self, stream: Stream, data: bytes) -> None:
        self._streams[stream].add(data)

    def _conclude(self, exited: Exited) -> None:
        self._ended.ring()
