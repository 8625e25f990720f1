"""Runs that outlive the connection that began them: as in `cloche.sdk.detached`, with `await` and `async for`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType

from cloche.events import AnyEvent, Ended, Run, RunInfo
from cloche.model import Outcome
from cloche.sdk.detached import Position
from cloche.sdk.transport import Transport, transport_to


class AsyncAttachment:
    """An async iterator of a run's events; see `Attachment`. What is wrong is raised when it is first used."""

    def __init__(self, transport: Transport, id: str, after: int, run: AsyncDetachedRun | None = None):
        self._position = Position(transport, id, after)
        self._transport = transport
        self._run = run

    @property
    def last_event(self) -> int:
        return self._position.last_event

    def __aiter__(self) -> AsyncIterator[AnyEvent]:
        return self

    async def __anext__(self) -> AnyEvent:
        event = self._position.next()
        if event is None and not self._position.ended:
            await self._transport.acall(self._position.fetch)
            event = self._position.next()
        if event is None:
            raise StopAsyncIteration
        if self._run is not None:
            self._run.saw(self.last_event, event)
        return event

    async def __aenter__(self) -> AsyncAttachment:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """The run goes on."""
        await self._transport.acall(self._position.close)

    def __del__(self) -> None:
        if hasattr(self, "_transport"):
            self._transport.spawn(self._position.close)


class AsyncDetachedRun:
    """A run that goes on by itself; see `DetachedRun`."""

    def __init__(self, transport: Transport, info: RunInfo):
        self._transport = transport
        self.id, self.sandbox, self.state = info.id, info.sandbox, info.state
        self.outcome: Outcome | None = info.outcome
        self.last_event = 0

    @classmethod
    async def connect(cls, id: str, *, url: str | None = None, api_key: str | None = None) -> AsyncDetachedRun:
        """The run of that id, also when its sandbox has ended, or its server was started anew. Raises RunNotFound."""
        transport = await asyncio.to_thread(transport_to, url, api_key)
        return cls(transport, await transport.acall(lambda: transport.runs.info(id)))

    def __repr__(self) -> str:
        return f"<cloche.AsyncDetachedRun {self.id} {self.outcome or self.state}>"

    async def info(self) -> RunInfo:
        """What is known of it. Raises RunNotFound when it is not kept any more."""
        info = await self._transport.acall(lambda: self._transport.runs.info(self.id))
        self._know(info)
        return info

    def events(self, after: int | None = None) -> AsyncAttachment:
        """Its events, live until `Ended`: those after `last_event`, or after number `after`."""
        return AsyncAttachment(self._transport, self.id, self.last_event if after is None else after, self)

    async def result(self) -> Run:
        """What it did: waits for its end."""
        run = await self._transport.acall(lambda: self._transport.runs.result(self.id))
        self.state, self.outcome = "ended", run.outcome
        return run

    async def interrupt(self) -> bool:
        """Interrupts it, and ends it if it waits for its turn. False if it has ended."""
        return await self._transport.acall(lambda: self._transport.runs.interrupt(self.id))

    async def remove(self) -> None:
        """Ends it if it goes on, and forgets it."""
        await self._transport.acall(lambda: self._transport.runs.remove(self.id))

    def saw(self, number: int, event: AnyEvent) -> None:
        """An event was seen through an attachment of this object."""
        self.last_event = max(self.last_event, number)
        if isinstance(event, Ended):
            self.state, self.outcome = "ended", event.outcome

    def _know(self, info: RunInfo) -> None:
        self.state, self.outcome = info.state, info.outcome
