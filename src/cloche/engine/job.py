"""A program that outlives whoever started it: anybody may listen to it, as often as they like, and leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from cloche.engine.guest import Guest
from cloche.engine.program import Ask, Exited, Program
from cloche.engine.queue import Bell, EventQueue, Share
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
