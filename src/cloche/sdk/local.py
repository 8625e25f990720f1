"""A sandbox of the engine in this process, behind the interface of `cloche.sdk.backend`."""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import AsyncGenerator, Sequence

from cloche import errors
from cloche.engine.commands.process import SandboxProcess
from cloche.engine.engine import Engine
from cloche.engine.executions.context import Context
from cloche.engine.executions.execution import Execution
from cloche.engine.executions.history import export_notebook, read_history
from cloche.engine.executions.runs import RunEventLine
from cloche.engine.sandboxes.create import require_all_forks
from cloche.engine.sandboxes.files import DirectoryWatch
from cloche.engine.sandboxes.handle import SandboxHandle
from cloche.engine.sandboxes.sandbox import DEFAULT_CONTEXT, Sandbox
from cloche.events import NumberedEvent, ProcessResult, Run, RunInfo
from cloche.file_content import Content
from cloche.input_answers import InputSource
from cloche.model import (
    Completions,
    ExecutionRequest,
    FileChange,
    FileInfo,
    Mark,
    ProcessInfo,
    SandboxInfo,
    SnapshotInfo,
    ToolDefinition,
    User,
    Variables,
    VolumeInfo,
)
from cloche.network_policy import NetworkPolicy, with_usable_secrets
from cloche.notebook import History
from cloche.sdk import backend
from cloche.sdk.arguments import LOCAL_OWNER
from cloche.sdk.backend import NetworkLog


async def resume_for(handle: SandboxHandle, timeout_seconds: float | None) -> Sandbox:
    """The sandbox, running for so many seconds from now on. Raises SandboxNotFound, Gone, Unavailable."""
    sandbox = await handle.resume(seconds=timeout_seconds)
    if timeout_seconds is not None:
        sandbox.renew(timeout_seconds)  # it may have been running
    return sandbox


# The files of a sandbox of the engine in this process.


class LocalFiles:
    def __init__(self, handle: SandboxHandle):
        self._handle = handle

    async def read(self, path: str, *, user: User | None = None) -> bytes:
        return await (await self._handle.running()).files.read(path, user=user)

    async def open_read(self, path: str, *, user: User | None = None) -> AsyncGenerator[bytes, None]:
        return await (await self._handle.running()).files.open_read(path, user=user)

    async def write(
        self, path: str, content: Content, *, user: User | None = None, mode: int | None = None
    ) -> FileInfo:
        return await (await self._handle.running()).files.write(path, content, user=user, mode=mode)

    async def list(self, path: str = ".", *, depth: int = 1, user: User | None = None) -> builtins.list[FileInfo]:
        return await (await self._handle.running()).files.list(path, depth=depth, user=user)

    async def stat(self, path: str, *, user: User | None = None) -> FileInfo:
        return await (await self._handle.running()).files.stat(path, user=user)

    async def exists(self, path: str, *, user: User | None = None) -> bool:
        return await (await self._handle.running()).files.exists(path, user=user)

    async def make_dir(self, path: str, *, user: User | None = None) -> bool:
        return await (await self._handle.running()).files.make_dir(path, user=user)

    async def move(self, path: str, to: str, *, user: User | None = None) -> FileInfo:
        return await (await self._handle.running()).files.move(path, to, user=user)

    async def remove(self, path: str, *, user: User | None = None) -> None:
        await (await self._handle.running()).files.remove(path, user=user)

    def watch(self, path: str, *, recursive: bool = False, user: User | None = None) -> LocalWatch:
        return LocalWatch(self._handle, path, recursive=recursive, user=user)


class LocalWatch:
    """Begins at `__aenter__`, as the engine's own does."""

    def __init__(self, handle: SandboxHandle, path: str, *, recursive: bool, user: User | None):
        self._handle = handle
        self._asked = (path, recursive, user)
        self._core: DirectoryWatch | None = None

    async def __aenter__(self) -> LocalWatch:
        path, recursive, user = self._asked
        self._core = (await self._handle.running()).files.watch(path, recursive=recursive, user=user)
        await self._core.__aenter__()
        return self

    def __aiter__(self) -> LocalWatch:
        return self

    async def __anext__(self) -> FileChange:
        if self._core is None:
            raise errors.InvalidRequest("a watch sees changes between `with` and its end")
        return await anext(self._core)

    def close(self) -> None:
        if self._core is not None:
            self._core.close()


