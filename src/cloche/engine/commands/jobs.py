"""A program that outlives the client that started it: clients listen to it, leave, and listen again."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Reversible
from types import TracebackType
from typing import NoReturn, TypeVar

from cloche import errors
from cloche.engine.commands.program import ProgramSpec, SandboxProgram
from cloche.engine.sandboxes.init_client import InitClient
from cloche.events import EventQueue, Exited, QueueBudget, Signal
from cloche.model import Stream, Struct

FIRST_LISTENER_SECONDS = 5.0


class OutputChunk(Struct):
    """Bytes as the program wrote them. The output of a terminal is its stdout."""

    stream: Stream
    data: bytes


JobEvent = OutputChunk | Exited


class JobListener:
    """All output of a job from now on, then its `Exited`. A slow listener slows the job down."""

    def __init__(self, job: CommandJob | None, share: QueueBudget | None = None):
        self._job = job
        self._events: EventQueue[JobEvent] = EventQueue(self._hold_job, self._release_job, share=share)

    async def __aenter__(self) -> JobListener:
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
        self._events.put(event, len(event.data) if isinstance(event, OutputChunk) else 0)
        if isinstance(event, Exited):
            self._events.close()

    def _hold_job(self) -> None:
        if self._job is not None:
            self._job.hold(self)

    def _release_job(self) -> None:
        if self._job is not None:
            self._job.release(self)


class EndedJob(Struct):
    """The record of a job that has ended."""

    pid: int
    tag: str | None
    exited: Exited

    def listen(self) -> JobListener:
        """A listener that gets only its end."""
        listener = JobListener(None)
        listener.put(self.exited)
        return listener


class CommandJob(SandboxProgram):
    """Made by `SandboxCommands.launch`. Its output goes to its listeners; while there are none, it is dropped.

    The first listener also gets earlier output, if it comes within a few seconds.
    """

    def __init__(
        self,
        guest: InitClient,
        id: str,
        ask: ProgramSpec,
        *,
        tag: str | None,
        oom_kills: Callable[[], int],
        on_end: Callable[[SandboxProgram], None],
    ):
        super().__init__(guest, id, oom_kills=oom_kills, on_end=on_end)
        self.ask = ask
        self.tag = tag
        self._listeners: set[JobListener] = set()
        self._behind: set[JobListener] = set()
        self._first: JobListener | None = None
        self._ended = Signal()

    def listen(self) -> JobListener:
        """After its end, a listener gets only that."""
        listener, self._first = self._first or JobListener(self, self._guest.unread), None
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
            await self._ended.wait()
        return self.exited

    # -- for its listeners

    def hold(self, listener: JobListener) -> None:
        self._behind.add(listener)
        self._pause_pipes()

    def release(self, listener: JobListener) -> None:
        self._behind.discard(listener)
        if not self._behind:
            self._resume_pipes()

    def leave(self, listener: JobListener) -> None:
        self._listeners.discard(listener)
        if listener in self._behind:
            self.release(listener)

    # -- as a program

    def _begin_reading(self) -> None:
        self._first = JobListener(self, self._guest.unread)
        self._listeners.add(self._first)
        asyncio.get_running_loop().call_later(FIRST_LISTENER_SECONDS, self._drop_first_listener)
        super()._begin_reading()

    def _drop_first_listener(self) -> None:
        if self._first is not None:
            self.leave(self._first)
            self._first = None

    def _on_output(self, stream: Stream, data: bytes) -> None:
        chunk = OutputChunk(stream=stream, data=data)
        for listener in self._listeners:
            listener.put(chunk)

    def _on_exit(self, exited: Exited) -> None:
        for listener in self._listeners:
            listener.put(exited)
        self._ended.wake_all()


# The jobs of a sandbox: those that run, and, for a moment, those that have ended.

REMEMBERED_SECONDS = 30.0
MAX_REMEMBERED = 1024

J = TypeVar("J", CommandJob, EndedJob)


class CommandJobs:
    def __init__(self) -> None:
        self._running: dict[int, CommandJob] = {}
        self._ended: dict[int, EndedJob] = {}  # the newest last

    def add(self, job: CommandJob) -> None:
        self._running[job.pid] = job

    def end(self, job: CommandJob) -> None:
        """Moves a job that has ended to those that are remembered for a while."""
        if self._running.get(job.pid) is job:
            del self._running[job.pid]
        if job.exited is None:
            return
        past = EndedJob(pid=job.pid, tag=job.tag, exited=job.exited)
        self._ended.pop(job.pid, None)
        self._ended[job.pid] = past
        if len(self._ended) > MAX_REMEMBERED:
            del self._ended[next(iter(self._ended))]
        asyncio.get_running_loop().call_later(REMEMBERED_SECONDS, self._remove_ended_job, past)

    def list(self) -> list[CommandJob]:
        """The running jobs, the oldest first."""
        return list(self._running.values())

    def find(self, pid: int | None = None, tag: str | None = None) -> CommandJob:
        """The job of that pid or tag that runs. Raises ProcessNotFound."""
        return _find_newest_job(self._running.values(), pid, tag) or _raise_not_found(pid, tag)

    def recall(self, pid: int | None = None, tag: str | None = None) -> CommandJob | EndedJob:
        """As `find`; also the record of a job that ended a moment ago."""
        running = _find_newest_job(self._running.values(), pid, tag)
        return running or _find_newest_job(self._ended.values(), pid, tag) or _raise_not_found(pid, tag)

    def _remove_ended_job(self, past: EndedJob) -> None:
        if self._ended.get(past.pid) is past:
            del self._ended[past.pid]


def _find_newest_job(known: Reversible[J], pid: int | None, tag: str | None) -> J | None:
    for job in reversed(known):
        if (pid is not None and job.pid == pid) or (tag is not None and job.tag == tag):
            return job
    return None


def _raise_not_found(pid: int | None, tag: str | None) -> NoReturn:
    what = f"pid {pid}" if pid is not None else f"tag {tag}"
    raise errors.ProcessNotFound(f"process with {what} not found")


# A program's output, returned at its end, as bytes: if it is too long, its beginning and its end.


class CapturedStream(Struct):
    """The kept bytes of a stream. `dropped_bytes` are missing between `head` and `tail`."""

    head: bytes = b""
    tail: bytes = b""
    dropped_bytes: int = 0


class HeadAndTail:
    """Keeps the first and the last bytes of a stream, `limit_bytes` together, and counts the rest."""

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
            self._drop_excess(self._tail_bytes - self._tail_room)

    def _drop_excess(self, excess: int) -> None:
        """Drops whole chunks only: the exact cut is made in `kept`."""
        while self._tail and len(self._tail[0]) <= excess:
            gone = len(self._tail.popleft())
            excess -= gone
            self._tail_bytes -= gone
            self._dropped += gone

    def kept(self) -> CapturedStream:
        tail = b"".join(self._tail)
        excess = max(len(tail) - self._tail_room, 0)
        return CapturedStream(head=b"".join(self._head), tail=tail[excess:], dropped_bytes=self._dropped + excess)


class OutputCapture(SandboxProgram):
    """Made by `SandboxCommands.capture`. No reader slows it down; leaving its `async with` kills it."""

    def __init__(
        self,
        guest: InitClient,
        id: str,
        *,
        keep_bytes: int,
        oom_kills: Callable[[], int],
        on_end: Callable[[SandboxProgram], None],
    ):
        super().__init__(guest, id, oom_kills=oom_kills, on_end=on_end)
        self._streams: dict[Stream, HeadAndTail] = {
            "stdout": HeadAndTail(keep_bytes),
            "stderr": HeadAndTail(keep_bytes),
        }
        self._ended = Signal()

    async def __aenter__(self) -> OutputCapture:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def output_so_far(self, stream: Stream) -> CapturedStream:
        """The output until now."""
        return self._streams[stream].kept()

    async def wait(self) -> Exited:
        """Waits for its end."""
        while self.exited is None:
            await self._ended.wait()
        return self.exited

    async def aclose(self) -> None:
        """Kills it with its session if it runs, and waits for its end."""
        if self.exited is None:
            self.kill()
            await self.wait()

    def _on_output(self, stream: Stream, data: bytes) -> None:
        self._streams[stream].add(data)

    def _on_exit(self, exited: Exited) -> None:
        self._ended.wake_all()
