"""What hangs on a Sandbox: streams, files, watches, commands, processes."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Literal, overload

from cloche.engine.commands.process import ProcessEvent, ProcessResult
from cloche.engine.sandboxes.files import Content
from cloche.events import AnyEvent
from cloche.model import FileChange, FileInfo, ProcessInfo, User
from cloche.sdk import seam
from cloche.sdk.request import answer_of, command_env, content_of, encoded, stdin_of
from cloche.sdk.transport import Transport

CommandResult = ProcessResult


class Stream:
    """An iterator of events. `close()`, leaving its `with`, or letting go of it early interrupts the program."""

    def __init__(self, transport: Transport, make: Callable[[], Awaitable[seam.Execution]]):
        self._transport = transport
        self._waiting: list[AnyEvent] = []

        async def work() -> seam.Execution:
            return await make()

        self._execution: seam.Execution | None = transport.call(work)

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
        execution, line = self._execution, answer_of(text)

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

    def __init__(self, transport: Transport, core: seam.Sandbox):
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
        return self._transport.call(lambda: self._core.files.write(path, content_of(content), user=user, mode=mode))

    def list(self, path: str = ".", *, depth: int = 1, user: User | None = None) -> list[FileInfo]:
        """What is in a directory, down to `depth` levels."""
        self._core.check_running()
        return self._transport.call(lambda: self._core.files.list(path, depth=depth, user=user))

    def stat(self, path: str, *, user: User | None = None) -> FileInfo:
        """What lies there; a symlink is not followed."""
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

    def __init__(self, transport: Transport, make: Callable[[], seam.Watch]):
        self._transport = transport

        async def work() -> seam.Watch:
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

    def __init__(self, transport: Transport, core: seam.Process):
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
        content = encoded(data)
        self._transport.call(lambda: self._core.send_stdin(content))

    def close_stdin(self) -> None:
        async def work() -> None:
            self._core.close_stdin()

        self._transport.call(work)


class Commands:
    """Shell commands in a sandbox."""

    def __init__(self, transport: Transport, core: seam.Sandbox):
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
        text = stdin_of(stdin)
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
