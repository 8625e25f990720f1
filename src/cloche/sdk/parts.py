"""The parts of a Sandbox: streams, files, watches, commands, processes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Literal, overload

from cloche import errors
from cloche.events import AnyEvent, Ended, NumberedEvent, ProcessEvent, ProcessResult, Run, RunInfo
from cloche.file_content import Content
from cloche.model import FileChange, FileInfo, Outcome, ProcessInfo, User
from cloche.sdk import backend
from cloche.sdk.arguments import checked_answer, checked_stdin, command_env, content_in_thread, encode_stdin
from cloche.sdk.backend import Transport, transport_to

CommandResult = ProcessResult


class Stream:
    """An iterator of events. `close()`, leaving its `with`, or letting go of it early interrupts the program."""

    def __init__(self, transport: Transport, make: Callable[[], Awaitable[backend.BackendExecution]]):
        self._transport = transport
        self._waiting: list[AnyEvent] = []

        async def work() -> backend.BackendExecution:
            return await make()

        self._execution: backend.BackendExecution | None = transport.call(work)

    def __iter__(self) -> Iterator[AnyEvent]:
        return self

    def __next__(self) -> AnyEvent:
        if not self._waiting:
            if self._execution is None:
                raise StopIteration
            self._waiting = self._transport.call(self._execution.next_events)[::-1]
        if not self._waiting:
            self._execution = None
            raise StopIteration
        return self._waiting.pop()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def interrupt(self) -> None:
        """Interrupts the program; the stream goes on to its `Ended`."""
        execution = self._execution

        async def work() -> None:
            if execution is not None:
                execution.interrupt()

        self._transport.call(work)

    def answer(self, text: str) -> None:
        """The line for which the program waits after an Input event, where `input=True` was given."""
        execution, line = self._execution, checked_answer(text)

        async def work() -> None:
            if execution is not None:
                execution.answer(line)

        self._transport.call(work)

    def close(self) -> None:
        execution, self._execution = self._execution, None
        self._waiting = []
        if execution is not None:
            self._transport.call(execution.aclose)

    def __del__(self) -> None:
        execution = getattr(self, "_execution", None)
        if execution is not None and execution.ended is None:
            self._transport.spawn(execution.aclose)


class Files:
    """A sandbox's files. Paths are absolute or relative to its working directory, and never leave it.

    Methods raise FileNotFound, PermissionDenied, IsADirectory, NotADirectory, NoSpace, InvalidPath or FileError.
    """

    def __init__(self, transport: Transport, core: backend.BackendSandbox):
        self._transport = transport
        self._core = core

    def read(self, path: str, *, user: User | None = None) -> bytes:
        """The whole content."""
        self._core.check_running()
        return self._transport.call(lambda: self._core.files.read(path, user=user))

    def read_chunks(self, path: str, *, user: User | None = None) -> Iterator[bytes]:
        """The content in chunks of up to 1 MiB."""
        self._core.check_running()
        chunks = self._transport.call(lambda: self._core.files.open_read(path, user=user))

        async def take() -> bytes | None:
            return await anext(chunks, None)

        try:
            while (chunk := self._transport.call(take)) is not None:
                yield chunk
        finally:
            self._transport.spawn(chunks.aclose)

    def write(self, path: str, content: Content, *, user: User | None = None, mode: int | None = None) -> FileInfo:
        """Makes or replaces a file, and the directories above it, from bytes, text or chunks of bytes."""
        self._core.check_running()
        return self._transport.call(
            lambda: self._core.files.write(path, content_in_thread(content), user=user, mode=mode)
        )

    def list(self, path: str = ".", *, depth: int = 1, user: User | None = None) -> list[FileInfo]:
        """The entries of a directory, down to `depth` levels."""
        self._core.check_running()
        return self._transport.call(lambda: self._core.files.list(path, depth=depth, user=user))

    def stat(self, path: str, *, user: User | None = None) -> FileInfo:
        """The entry at that path; a symlink is not followed."""
        self._core.check_running()
        return self._transport.call(lambda: self._core.files.stat(path, user=user))

    def exists(self, path: str, *, user: User | None = None) -> bool:
        self._core.check_running()
        return self._transport.call(lambda: self._core.files.exists(path, user=user))

    def make_dir(self, path: str, *, user: User | None = None) -> bool:
        """Makes a directory and those above it. False if it was there."""
        self._core.check_running()
        return self._transport.call(lambda: self._core.files.make_dir(path, user=user))

    def move(self, path: str, to: str, *, user: User | None = None) -> FileInfo:
        self._core.check_running()
        return self._transport.call(lambda: self._core.files.move(path, to, user=user))

    def remove(self, path: str, *, user: User | None = None) -> None:
        """Removes a file, or a directory with all that is in it."""
        self._core.check_running()
        self._transport.call(lambda: self._core.files.remove(path, user=user))

    def watch(self, path: str, *, recursive: bool = False, user: User | None = None) -> Watch:
        """Changes below a directory from now on: `with box.files.watch(path) as changes: for change in changes`."""
        self._core.check_running()
        return Watch(self._transport, lambda: self._core.files.watch(path, recursive=recursive, user=user))


class Watch:
    """An iterator of FileChange. `close()`, from any thread, ends it."""

    def __init__(self, transport: Transport, make: Callable[[], backend.BackendWatch]):
        self._transport = transport

        async def work() -> backend.BackendWatch:
            return await make().__aenter__()

        self._core = transport.call(work)

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[FileChange]:
        return self

    def __next__(self) -> FileChange:
        async def take() -> FileChange | None:
            return await anext(self._core, None)

        change = self._transport.call(take)
        if change is None:
            raise StopIteration
        return change

    def close(self) -> None:
        async def work() -> None:
            self._core.close()

        self._transport.call(work)


class Process:
    """A command in the background. An iterator of its events; it lives until it ends or its sandbox does."""

    def __init__(self, transport: Transport, core: backend.BackendProcess):
        self._transport = transport
        self._core = core
        self._waiting: list[ProcessEvent] = []

    @property
    def id(self) -> str:
        return self._core.id

    @property
    def pid(self) -> int:
        """Its process id inside the sandbox."""
        return self._core.pid

    @property
    def running(self) -> bool:
        return self._core.exited is None

    def __iter__(self) -> Iterator[ProcessEvent]:
        return self

    def __next__(self) -> ProcessEvent:
        if not self._waiting:
            self._waiting = self._transport.call(self._core.next_events)[::-1]
        if not self._waiting:
            raise StopIteration
        return self._waiting.pop()

    def wait(self) -> CommandResult:
        """Waits for its end. Output that was iterated before is not in the result."""
        return self._transport.call(self._core.result)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Signals it, with all that it started."""

        async def work() -> None:
            self._core.kill(number)

        self._transport.call(work)

    def send_stdin(self, data: bytes | str) -> None:
        """Raises InvalidRequest unless it was started with `stdin=True` and still reads."""
        content = encode_stdin(data)
        self._transport.call(lambda: self._core.send_stdin(content))

    def close_stdin(self) -> None:
        async def work() -> None:
            self._core.close_stdin()

        self._transport.call(work)


