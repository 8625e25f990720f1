"""A program that outlives whoever started it: anybody may listen to it, as often as they like, and leave."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Reversible
from types import TracebackType
from typing import NoReturn, TypeVar

from cloche import errors
from cloche.engine.commands.program import Ask, Exited, Program
from cloche.engine.executions.streams import Bell, EventQueue, Share
from cloche.engine.sandboxes.init_client import Guest
from cloche.model import Stream, Struct

FIRST_LISTENER_SECONDS = 5.0


class Chunk(Struct):
    """Bytes as the program wrote them. What comes out of a terminal is its stdout."""

    stream: Stream
    data: bytes


JobEvent = Chunk | Exited


class Listener:
    """Everything that a job writes from now on, then its `Exited`. One that reads slowly slows the job down."""

    def __init__(self, job: Job | None, share: Share | None = None):
        self._job = job
        self._events: EventQueue[JobEvent] = EventQueue(self._hold, self._release, share=share)

    async def __aenter__(self) -> Listener:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def next_events(self) -> list[JobEvent]:
        """All events that are there, at least one; an empty list after `Exited`."""
        return await self._events.next_events()

    def close(self) -> None:
        """Leaves. The job goes on."""
        if self._job is not None:
            self._job.leave(self)
        self._events.close()

    def put(self, event: JobEvent) -> None:
        self._events.put(event, len(event.data) if isinstance(event, Chunk) else 0)
        if isinstance(event, Exited):
            self._events.close()

    def _hold(self) -> None:
        if self._job is not None:
            self._job.hold(self)

    def _release(self) -> None:
        if self._job is not None:
            self._job.release(self)


class PastJob(Struct):
    """What is remembered of a job that has ended."""

    pid: int
    tag: str | None
    exited: Exited

    def listen(self) -> Listener:
        """All that is left to hear is its end."""
        listener = Listener(None)
        listener.put(self.exited)
        return listener


class Job(Program):
    """Made by `Commands.launch`. What it writes goes to those who listen; while nobody does, it is forgotten.

    The first listener also gets what was written before it came, if it comes within a few seconds.
    """

    def __init__(
        self,
        guest: Guest,
        id: str,
        ask: Ask,
        *,
        tag: str | None,
        oom_kills: Callable[[], int],
        on_end: Callable[[Program], None],
    ):
        super().__init__(guest, id, oom_kills=oom_kills, on_end=on_end)
        self.ask = ask
        self.tag = tag
        self._listeners: set[Listener] = set()
        self._behind: set[Listener] = set()
        self._first: Listener | None = None
        self._ended = Bell()

    def listen(self) -> Listener:
        """After its end, all that is left to hear is that."""
        listener, self._first = self._first or Listener(self, self._guest.unread), None
        if listener in self._listeners:
            return listener
        if self.exited is not None:
            listener.put(self.exited)
        else:
            self._listeners.add(listener)
        return listener

    async def wait(self) -> Exited:
        """Waits for its end."""
        while self.exited is None:
            await self._ended.heard()
        return self.exited

    # -- what its listeners do

    def hold(self, listener: Listener) -> None:
        self._behind.add(listener)
        self._pause()

    def release(self, listener: Listener) -> None:
        self._behind.discard(listener)
        if not self._behind:
            self._resume()

    def leave(self, listener: Listener) -> None:
        self._listeners.discard(listener)
        if listener in self._behind:
            self.release(listener)

    # -- as a program

    def _begin(self) -> None:
        self._first = Listener(self, self._guest.unread)
        self._listeners.add(self._first)
        asyncio.get_running_loop().call_later(FIRST_LISTENER_SECONDS, self._give_up_first)
        super()._begin()

    def _give_up_first(self) -> None:
        if self._first is not None:
            self.leave(self._first)
            self._first = None

    def _feed(self, stream: Stream, data: bytes) -> None:
        chunk = Chunk(stream=stream, data=data)
        for listener in self._listeners:
            listener.put(chunk)

    def _conclude(self, exited: Exited) -> None:
        for listener in self._listeners:
            listener.put(exited)
        self._ended.ring()


# The jobs of a sandbox: those that run, and, for a moment, those that have ended.

REMEMBERED_SECONDS = 30.0
MAX_REMEMBERED = 1024

J = TypeVar("J", Job, PastJob)


class Jobs:
    def __init__(self) -> None:
        self._running: dict[int, Job] = {}
        self._ended: dict[int, PastJob] = {}  # the newest last

    def add(self, job: Job) -> None:
        self._running[job.pid] = job

    def end(self, job: Job) -> None:
        """It has ended; for a while one can still ask how."""
        if self._running.get(job.pid) is job:
            del self._running[job.pid]
        if job.exited is None:
            return
        past = PastJob(pid=job.pid, tag=job.tag, exited=job.exited)
        self._ended.pop(job.pid, None)
        self._ended[job.pid] = past
        if len(self._ended) > MAX_REMEMBERED:
            del self._ended[next(iter(self._ended))]
        asyncio.get_running_loop().call_later(REMEMBERED_SECONDS, self._forget, past)

    def list(self) -> list[Job]:
        """Those that run, the oldest first."""
        return list(self._running.values())

    def find(self, pid: int | None = None, tag: str | None = None) -> Job:
        """The job of that pid or tag that runs. Raises ProcessNotFound."""
        return _newest(self._running.values(), pid, tag) or _not_found(pid, tag)

    def recall(self, pid: int | None = None, tag: str | None = None) -> Job | PastJob:
        """As `find`; also what is known of one that ended a moment ago."""
        running = _newest(self._running.values(), pid, tag)
        return running or _newest(self._ended.values(), pid, tag) or _not_found(pid, tag)

    def _forget(self, past: PastJob) -> None:
        if self._ended.get(past.pid) is past:
            del self._ended[past.pid]


def _newest(known: Reversible[J], pid: int | None, tag: str | None) -> J | None:
    for job in reversed(known):
        if (pid is not None and job.pid == pid) or (tag is not None and job.tag == tag):
            return job
    return None


def _not_found(pid: int | None, tag: str | None) -> NoReturn:
    what = f"pid {pid}" if pid is not None else f"tag {tag}"
    raise errors.ProcessNotFound(f"process with {what} not found")


# A program whose output is wanted whole at its end, as bytes: of what is too long, the beginning and the end.


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