class LocalSandbox:
    def __init__(self, engine: Engine, sandbox: Sandbox):
        self._engine = engine
        self._handle = sandbox.handle
        self._cwd = sandbox.spec.cwd
        self.id = sandbox.id
        self.limits = sandbox.limits
        self.files: backend.BackendFiles = LocalFiles(self._handle)
        self.commands: backend.BackendCommands = LocalCommands(self._handle)
        self.network: backend.BackendNetwork = LocalNetwork(self._handle, engine)

    @property
    def ended(self) -> bool:
        return self._handle.ended

    def check_running(self) -> None:
        if self._handle.ended and self._handle.here is not None:  # one that is paused may be woken by its use
            self._handle.here.check_running()

    async def describe(self) -> SandboxInfo:
        return await self._handle.info()

    async def renew(self, seconds: float) -> SandboxInfo:
        return (await self._handle.running()).renew(seconds)

    async def kill(self) -> None:
        """Harmless when it has ended."""
        with contextlib.suppress(errors.Gone):
            await self._handle.kill()

    async def pause(self, *, memory: bool = True) -> SandboxInfo:
        return await self._handle.pause(memory=memory)

    async def resume(self, timeout_seconds: float | None = None) -> SandboxInfo:
        return (await resume_for(self._handle, timeout_seconds)).info

    async def snapshot(self, name: str | None = None) -> SnapshotInfo:
        return (await self._handle.snapshot(name=name)).info

    async def fork(self, count: int = 1, timeout_seconds: float | None = None) -> list[LocalSandbox]:
        made = await self._handle.fork(count, seconds=timeout_seconds)
        return [LocalSandbox(self._engine, each) for each in await require_all_forks(made)]

    async def history(self) -> History:
        return read_history(await self._handle.running())

    def context(self, id: str | None = None) -> LocalContext:
        here = self._handle.here
        if here is None or here.record.state == "paused":  # it may be running again in another cell: its use will tell
            return LocalContext(self._handle, id or DEFAULT_CONTEXT, cwd=self._cwd)
        here.check_running()
        return self._local_context(here.context(id))

    async def find_context(self, id: str) -> LocalContext:
        return self._local_context((await self._handle.running()).context(id))

    async def list_contexts(self) -> list[backend.BackendContext]:
        return [self._local_context(each) for each in (await self._handle.running()).contexts]

    async def create_context(self, *, language: str = "python", cwd: str | None = None) -> LocalContext:
        return self._local_context(await (await self._handle.running()).create_context(language=language, cwd=cwd))

    def _local_context(self, core: Context) -> LocalContext:
        return LocalContext(self._handle, core.id, language=core.language, cwd=core.cwd)

    async def remove_context(self, id: str) -> None:
        (await self._handle.running()).remove_context(id)


class LocalNetwork:
    def __init__(self, handle: SandboxHandle, engine: Engine):
        self._handle = handle
        self._engine = engine

    async def policy(self) -> NetworkPolicy:
        return (await self._handle.running()).network.policy.redacted()

    async def log(self) -> NetworkLog:
        network = (await self._handle.running()).network
        return NetworkLog(network.log, network.dropped)

    async def set(self, policy: NetworkPolicy, *, keep_secrets: bool) -> NetworkPolicy:
        core = await self._handle.running()
        if keep_secrets:
            policy = with_usable_secrets(policy, core.network.policy.secrets)
        await self._engine.networks.replace(core, policy)
        return await self.policy()


class LocalContext:
    """Its methods begin with `_running_context()`: a paused sandbox may have another cell, and other contexts, now."""

    def __init__(self, handle: SandboxHandle, id: str, *, language: str = "python", cwd: str):
        self._handle = handle
        self.id = id
        self.language = language
        self.cwd = cwd

    async def _running_context(self) -> Context:
        """Raises ContextNotFound, Gone or SandboxPaused."""
        return (await self._handle.running()).context(self.id)

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
    ) -> Execution:
        request = ExecutionRequest(
            code=code, env=env or {}, cwd=cwd, timeout_seconds=timeout_seconds, argv=argv, tools=tools
        )
        return (await self._running_context()).submit(request, input)

    async def run(
        self,
        code: str,
        *,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        timeout_seconds: float | None = None,
        input: InputSource = None,
    ) -> Run:
        execution = await self.execute(code, env=env, cwd=cwd, timeout_seconds=timeout_seconds, input=input)
        return await execution.result()

    async def detach(
        self,
        code: str,
        *,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        timeout_seconds: float | None = None,
        input: builtins.list[str] | None = None,
    ) -> RunInfo:
        context = await self._running_context()
        request = ExecutionRequest(code=code, env=env or {}, cwd=cwd, timeout_seconds=timeout_seconds)
        execution = context.submit(request, input)
        return await self._handle.detach(execution, context.id)

    async def interrupt(self) -> bool:
        return (await self._running_context()).interrupt()

    async def restart(self) -> None:
        await (await self._running_context()).restart()

    async def checkpoint(self) -> Mark:
        return await (await self._running_context()).checkpoint()

    async def rollback(self, mark: str) -> None:
        await (await self._running_context()).rollback(mark)

    async def fork(self, count: int = 1) -> builtins.list[LocalContext]:
        made = await (await self._running_context()).fork(count)
        return [LocalContext(self._handle, each.id, language=each.language, cwd=each.cwd) for each in made]

    async def checkpoints(self) -> builtins.list[Mark]:
        return (await self._running_context()).marks()

    async def forget(self, mark: str) -> None:
        (await self._running_context()).forget(mark)

    async def variables(self) -> Variables:
        return await (await self._running_context()).variables()

    async def complete(self, code: str, cursor: int | None = None) -> Completions:
        return await (await self._running_context()).complete(code, cursor)

    async def history(self) -> History:
        return read_history(await self._handle.running(), self.id)

    async def notebook(self) -> bytes:
        return await export_notebook(await self._handle.running(), self.id)