class Commands:
    """Shell commands in a sandbox."""

    def __init__(self, transport: Transport, core: backend.BackendSandbox):
        self._transport = transport
        self._core = core

    @overload
    def run(
        self,
        cmd: str | Sequence[str],
        *,
        user: User | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
        stdin: str | bytes | None = None,
        background: Literal[False] = False,
    ) -> CommandResult: ...

    @overload
    def run(
        self,
        cmd: str | Sequence[str],
        *,
        user: User | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
        stdin: bool | None = None,
        background: Literal[True],
    ) -> Process: ...

    def run(
        self,
        cmd: str | Sequence[str],
        *,
        user: User | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
        stdin: str | bytes | bool | None = None,
        background: bool = False,
    ) -> CommandResult | Process:
        """Runs a shell command (a string) or a program with arguments (a list). Never raises for an exit code.

        With `background=True` it returns at once with a Process; there, `stdin=True` keeps its input open.
        """
        self._core.check_running()
        given = command_env(cmd, user, env, cwd)
        if background:
            core = self._transport.call(
                lambda: self._core.commands.start(
                    cmd, user=user, env=given, cwd=cwd, timeout_seconds=timeout, stdin=bool(stdin), background=True
                )
            )
            return Process(self._transport, core)
        text = checked_stdin(stdin)
        return self._transport.call(
            lambda: self._core.commands.run(cmd, user=user, env=given, cwd=cwd, timeout_seconds=timeout, stdin=text)
        )

    def list(self) -> list[ProcessInfo]:
        """The commands that run now."""
        self._core.check_running()
        return self._transport.call(self._core.commands.list)

    def kill(self, id: str) -> None:
        """Raises ProcessNotFound."""
        self._transport.call(lambda: self._core.commands.kill(id))


# Detached runs, which outlive the connection that began them, for synchronous programs.


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


class Attachment:
    """An iterator of a run's events, until `Ended`. Leaving it changes nothing: the run goes on.

    `last_event` is the number of the event that it gave last. When the connection to a server is lost it raises
    Unavailable; iterating again goes on after that event.
    """

    def __init__(self, transport: Transport, id: str, after: int, run: DetachedRun | None = None):
        self._transport = transport
        self._position = EventCursor(transport, id, after)
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
            self._transport.call(self._position.fetch_events)
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

    `last_event` is the number of the last event that was seen through this object, 0 at first; `state` ("running"
    or "ended") and `outcome` are the last known ones: `info()` updates them.
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
        """The run's current state. Raises RunNotFound when it is not kept any more."""
        info = self._transport.call(lambda: self._transport.runs.info(self.id))
        self._update_state(info)
        return info

    def events(self, after: int | None = None) -> Attachment:
        """Its events, live until `Ended`: those after `last_event`, or after number `after`."""
        return Attachment(self._transport, self.id, self.last_event if after is None else after, self)

    def result(self) -> Run:
        """Waits for the end of the run and returns its result."""
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

    def _update_state(self, info: RunInfo) -> None:
        self.state, self.outcome = info.state, info.outcome


def check_event_number(after: object) -> None:
    """Raises InvalidRequest."""
    if type(after) is not int or after < 0:
        raise errors.InvalidRequest(f"after must be the number of an event, 0 for all of them, not {after!r}")
