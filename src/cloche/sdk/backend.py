"""The interface between the public classes or the command line and a sandbox, in this process or on a
server.

The engine's own executions, processes, files and watches implement it; `local.py` makes the rest of it out of
the engine's objects, `remote*.py` out of `/api/v1`. All of it belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import builtins
import html
import os
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from types import TracebackType
from typing import Any, Protocol, TypeVar

from cloche import errors
from cloche.events import AnyEvent, Ended, Exited, NumberedEvent, ProcessEvent, ProcessResult, Run, RunInfo
from cloche.file_content import Content
from cloche.input_answers import InputSource
from cloche.model import (
    Completions,
    FileChange,
    FileInfo,
    Limits,
    Mark,
    ProcessInfo,
    SandboxInfo,
    SandboxSpec,
    SnapshotInfo,
    ToolDefinition,
    ToolResult,
    User,
    Variables,
    VolumeInfo,
)
from cloche.network_policy import NetworkEntry, NetworkPolicy
from cloche.notebook import History

# A sandbox's network log as a list with a readable representation.

_LOG_COLUMNS = ("time", "verdict", "protocol", "host", "port", "sent", "received", "seconds", "reason")


class NetworkLog(list[NetworkEntry]):
    """The connections that programs tried, the oldest first. `dropped`: how many older entries made room for
    these.
    """

    def __init__(self, entries: Iterable[NetworkEntry] = (), dropped: int = 0):
        super().__init__(entries)
        self.dropped = dropped

    def __repr__(self) -> str:
        return "\n".join([*self._dropped_note(), *map(str, self)]) or "nothing was tried"

    def _dropped_note(self) -> list[str]:
        return [f"({self.dropped} older entries made room)"] if self.dropped else []

    def _repr_html_(self) -> str:
        """For notebooks. Host names come from the program, so everything is escaped."""
        head = _table_row("th", _LOG_COLUMNS)
        note = "".join(f"<p>{html.escape(each)}</p>" for each in self._dropped_note())
        return f"{note}<table>{head}{''.join(_table_row('td', _entry_cells(each)) for each in self)}</table>"


def _entry_cells(entry: NetworkEntry) -> list[object]:
    when = time.strftime("%H:%M:%S", time.localtime(entry.at))
    about = (entry.verdict, entry.protocol, entry.host, entry.port or "")
    return [when, *about, entry.sent_bytes, entry.received_bytes, f"{entry.seconds:.3f}", entry.reason]


def _table_row(cell: str, values: Iterable[object]) -> str:
    return "<tr>" + "".join(f"<{cell}>{html.escape(str(each))}</{cell}>" for each in values) + "</tr>"


Self = TypeVar("Self")


class BackendExecution(Protocol):
    """As `cloche.engine.executions.execution.Execution`."""

    @property
    def ended(self) -> Ended | None: ...

    async def __aenter__(self: Self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...
    def __aiter__(self: Self) -> Self: ...
    async def __anext__(self) -> AnyEvent: ...
    async def next_events(self) -> list[AnyEvent]: ...
    async def aclose(self) -> None: ...
    def interrupt(self) -> None: ...
    def answer(self, text: str | None) -> None: ...
    def answer_tools(self, results: Iterable[ToolResult]) -> None: ...


class BackendProcess(Protocol):
    """As `cloche.engine.commands.process.SandboxProcess`."""

    id: str
    pid: int
    exited: Exited | None

    async def __aenter__(self: Self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...
    def __aiter__(self: Self) -> Self: ...
    async def __anext__(self) -> ProcessEvent: ...
    async def next_events(self) -> list[ProcessEvent]: ...
    async def result(self) -> ProcessResult: ...
    async def send_stdin(self, data: bytes) -> None: ...
    def kill(self, number: int = ...) -> None: ...
    def close_stdin(self) -> None: ...
    def resize(self, rows: int, columns: int) -> None: ...


class BackendWatch(Protocol):
    """As `cloche.engine.sandboxes.files.DirectoryWatch`."""

    async def __aenter__(self: Self) -> Self: ...
    def __aiter__(self: Self) -> Self: ...
    async def __anext__(self) -> FileChange: ...
    def close(self) -> None: ...


class BackendFiles(Protocol):
    """As `cloche.engine.sandboxes.files.SandboxFiles`."""

    async def read(self, path: str, *, user: User | None = None) -> bytes: ...
    async def open_read(self, path: str, *, user: User | None = None) -> AsyncGenerator[bytes, None]: ...
    async def write(
        self, path: str, content: Content, *, user: User | None = None, mode: int | None = None
    ) -> FileInfo: ...
    async def list(self, path: str = ".", *, depth: int = 1, user: User | None = None) -> builtins.list[FileInfo]: ...
    async def stat(self, path: str, *, user: User | None = None) -> FileInfo: ...
    async def exists(self, path: str, *, user: User | None = None) -> bool: ...
    async def make_dir(self, path: str, *, user: User | None = None) -> bool: ...
    async def move(self, path: str, to: str, *, user: User | None = None) -> FileInfo: ...
    async def remove(self, path: str, *, user: User | None = None) -> None: ...
    def watch(self, path: str, *, recursive: bool = False, user: User | None = None) -> BackendWatch: ...


class BackendCommands(Protocol):
    """As `cloche.engine.commands.commands.SandboxCommands`, but that `kill` waits."""

    async def start(
        self,
        command: str | Sequence[str],
        *,
        user: User | None = None,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        timeout_seconds: float | None = None,
        stdin: bool = False,
        pty: tuple[int, int] | None = None,
        background: bool = False,
    ) -> BackendProcess: ...
    async def run(
        self,
        command: str | Sequence[str],
        *,
        user: User | None = None,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        timeout_seconds: float | None = None,
        stdin: str | bytes | None = None,
    ) -> ProcessResult: ...
    async def list(self) -> builtins.list[ProcessInfo]: ...
    async def kill(self, id: str) -> None: ...


class BackendNetwork(Protocol):
    async def policy(self) -> NetworkPolicy:
        """The current policy, without the values of secrets."""

    async def log(self) -> NetworkLog: ...
    async def set(self, policy: NetworkPolicy, *, keep_secrets: bool) -> NetworkPolicy:
        """Replaces the policy, and its secrets unless they are kept. Raises InvalidRequest."""


class BackendContext(Protocol):
    @property
    def id(self) -> str: ...
    @property
    def language(self) -> str: ...
    @property
    def cwd(self) -> str: ...

    async def execute(
        self,
        code: str,
        *,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        timeout_seconds: float | None = None,
        input: InputSource = None,
        argv: Sequence[str] | None = None,
        tools: Sequence[ToolDefinition] = (),
    ) -> BackendExecution:
        """An execution, which starts when it is used. Raises if the request is invalid."""

    async def run(
        self,
        code: str,
        *,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        timeout_seconds: float | None = None,
        input: InputSource = None,
    ) -> Run: ...
    async def detach(
        self,
        code: str,
        *,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        timeout_seconds: float | None = None,
        input: builtins.list[str] | None = None,
    ) -> RunInfo:
        """Starts a run that goes on after the client leaves. Raises if the request is invalid."""

    async def interrupt(self) -> bool: ...
    async def restart(self) -> None: ...
    async def checkpoint(self) -> Mark:
        """Raises NotCopyable, or InvalidRequest where there are too many."""

    async def rollback(self, mark: str) -> None:
        """Raises CheckpointNotFound."""

    async def fork(self, count: int = 1) -> Sequence[BackendContext]:
        """Raises NotCopyable, or InvalidRequest where there is no room."""

    async def checkpoints(self) -> builtins.list[Mark]: ...
    async def forget(self, mark: str) -> None:
        """Raises CheckpointNotFound."""

    async def variables(self) -> Variables: ...
    async def complete(self, code: str, cursor: int | None = None) -> Completions:
        """Completions at the cursor, or at the end, also while a cell runs."""

    async def history(self) -> History: ...
    async def notebook(self) -> bytes:
        """Its history, as a file that Jupyter opens."""


class BackendSandbox(Protocol):
    @property
    def id(self) -> str: ...
    @property
    def limits(self) -> Limits: ...
    @property
    def files(self) -> BackendFiles: ...
    @property
    def commands(self) -> BackendCommands: ...
    @property
    def network(self) -> BackendNetwork: ...
    @property
    def ended(self) -> bool:
        """Whether it is known here that it has ended."""

    def check_running(self) -> None:
        """Raises Gone if it is known here that it has ended."""

    async def describe(self) -> SandboxInfo: ...
    async def renew(self, seconds: float) -> SandboxInfo: ...
    async def kill(self) -> None:
        """Ends it. Harmless when it has ended."""

    async def pause(self, *, memory: bool = True) -> SandboxInfo:
        """Raises SandboxPaused, or Unavailable and TooLarge: then it runs as before."""

    async def resume(self, timeout_seconds: float | None = None) -> SandboxInfo:
        """Harmless when it runs: with seconds, its deadline is moved."""

    async def snapshot(self, name: str | None = None) -> SnapshotInfo: ...
    async def fork(self, count: int = 1, timeout_seconds: float | None = None) -> Sequence[BackendSandbox]: ...

    async def history(self) -> History: ...

    def context(self, id: str | None = None) -> BackendContext:
        """The context of that id, the default one without. May raise ContextNotFound, or leave that to its use."""

    async def find_context(self, id: str) -> BackendContext:
        """Raises ContextNotFound."""

    async def list_contexts(self) -> list[BackendContext]: ...
    async def create_context(self, *, language: str = "python", cwd: str | None = None) -> BackendContext: ...
    async def remove_context(self, id: str) -> None: ...


class BackendRuns(Protocol):
    """The caller's detached runs. Every method raises RunNotFound."""

    async def info(self, id: str) -> RunInfo: ...
    async def list(self, sandbox: str) -> builtins.list[RunInfo]: ...
    async def attach(self, id: str, after: int) -> AsyncGenerator[builtins.list[NumberedEvent], None]:
        """Batches of the events after that one, until `Ended`. Raises InvalidRequest where there is no such event."""

    async def result(self, id: str) -> Run:
        """When it has ended."""

    async def interrupt(self, id: str) -> bool: ...
    async def remove(self, id: str) -> None: ...