class LocalCommands:
    def __init__(self, handle: SandboxHandle):
        self._handle = handle

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
    ) -> SandboxProcess:
        return await (await self._handle.running()).commands.start(
            command,
            user=user,
            env=env,
            cwd=cwd,
            timeout_seconds=timeout_seconds,
            stdin=stdin,
            pty=pty,
            background=background,
        )

    async def run(
        self,
        command: str | Sequence[str],
        *,
        user: User | None = None,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        timeout_seconds: float | None = None,
        stdin: str | bytes | None = None,
    ) -> ProcessResult:
        commands = (await self._handle.running()).commands
        return await commands.run(command, user=user, env=env, cwd=cwd, timeout_seconds=timeout_seconds, stdin=stdin)

    async def list(self) -> builtins.list[ProcessInfo]:
        return await (await self._handle.running()).commands.list()

    async def kill(self, id: str) -> None:
        (await self._handle.running()).commands.kill(id)


# Detached runs of the engine in this process, and of others that share its data directory.


class LocalRuns:
    def __init__(self, engine: Engine):
        self._runs = engine.runs

    async def info(self, id: str) -> RunInfo:
        return await self._runs.info(id, LOCAL_OWNER)

    async def list(self, sandbox: str) -> builtins.list[RunInfo]:
        return await self._runs.list(LOCAL_OWNER, sandbox)

    async def attach(self, id: str, after: int) -> AsyncGenerator[builtins.list[NumberedEvent], None]:
        return _number_events(await self._runs.attach(id, LOCAL_OWNER, after))

    async def result(self, id: str) -> Run:
        return await self._runs.result(id, LOCAL_OWNER)

    async def interrupt(self, id: str) -> bool:
        return await self._runs.interrupt(id, LOCAL_OWNER)

    async def remove(self, id: str) -> None:
        await self._runs.remove(id, LOCAL_OWNER)


async def _number_events(
    followed: AsyncGenerator[list[RunEventLine], None],
) -> AsyncGenerator[list[NumberedEvent], None]:
    async with contextlib.aclosing(followed):
        async for batch in followed:
            yield [NumberedEvent(line.number, line.event) for line in batch]


# The snapshots that the engine in this process has for the library.


class LocalSnapshots:
    def __init__(self, engine: Engine):
        self._engine = engine

    async def list(self, sandbox: str | None = None) -> builtins.list[SnapshotInfo]:
        return [each.info for each in await self._engine.snapshots.list(LOCAL_OWNER, sandbox)]

    async def get(self, ref: str) -> SnapshotInfo:
        return (await self._engine.snapshots.get(ref, LOCAL_OWNER)).info

    async def remove(self, ref: str) -> None:
        await self._engine.snapshots.remove(ref, LOCAL_OWNER)


# The volumes that the engine in this process has for the library.


class LocalVolumes:
    def __init__(self, engine: Engine):
        self._engine = engine

    async def create(self, name: str) -> VolumeInfo:
        return (await self._engine.volumes.create(name, LOCAL_OWNER)).info

    async def list(self) -> builtins.list[VolumeInfo]:
        return [each.info for each in await self._engine.volumes.list(LOCAL_OWNER)]

    async def get(self, ref: str) -> VolumeInfo:
        return (await self._engine.volumes.get(ref, LOCAL_OWNER)).info

    async def remove(self, ref: str) -> None:
        await self._engine.volumes.remove(ref, LOCAL_OWNER)
