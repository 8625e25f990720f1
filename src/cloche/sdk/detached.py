"""Runs that outlive the connection that began them, for ordinary programs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from types import TracebackType

from cloche import errors
from cloche.events import AnyEvent, Ended, Numbered, Run, RunInfo
from cloche.model import Outcome
from cloche.sdk.transport import Transport, transport_to


class Position:
    """Where a reader of a run's events is. Lost connections are made anew, from where the last one ended.

    Its coroutines belong to the transport's loop; `next` may be called from anywhere.
    """

    def __init__(self, transport: Transport, id: str, after: int):
        check_after(after)
        self._transport = transport
        self._id = id
        self._turn = asyncio.Lock()  # whoever was called off may still be leaving when the next one comes
        self._source: AsyncGenerator[list[Numbered], None] | None = None
        self._taking: asyncio.Future[list[Numbered]] | None = None
        self._waiting: list[Numbered] = []
        self.last_event = after
        self.ended = False

    async def open(self) -> None:
        """Raises RunNotFound, or InvalidRequest if the run has not that many events."""
        if self._source is None:
            self._source = await self._transport.runs.attach(self._id, self.last_event)

    async def fetch(self) -> None:
        """Waits until more events are here, or there are no more."""
        async with self._turn:
            if self._waiting or self.ended:
                return
            await self.open()
            self._taking = asyncio.ensure_future(self._take())
            try:
                self._waiting = (await self._taking)[::-1]
                self.ended = not self._waiting
            except BaseException as error:
                self._source = None  # whatever it was, the next attempt begins where this one ended
                if not (self.ended and isinstance(error, asyncio.CancelledError)):  # it was not closed meanwhile
                    raise

    async def _take(self) -> list[Numbered]:
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


class Attachment:
    """An iterator of a run's events, until `Ended`. Leaving it changes nothing: the run goes on.

    `last_event` is the number of the event that it gave last. When the connection to a server is lost it raises
    Unavailable; iterating again goes on after that event.
    """

    def __init__(self, transport: Transport, id: str, after: int, run: DetachedRun | None = None):
        self._transport = transport
        self._position = Position(transport, id, after)
        self._run = run
        transport.call(self._position.open)

    @property
    def last_event(self) -> int:
        return self._position.last_event

    def __iter__(self) -> Iterator[AnyEvent]:
        return self

    def __next__(self) -> AnyEvent:
        event = self._position.next()
        if event is None and not self._position.ended:
            self._transport.call(self._position.fetch)
            event = self._position.next()
        if event is None:
            raise StopIteration
        if self._run is not None:
            self._run.saw(self.last_event, event)
        return event

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """The run goes on."""
        self._transport.call(self._position.close)

    def __del__(self) -> None:
        if hasattr(self, "_position"):
            self._transport.spawn(self._position.close)


class DetachedRun:
    """A run that goes on by itself, and is kept for a while when it has ended.

    `last_event` is the number of the last event that was seen through this object, 0 at first; `state` ("running" or
    "ended") and `outcome` are as they were when it last heard of them: `info()` asks.
    """

    def __init__(self, transport: Transport, info: RunInfo):
        self._transport = transport
        self.id, self.sandbox, self.state = info.id, info.sandbox, info.state
        self.outcome: Outcome | None = info.outcome
        self.last_event = 0

    @classmethod
    def connect(cls, id: str, *, url: str | None = None, api_key: str | None = None) -> DetachedRun:
        """The run of that id, also when its sandbox has ended, or its server was started anew. Raises RunNotFound."""
        transport = transport_to(url, api_key)
        return cls(transport, transport.call(lambda: transport.runs.info(id)))

    def __repr__(self) -> str:
        return f"<cloche.DetachedRun {self.id} {self.outcome or self.state}>"

    def info(self) -> RunInfo:
        """What is known of it. Raises RunNotFound when it is not kept any more."""
        info = self._transport.call(lambda: self._transport.runs.info(self.id))
        self._know(info)
        return info

    def events(self, after: int | None = None) -> Attachment:
        """Its events, live until `Ended`: those after `last_event`, or after number `after`."""
        return Attachment(self._transport, self.id, self.last_event if after is None else after, self)

    def result(self) -> Run:
        """What it did: waits for its end."""
        run = self._transport.call(lambda: self._transport.runs.result(self.id))
        self.state, self.outcome = "ended", run.outcome
        return run

    def interrupt(self) -> bool:
        """Interrupts it, and ends it if it waits for its turn. False if it has ended."""
        return self._transport.call(lambda: self._transport.runs.interrupt(self.id))

    def remove(self) -> None:
        """Ends it if it goes on, and forgets it."""
        self._transport.call(lambda: self._transport.runs.remove(self.id))

    def saw(self, number: int, event: AnyEvent) -> None:
        """An event was seen through an attachment of this object."""
        self.last_event = max(self.last_event, number)
        if isinstance(event, Ended):
            self.state, self.outcome = "ended", event.outcome

    def _know(self, info: RunInfo) -> None:
        self.state, self.outcome = info.state, info.outcome


def check_after(after: object) -> None:
    """Raises InvalidRequest."""
    if type(after) is not int or after < 0:
        raise errors.InvalidRequest(f"after must be the number of an event, 0 for all of them, not {after!r}")
