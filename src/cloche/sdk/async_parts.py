"""The parts of an AsyncSandbox: the same as `cloche.sdk.parts`, with `await` and `async for`."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Literal, overload

from cloche.events import AnyEvent, Ended, ProcessEvent, Run, RunInfo
from cloche.file_content import Content
from cloche.model import FileChange, FileInfo, Outcome, ProcessInfo, User
from cloche.sdk import backend
from cloche.sdk.arguments import checked_answer, checked_stdin, command_env, content_from_loop, encode_stdin
from cloche.sdk.backend import Transport, transport_to
from cloche.sdk.parts import CommandResult, EventCursor


class AsyncStream:
    """An async iterator of events. `aclose()`, leaving its `async with`, or letting go of it early interrupts."""

    def __init__(self, transport: Transport, make: Callable[[], Awaitable[backend.BackendExecution]]):
        self._transport = transport
        self._make = make
        self._execution: backend.BackendExecution | None = None
        self._over = False
        self._waiting: list[AnyEvent] = []

    def __aiter__(self) -> AsyncIterator[AnyEvent]:
        return self

    async def __anext__(self) -> AnyEvent:
        if not self._waiting and not self._over:
            self._waiting = (await self._transport.acall(self._next_batch))[::-1]
            self._over = not self._waiting
        if not self._waiting:
            raise StopAsyncIteration
        return self._waiting.pop()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def interrupt(self) -> None:
        """Interrupts the program; the stream goes on to its `Ended`."""

        async def work() -> None:
            if self._execution is not None:
                self._execution.interrupt()

        await self._transport.acall(work)

    async def answer(self, text: str) -> None:
        """The line for which the program waits after an Input event, where `input=True` was given."""
        line = checked_answer(text)

        async def work() -> None:
            if self._execution is not None:
                self._execution.answer(line)

        await self._transport.acall(work)

    async def aclose(self) -> None:
        self._over = True
        self._waiting = []
        if self._execution is not None and self._execution.ended is None:
            await self._transport.acall(self._execution.aclose)

    def __del__(self) -> None:
        execution = self._execution
        if execution is not None and execution.ended is None:
            self._transport.spawn(execution.aclose)

    async def _next_batch(self) -> list[AnyEvent]:
        if self._execution is None:
            self._execution = await self._make()
        return await self._execution.next_events()


class AsyncFiles:
    """A sandbox's files. Paths are absolute or relative to its working directory, and never leave it.

    Methods raise FileNotFound, PermissionDenied, IsADirectory, NotADirectory, NoSpace, InvalidPath or FileError.
    """

    def __init__(self, transport: Transport, core: backend.BackendSandbox):
        self._transport = transport
        self._core = core

    async def read(self, path: str, *, user: User | None = None) -> bytes:
        """The whole content."""
        self._core.check_running()
        return await self._transport.acall(lambda: self._core.files.read(path, user=user))

    async def read_chunks(self, path: str, *, user: User | None = None) -> AsyncIterator[bytes]:
        """The content in chunks of up to 1 MiB."""
        self._core.check_running()
        chunks = await self._transport.acall(lambda: self._core.files.open_read(path, user=user))

        async def take() -> bytes | None:
            return await anext(chunks, None)

        try:
            while (chunk := await self._transport.acall(take)) is not None:
                yield chunk
        finally:
            self._transport.spawn(chunks.aclose)

    async def write(
        self, path: str, content: Content, *, user: User | None = None, mode: int | None = None
    ) -> FileInfo:
        """Makes or replaces a file, and the directories above it, from bytes, text or (async) chunks of bytes."""
        self._core.check_running()
        taken = content_from_loop(content)
        return await self._transport.acall(lambda: self._core.files.write(path, taken, user=user, mode=mode))

    async def list(self, path: str = ".", *, depth: int = 1, user: User | None = None) -> list[FileInfo]:
        """The entries of a directory, down to `depth` levels."""
        self._core.check_running()
        return await self._transport.acall(lambda: self._core.files.list(path, depth=depth, user=user))

    async def stat(self, path: str, *, user: User | None = None) -> FileInfo:
        """The entry at that path; a symlink is not followed."""
        self._core.check_running()
        return await self._transport.acall(lambda: self._core.files.stat(path, user=user))

    async def exists(self, path: str, *, user: User | None = None) -> bool:
        self._core.check_running()
        return await self._transport.acall(lambda: self._core.files.exists(path, user=user))

    async def make_dir(self, path: str, *, user: User | None = None) -> bool:
        """Makes a directory and those above it. False if it was there."""
        self._core.check_running()
        return await self._transport.acall(lambda: self._core.files.make_dir(path, user=user))

    async def move(self, path: str, to: str, *, user: User | None = None) -> FileInfo:
        self._core.check_running()
        return await self._transport.acall(lambda: self._core.files.move(path, to, user=user))

    async def remove(self, path: str, *, user: User | None = None) -> None:
        """Removes a file, or a directory with all that is in it."""
        self._core.check_running()
        await self._transport.acall(lambda: self._core.files.remove(path, user=user))

    def watch(self, path: str, *, recursive: bool = False, user: User | None = None) -> AsyncWatch:
        """Changes below a directory: `async with box.files.watch(path) as changes: async for change in changes`."""
        self._core.check_running()
        return AsyncWatch(self._transport, self._core.files.watch(path, recursive=recursive, user=user))


class AsyncWatch:
    """An async iterator of FileChange between `__aenter__` and `close()`."""

    def __init__(self, transport: Transport, core: backend.BackendWatch):
        self._transport = transport
        self._core = core

    async def __aenter__(self) -> AsyncWatch:
        await self._transport.acall(self._core.__aenter__)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> AsyncIterator[FileChange]:
        return self

    async def __anext__(self) -> FileChange:
        async def take() -> FileChange | None:
            return await anext(self._core, None)

        change = await self._transport.acall(take)
        if change is None:
            raise StopAsyncIteration
        return change

    async def close(self) -> None:
        async def work() -> None:
            self._core.close()

        await self._transport.acall(work)


class AsyncProcess:
    """A command in the background. An async iterator of its events; it lives until it ends or its sandbox does."""

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

    def __aiter__(self) -> AsyncIterator[ProcessEvent]:
        return self

    async def __anext__(self) -> ProcessEvent:
        if not self._waiting:
            self._waiting = (await self._transport.acall(self._core.next_events))[::-1]
        if not self._waiting:
            raise StopAsyncIteration
        return self._waiting.pop()

    async def wait(self) -> CommandResult:
        """Waits for its end. Output that was iterated before is not in the result."""
        return await self._transport.acall(self._core.result)

    async def kill(self, number: int = signal.SIGKILL) -> None:
        """Signals it, with all that it started."""

        async def work() -> None:
            self._core.kill(number)

        await self._transport.acall(work)

    async def send_stdin(self, data: bytes | str) -> None:
        """Raises InvalidRequest unless it was started with `stdin=True` and still reads."""
        content = encode_stdin(data)
        await self._transport.acall(lambda: self._core.send_stdin(content))

    async def close_stdin(self) -> None:
        async def work() -> None:
            self._core.close_stdin()

        await self._transport.acall(work)


class AsyncCommands:
    """Shell commands in a sandbox."""

    def __init__(self, transport: Transport, core: backend.BackendSandbox):
        self._transport = transport
        self._core = core

    @overload
    async def run(
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
    async def run(
        self,
        cmd: str | Sequence[str],
        *,
        user: User | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
        stdin: bool | None = None,
        background: Literal[True],
    ) -> AsyncProcess: ...

    async def run(
        self,
        cmd: str | Sequence[str],
        *,
        user: User | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
        stdin: str | bytes | bool | None = None,
        background: bool = False,
    ) -> CommandResult | AsyncProcess:
        """Runs a shell command (a string) or a program with arguments (a list). Never raises for an exit code.

        With `background=True` it returns at once with an AsyncProcess; there, `stdin=True` keeps its input open.
        """
        self._core.check_running()
        given = command_env(cmd, user, env, cwd)
        if background:
            core = await self._transport.acall(
                lambda: self._core.commands.start(
                    cmd, user=user, env=given, cwd=cwd, timeout_seconds=timeout, stdin=bool(stdin), background=True
                )
            )
            return AsyncProcess(self._transport, core)
        text = checked_stdin(stdin)
        return await self._transport.acall(
            lambda: self._core.commands.run(cmd, user=user, env=given, cwd=cwd, timeout_seconds=timeout, stdin=text)
        )

    async def list(self) -> list[ProcessInfo]:
        """The commands that run now."""
        self._core.check_running()
        return await self._transport.acall(self._core.commands.list)

    async def kill(self, id: str) -> None:
        """Raises ProcessNotFound."""
        await self._transport.acall(lambda: self._core.commands.kill(id))


# Detached runs, which outlive their connection: as in `cloche.sdk.detached`, with `await` and `async for`.


class AsyncAttachment:
    """An async iterator of a run's events; see `Attachment`. It raises errors at its first use."""

    def __init__(self, transport: Transport, id: str, after: int, run: AsyncDetachedRun | None = None):
        self._position = EventCursor(transport, id, after)
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
            await self._transport.acall(self._position.fetch_events)
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
        """The run's current state. Raises RunNotFound when it is not kept any more."""
        info = await self._transport.acall(lambda: self._transport.runs.info(self.id))
        self._update_state(info)
        return info

    def events(self, after: int | None = None) -> AsyncAttachment:
        """Its events, live until `Ended`: those after `last_event`, or after number `after`."""
        return AsyncAttachment(self._transport, self.id, self.last_event if after is None else after, self)

    async def result(self) -> Run:
        """Waits for the end of the run and returns its result."""
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

    def _update_state(self, info: RunInfo) -> None:
        self.state, self.outcome = info.state, info.outcome