class BackendSnapshots(Protocol):
    """The caller's snapshots."""

    async def list(self, sandbox: str | None = None) -> builtins.list[SnapshotInfo]:
        """The newest first; only those of that sandbox, where one is named."""

    async def get(self, ref: str) -> SnapshotInfo:
        """By its id or name. Raises SnapshotNotFound."""

    async def remove(self, ref: str) -> None:
        """Raises SnapshotNotFound."""


class BackendVolumes(Protocol):
    """The caller's volumes."""

    async def create(self, name: str) -> VolumeInfo:
        """Raises VolumeConflict, InvalidRequest."""

    async def list(self) -> builtins.list[VolumeInfo]:
        """The oldest first."""

    async def get(self, ref: str) -> VolumeInfo:
        """By its id or name. Raises VolumeNotFound."""

    async def remove(self, ref: str) -> None:
        """Raises VolumeNotFound, VolumeConflict."""


# The transport behind the public classes: an engine in this process, or a server.

T = TypeVar("T")
Work = Callable[[], Coroutine[Any, Any, T]]

URL_VARIABLE = "CLOCHE_URL"
KEY_VARIABLE = "CLOCHE_API_KEY"


class Transport(Protocol):
    """Runs work where the sandboxes are. Safe from any thread; every method raises UsedAfterFork in a forked child."""

    @property
    def usable(self) -> bool:
        """Whether this process may use it: it was not inherited by a fork, and not closed."""

    def call(self, work: Work[T]) -> T:
        """Does the work and waits for it. KeyboardInterrupt cancels it."""

    async def acall(self, work: Work[T]) -> T:
        """The same from a task of any event loop; cancelling the task cancels the work."""

    def spawn(self, work: Work[object]) -> None:
        """Does the work at some time, without a caller that waits for it."""

    async def create(self, spec: SandboxSpec) -> BackendSandbox:
        """As `Engine.create`. To be called within work."""

    async def connect(self, id: str, timeout_seconds: float | None = None) -> BackendSandbox:
        """As `Engine.resume`. To be called within work."""

    async def list(self) -> list[SandboxInfo]:
        """The running and the paused sandboxes. To be called within work."""

    @property
    def runs(self) -> BackendRuns:
        """To be used within work."""

    @property
    def snapshots(self) -> BackendSnapshots:
        """To be used within work."""

    @property
    def volumes(self) -> BackendVolumes:
        """To be used within work."""


chosen: Transport | None = None
"""Wins over the environment: see `cloche.sdk.embedded.use_engine`."""


def transport_to(url: str | None, api_key: str | None) -> Transport:
    """The server at `url`, or at CLOCHE_URL; without either, the engine of this process, started if necessary.

    Raises InvalidRequest for an invalid address, and for a key without a server: quietly running code here that
    was meant for a server would be worse.
    """
    if chosen is not None and chosen.usable and not url:
        return chosen
    address = url or os.environ.get(URL_VARIABLE)
    if address:
        from cloche.sdk.remote import remote_transport

        return remote_transport(address, api_key or os.environ.get(KEY_VARIABLE) or "")
    if api_key:
        raise errors.InvalidRequest(f"api_key requires a server: name it with url, or {URL_VARIABLE}")
    from cloche.sdk.embedded import embedded_engine

    return embedded_engine()


async def open_transport(url: str | None, api_key: str | None) -> Transport:
    """As `transport_to`, in a thread: an engine's first start takes a moment, which must not stop the caller's loop."""
    return await asyncio.to_thread(transport_to, url, api_key)
