"""Work that the public classes give to their transport: it runs on the transport's loop, never on the caller's.

The awaiting and the blocking library share it, and `tools/generate_blocking.py` leaves it as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import ParamSpec, TypeVar

from cloche.events import AnyEvent, Ended, NumberedEvent
from cloche.sdk import backend
from cloche.sdk.arguments import check_event_number
from cloche.sdk.backend import Transport

P = ParamSpec("P")
T = TypeVar("T")


async def run_function(function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
    """Calls a function that is no coroutine function and belongs to the loop."""
    function(*args, **kwargs)


async def next_or_none(items: AsyncIterator[T]) -> T | None:
    """The next item; None at the end."""
    return await anext(items, None)


async def enter_watch(watch: backend.BackendWatch) -> None:
    """Returns when changes are seen. Raises the error of the sandbox that refuses it."""
    await watch.__aenter__()


class StreamedExecution:
    """The execution behind a stream, started once."""

    def __init__(self, start: Callable[[], Awaitable[backend.BackendExecution]]):
        self._start = start
        self._execution: backend.BackendExecution | None = None

    @property
    def running(self) -> bool:
        """Whether it has started and not ended."""
        return self._execution is not None and self._execution.ended is None

    async def open(self) -> backend.BackendExecution:
        """Starts it unless it was started. Raises the error of the sandbox that refuses it."""
        if self._execution is None:
            self._execution = await self._start()
        return self._execution

    async def next_events(self) -> list[AnyEvent]:
        """At least one event; an empty list at the end."""
        return await (await self.open()).next_events()

    async def interrupt(self) -> None:
        if self._execution is not None:
            self._execution.interrupt()

    async def answer(self, line: str) -> None:
        if self._execution is not None:
            self._execution.answer(line)

    async def stop(self) -> None:
        """Interrupts it if it runs, and waits for its end."""
        if self._execution is not None:
            await self._execution.aclose()


class EventCursor:
    """A reader's position in a run's events. Lost connections are reopened where the last one ended.

    Its coroutines belong to the transport's loop; `next` may be called from any thread.
    """

    def __init__(self, transport: Transport, id: str, after: int):
        check_event_number(after)
        self._transport = transport
        self._id = id
        self._turn = asyncio.Lock()  # a cancelled call can still be cleaning up when the next one starts
        self._source: AsyncGenerator[list[NumberedEvent], None] | None = None
        self._taking: asyncio.Future[list[NumberedEvent]] | None = None
        self._waiting: list[NumberedEvent] = []
        self.last_event = after
        self.ended = False

    async def open(self) -> None:
        """Raises RunNotFound, or InvalidRequest if the run has not that many events."""
        if self._source is None:
            self._source = await self._transport.runs.attach(self._id, self.last_event)

    async def fetch_events(self) -> None:
        """Waits until more events are here, or there are no more."""
        async with self._turn:
            if self._waiting or self.ended:
                return
            await self.open()
            self._taking = asyncio.ensure_future(self._take_batch())
            try:
                self._waiting = (await self._taking)[::-1]
                self.ended = not self._waiting
            except BaseException as error:
                self._source = None  # for any failure, the next attempt continues where this one ended
                if not (self.ended and isinstance(error, asyncio.CancelledError)):  # it was not closed meanwhile
                    raise

    async def _take_batch(self) -> list[NumberedEvent]:
        assert self._source is not None
        return await anext(self._source, [])

    def next(self) -> AnyEvent | None:
        """The next event that is here."""
        try:
            self.last_event, event = self._waiting.pop()
        except IndexError:
            return None
        self.ended = isinstance(event, Ended)
        return event

    async def close(self) -> None:
        self.ended = True
        if self._taking is not None:
            self._taking.cancel()
        async with self._turn:
            source, self._source, self._waiting = self._source, None, []
            if source is not None:
                await source.aclose()
