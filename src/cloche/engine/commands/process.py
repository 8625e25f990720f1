"""One command or terminal in a sandbox: a stream of output that ends with exactly one `Exited`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType

from cloche import errors
from cloche.engine.commands.program import SandboxProgram
from cloche.engine.executions.program_limits import OutputLimiter
from cloche.engine.sandboxes.init_client import InitClient
from cloche.events import AnyEvent, EventQueue, Exited, Output, ProcessEvent, ProcessResult, Truncated
from cloche.model import Stream


class UnreadOutput:
    """Counts output that was dropped because it was not read in time."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}

    def add(self, dropped: ProcessEvent) -> None:
        match dropped:
            case Output(stream=stream, text=text):
                self._bytes[stream] = self._bytes.get(stream, 0) + len(text.encode())
            case Truncated(stream=stream, dropped_bytes=size):
                self._bytes[stream] = self._bytes.get(stream, 0) + size

    def take(self) -> list[ProcessEvent]:
        if not self._bytes:
            return []
        lost, self._bytes = self._bytes, {}
        parts = ", ".join(f"{size} bytes of {stream}" for stream, size in lost.items())
        notice = Output(stream="stderr", text=f"[cloche] not read in time; dropped: {parts}\n")
        return [*(Truncated(stream=stream, dropped_bytes=size) for stream, size in lost.items()), notice]


class SandboxProcess(SandboxProgram):
    """Made by `SandboxCommands.start`. An async iterator of events; its `async with` kills it unless detached.

    One that is not `patient` is never slowed down: while it has no reader (see `reading`), the oldest events
    are dropped.
    """

    def __init__(
        self,
        guest: InitClient,
        id: str,
        *,
        output_bytes: int,
        oom_kills: Callable[[], int],
        on_end: Callable[[SandboxProgram], None],
        patient: bool,
    ):
        super().__init__(guest, id, oom_kills=oom_kills, on_end=on_end)
        self.detached = False
        self._patient = patient
        self._is_read = False
        self._unread = UnreadOutput()
        self._texts: dict[str, list[str]] | None = None
        self._events: EventQueue[ProcessEvent] = EventQueue(self._pause_pipes, self._resume_pipes, share=guest.unread)
        if not patient:
            self._events.lose(self._unread)
        self._outlet = OutputLimiter(self._put_output_event, output_bytes)

    async def __aenter__(self) -> SandboxProcess:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self.detached:
            await self.aclose()

    def __aiter__(self) -> SandboxProcess:
        return self

    async def __anext__(self) -> ProcessEvent:
        event = await self._events.next_event()
        if event is None:
            raise StopAsyncIteration
        return event

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """For the one reader: meanwhile nothing is dropped, and slow reading slows the process down.

        Raises InvalidRequest if it has a reader already: each would get a part of its output.
        """
        if self._is_read:
            raise errors.InvalidRequest(f"process {self.id} has a reader already: its output goes to one reader only")
        self._is_read = True
        self._events.keep()
        try:
            yield
        finally:
            self._is_read = False
            if not self._patient:
                self._events.lose(self._unread)

    async def next_events(self) -> list[ProcessEvent]:
        """All events that are there, at least one; an empty list after `Exited`."""
        return await self._events.next_events()

    async def result(self) -> ProcessResult:
        """Waits for the end. Output that was iterated before is not in it. All callers get the same."""
        texts = self._texts
        if texts is None:
            texts = self._texts = {"stdout": [], "stderr": []}
            self._events.divert_events(partial(_collect_text, texts))
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
            self._events.divert_events(_ignore_event)
            self.kill()
            await self._events.wait_closed()

    def _on_output(self, stream: Stream, data: bytes) -> None:
        self._outlet.feed(stream, data)

    def _on_exit(self, exited: Exited) -> None:
        self._outlet.finish()
        self._outlet.close()
        self._events.put(exited, 0)
        self._events.close()

    def _put_output_event(self, event: AnyEvent, size: int) -> None:
        if isinstance(event, (Output, Truncated)):
            self._events.put(event, size)


def _collect_text(texts: dict[str, list[str]], event: ProcessEvent) -> None:
    if isinstance(event, Output):
        texts[event.stream].append(event.text)


def _ignore_event(event: ProcessEvent) -> None:
    """Drops an event: there is no reader any more."""
