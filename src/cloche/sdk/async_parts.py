"""The parts of an AsyncSandbox: streams, files, watches, commands, processes, detached runs, network."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Literal, overload

from cloche.events import AnyEvent, Ended, ProcessEvent, ProcessResult, Run, RunInfo
from cloche.file_content import Content
from cloche.model import FileChange, FileInfo, Outcome, ProcessInfo, User
from cloche.network_policy import NetworkPolicy
from cloche.sdk import backend
from cloche.sdk.arguments import (
    NetworkLike,
    SecretsLike,
    changed_policy,
    checked_answer,
    checked_stdin,
    command_env,
    content_from_loop,
    encode_stdin,
)
from cloche.sdk.backend import NetworkLog, Transport, open_transport
from cloche.sdk.work import EventCursor, StreamedExecution, enter_watch, next_or_none, run_function

CommandResult = ProcessResult


class AsyncStream:
    """An async iterator of events. `aclose()`, leaving its `async with`, or dropping it interrupts the program."""

    def __init__(self, transport: Transport, start: Callable[[], Awaitable[backend.BackendExecution]]):
        self._transport = transport
        self._execution = StreamedExecution(start)
        self._over = False
        self._waiting: list[AnyEvent] = []
        # blocking: transport.call(self._execution.open)

    def __aiter__(self) -> AsyncIterator[AnyEvent]:
        return self

    async def __anext__(self) -> AnyEvent:
        if not self._waiting and not self._over:
            batch = await self._transport.acall(self._execution.next_events)
            self._waiting, self._over = batch[::-1], not batch
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
        await self._transport.acall(self._execution.interrupt)

    async def answer(self, text: str) -> None:
        """The line for which the program waits after an Input event, where `input=True` was given."""
        line = checked_answer(text)
        await self._transport.acall(lambda: self._execution.answer(line))

    async def aclose(self) -> None:
        self._over = True
        self._waiting = []
        if self._execution.running:
            await self._transport.acall(self._execution.stop)

    def __del__(self) -> None:
        if self._execution.running:
            self._transport.spawn(self._execution.stop)


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
        try:
            while (chunk := await self._transport.acall(lambda: next_or_none(chunks))) is not None:
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
        # blocking: transport.call(lambda: enter_watch(core))

    async def __aenter__(self) -> AsyncWatch:
        await self._transport.acall(lambda: enter_watch(self._core))  # awaiting only
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> AsyncIterator[FileChange]:
        return self

    async def __anext__(self) -> FileChange:
        change = await self._transport.acall(lambda: next_or_none(self._core))
        if change is None:
            raise StopAsyncIteration
        return change

    async def close(self) -> None:
        await self._transport.acall(lambda: run_function(self._core.close))


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
            batch = await self._transport.acall(self._core.next_events)
            self._waiting = batch[::-1]
        if not self._waiting:
            raise StopAsyncIteration
        return self._waiting.pop()

    async def wait(self) -> CommandResult:
        """Waits for its end. Output that was iterated before is not in the result."""
        return await self._transport.acall(self._core.result)

    async def kill(self, number: int = signal.SIGKILL) -> None:
        """Signals it, with all that it started."""
        await self._transport.acall(lambda: run_function(self._core.kill, number))

    async def send_stdin(self, data: bytes | str) -> None:
        """Raises InvalidRequest unless it was started with `stdin=True` and still reads."""
        content = encode_stdin(data)
        await self._transport.acall(lambda: self._core.send_stdin(content))

    async def close_stdin(self) -> None:
        await self._transport.acall(lambda: run_function(self._core.close_stdin))


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


class AsyncNetwork:
    """The network policy and log of a sandbox."""

    def __init__(self, transport: Transport, core: backend.BackendSandbox):
        self._transport = transport
        self._core = core

    @property
    def policy(self) -> Awaitable[NetworkPolicy]:  # blocking: def policy(self) -> NetworkPolicy:
        """The current policy: `await box.network.policy`. Secrets are shown without their values."""
        self._core.check_running()
        return self._transport.acall(self._core.network.policy)

    async def log(self) -> NetworkLog:
        """The connections that its programs tried, with their verdicts: the oldest first."""
        self._core.check_running()
        return await self._transport.acall(self._core.network.log)

    async def set(self, network: NetworkLike, secrets: SecretsLike = None) -> NetworkPolicy:
        """Replaces the policy from now on and returns the new one; connections that it no longer allows end.

        Without `secrets` the present ones stay where their domains are still allowed; `[]` removes them. Raises
        InvalidRequest for a bad policy and for one that the host's operator does not allow; then nothing changes.
        """
        policy, keep = changed_policy(network, secrets)
        self._core.check_running()
        return await self._transport.acall(lambda: self._core.network.set(policy, keep_secrets=keep))


# Detached runs, which outlive the connection that began them.


class AsyncAttachment:
    """An async iterator of a run's events, until `Ended`. Leaving it changes nothing: the run goes on.

    `last_event` is the number of the event that it gave last. When the connection to a server is lost it raises
    Unavailable; iterating again goes on after that event. Errors are raised at its first use.
    """

    def __init__(self, transport: Transport, id: str, after: int, run: AsyncDetachedRun | None = None):
        self._position = EventCursor(transport, id, after)
        self._transport = transport
        self._run = run
        # blocking: transport.call(self._position.open)

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
    async def connect(cls, id: str, *, url: str | None = None, api_key: str | None = None) -> AsyncDetachedRun:
        """The run of that id, also when its sandbox has ended, or its server was started anew. Raises RunNotFound."""
        transport = await open_transport(url, api_key)
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
