"""One command or terminal in a sandbox: a stream of output that ends with exactly one `Exited`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType

from cloche.engine.guest import Guest
from cloche.engine.output import Outlet
from cloche.engine.program import Exited as Exited
from cloche.engine.program import Program
from cloche.engine.queue import EventQueue
from cloche.events import AnyEvent, Output, Truncated
from cloche.model import Outcome, Stream, Struct

ProcessEvent = Output | Truncated | Exited


class ProcessResult(Struct):
    """What a command did. `outcome` is ok whenever it ended by itself, whatever its exit code."""

    exit_code: int
    stdout: str
    stderr: str
    outcome: Outcome = "ok"
    reason: str | None = None


class Process(Program):
    """Made by `Commands.start`. An async iterator of events; leaving its `async with` kills it unless detached."""

    def __init__(
        self,
        guest: Guest,
        id: str,
        *,
        output_bytes: int,
        oom_kills: Callable[[], int],
        on_end: Callable[[Program], None],
        patient: bool,
    ):
        super().__init__(guest, id, oom_kills=oom_kills, on_end=on_end)
        self.detached = False
        self._texts: dict[str, list[str]] | None = None
        pause, resume = (self._pause, self._resume) if patient else (_nothing, _nothing)
        self._events: EventQueue[ProcessEvent] = EventQueue(pause, resume)
        self._outlet = Outlet(self._put, output_bytes)

    async def __aenter__(self) -> Process:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self.detached:
            await self.aclose()

    def __aiter__(self) -> Process:
        return self

    async def __anext__(self) -> ProcessEvent:
        event = await self._events.next_event()
        if event is None:
            raise StopAsyncIteration
        return event

    async def next_events(self) -> list[ProcessEvent]:
        """All events that are there, at least one; an empty list after `Exited`."""
        return await self._events.next_events()

    async def result(self) -> ProcessResult:
        """Waits for the end. Output that was iterated before is not in it. The same for all who ask."""
        texts = self._texts
        if texts is None:
            texts = self._texts = {"stdout": [], "stderr": []}
            self._events.divert(partial(_collect, texts))
        await self._events.wait_closed()
        exited = self.exited or Exited(exit_code=-1, outcome="died")
        return ProcessResult(
            exit_code=exited.exit_code,
            stdout="".join(texts["stdout"]),
            stderr="".join(texts["stderr"]),
            outcome=exited.outcome,
            reason=exited.reason,
        )

    async def aclose(self) -> None:
        """Kills the process and its session if it runs, and waits for its end."""
        if self.exited is None:
            self._events.divert(_forget)
            self.kill()
            await self._events.wait_closed()

    def _feed(self, stream: Stream, data: bytes) -> None:
        self._outlet.feed(stream, data)

    def _conclude(self, exited: Exited) -> None:
        self._outlet.finish()
        self._events.put(exited, 0)
        self._events.close()

    def _put(self, event: AnyEvent, size: int) -> None:
        if isinstance(event, (Output, Truncated)):
            self._events.put(event, size)


def _collect(texts: dict[str, list[str]], event: ProcessEvent) -> None:
    if isinstance(event, Output):
        texts[event.stream].append(event.text)


def _forget(event: ProcessEvent) -> None:
    """Nobody reads any more."""


def _nothing() -> None:
    """Output of a process in the background never blocks it: what nobody reads in time is bounded, then dropped."""
