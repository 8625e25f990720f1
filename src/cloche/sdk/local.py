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
from cloche.engine.sandboxes.sandbox import DEFAULT_CONTEXT, Sandbox
from cloche.events import NumberedEvent, ProcessResult, Run, RunInfo
from cloche.file_content import Content
from cloche.input_answers import InputSource
from cloche.model import (
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

# The current engine sandbox behind an id: a paused one may have moved to another cell.

_LIVE_STATES = ("running", "paused")


class SandboxHandle:
    """The handle of one sandbox id. Every use asks the engine anew: a paused sandbox may return in another
    cell.
    """

    def __init__(self, engine: Engine, core: Sandbox):
        self._engine = engine
        self.id = core.id
        self.owner = core.spec.owner
        self.core = core  # as it was when it was last used

    @property
    def ended(self) -> bool:
        """Whether it is known here that it has ended."""
        return self.core.record.state not in _LIVE_STATES

    async def awake(self) -> Sandbox:
        """The sandbox, running. Raises Gone, or SandboxPaused where it is paused and may not be woken."""
        self.core = await self._engine.get(self.id, self.owner)
        return self.core

    async def resume(self, timeout_seconds: float | None) -> Sandbox:
        """Raises Gone, Unavailable."""
        self.core = await resume_sandbox(self._engine, self.id, self.owner, timeout_seconds)
        return self.core

    async def detach(self, execution: Execution, context: str) -> RunInfo:
        """Raises as `Runs.start` does."""
        return await self._engine.runs.start(self.core, context, execution)

    async def kill(self) -> None:
        """Harmless when it has ended."""
        if self.core.record.state == "running":
            await self.core.kill()
            return
        with contextlib.suppress(errors.Gone):
            await self._engine.kill(self.id, self.owner)


async def resume_sandbox(engine: Engine, id: str, owner: str, timeout_seconds: float | None) -> Sandbox:
    """The sandbox of that id, running. Raises SandboxNotFound, Gone, Unavailable."""
    sandbox = await engine.resume(id, owner, seconds=timeout_seconds)
    if timeout_seconds is not None:
        sandbox.renew(timeout_seconds)  # it may have been running
    return sandbox


# The files of a sandbox of the engine in this process.


class LocalFiles:
    def __init__(self, home: SandboxHandle):
        self._home = home

    async def read(self, path: str, *, user: User | None = None) -> bytes:
        return await (await self._home.awake()).files.read(path, user=user)

    async def open_read(self, path: str, *, user: User | None = None) -> AsyncGenerator[bytes, None]:
        return await (await self._home.awake()).files.open_read(path, user=user)

    async def write(
        self, path: str, content: Content, *, user: User | None = None, mode: int | None = None
    ) -> FileInfo:
        return await (await self._home.awake()).files.write(path, content, user=user, mode=mode)

    async def list(self, path: str = ".", *, depth: int = 1, user: User | None = None) -> builtins.list[FileInfo]:
        return await (await self._home.awake()).files.list(path, depth=depth, user=user)

    async def stat(self, path: str, *, user: User | None = None) -> FileInfo:
        return await (await self._home.awake()).files.stat(path, user=user)

    async def exists(self, path: str, *, user: User | None = None) -> bool:
        return await (await self._home.awake()).files.exists(path, user=user)

    async def make_dir(self, path: str, *, user: User | None = None) -> bool:
        return await (await self._home.awake()).files.make_dir(path, user=user)

    async def move(self, path: str, to: str, *, user: User | None = None) -> FileInfo:
        return await (await self._home.awake()).files.move(path, to, user=user)

    async def remove(self, path: str, *, user: User | None = None) -> None:
        await (await self._home.awake()).files.remove(path, user=user)

    def watch(self, path: str, *, recursive: bool = False, user: User | None = None) -> LocalWatch:
        return LocalWatch(self._home, path, recursive=recursive, user=user)


class LocalWatch:
    """Begins at `__aenter__`, as the engine's own does."""

    def __init__(self, home: SandboxHandle, path: str, *, recursive: bool, user: User | None):
        self._home = home
        self._asked = (path, recursive, user)
        self._core: DirectoryWatch | None = None

    async def __aenter__(self) -> LocalWatch:
        path, recursive, user = self._asked
        self._core = (await self._home.awake()).files.watch(path, recursive=recursive, user=user)
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
    def __init__(self, engine: Engine, core: Sandbox):
        self._engine = engine
        self._home = SandboxHandle(engine, core)
        self.id = core.id
        self.limits = core.limits
        self.files: backend.BackendFiles = LocalFiles(self._home)
        self.commands: backend.BackendCommands = LocalCommands(self._home)
        self.network: backend.BackendNetwork = LocalNetwork(self._home, engine)

    @property
    def ended(self) -> bool:
        return self._home.ended

    def check_running(self) -> None:
        if self._home.ended:  # one that is paused may be woken by its use
            self._home.core.check_running()

    async def describe(self) -> SandboxInfo:
        return await self._engine.describe(self.id, self._home.owner)

    async def renew(self, seconds: float) -> SandboxInfo:
        return (await self._home.awake()).renew(seconds)

    async def kill(self) -> None:
        await self._home.kill()

    async def pause(self, *, memory: bool = True) -> SandboxInfo:
        return await self._engine.pause(self.id, self._home.owner, memory=memory)

    async def resume(self, timeout_seconds: float | None = None) -> SandboxInfo:
        return (await self._home.resume(timeout_seconds)).info

    async def snapshot(self, name: str | None = None) -> SnapshotInfo:
        return (await self._engine.snapshot(self.id, self._home.owner, name=name)).info

    async def fork(self, count: int = 1, timeout_seconds: float | None = None) -> list[LocalSandbox]:
        made = await self._engine.fork(self.id, self._home.owner, count, seconds=timeout_seconds)
        return [LocalSandbox(self._engine, each) for each in await require_all_forks(made)]

    async def history(self) -> History:
        return read_history(await self._home.awake())

    def context(self, id: str | None = None) -> LocalContext:
        core = self._home.core
        if core.record.state == "paused":  # it may be running again, elsewhere: its use will tell
            return LocalContext(self._home, id or DEFAULT_CONTEXT, cwd=core.spec.cwd)
        return self._local_context(core.context(id))

    async def find_context(self, id: str) -> LocalContext:
        return self._local_context((await self._home.awake()).context(id))

    async def list_contexts(self) -> list[backend.BackendContext]:
        return [self._local_context(each) for each in (await self._home.awake()).contexts]

    async def create_context(self, *, language: str = "python", cwd: str | None = None) -> LocalContext:
        return self._local_context(await (await self._home.awake()).create_context(language=language, cwd=cwd))

    def _local_context(self, core: Context) -> LocalContext:
        return LocalContext(self._home, core.id, language=core.language, cwd=core.cwd)

    async def remove_context(self, id: str) -> None:
        (await self._home.awake()).remove_context(id)


class LocalNetwork:
    def __init__(self, home: SandboxHandle, engine: Engine):
        self._home = home
        self._engine = engine

    async def policy(self) -> NetworkPolicy:
        return (await self._home.awake()).network.policy.redacted()

    async def log(self) -> NetworkLog:
        network = (await self._home.awake()).network
        return NetworkLog(network.log, network.dropped)

    async def set(self, policy: NetworkPolicy, *, keep_secrets: bool) -> NetworkPolicy:
        core = await self._home.awake()
        if keep_secrets:
            policy = with_usable_secrets(policy, core.network.policy.secrets)
        await self._engine.networks.replace(core, policy)
        return await self.policy()


class LocalContext:
    """Its methods begin with `_awake()`: a sandbox that was paused may have another cell, and other contexts, now."""

    def __init__(self, home: SandboxHandle, id: str, *, language: str = "python", cwd: str):
        self._home = home
        self.id = id
        self.language = language
        self.cwd = cwd

    async def _running_context(self) -> Context:
        """Raises ContextNotFound, Gone or SandboxPaused."""
        return (await self._home.awake()).context(self.id)

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
        return await self._home.detach(execution, context.id)

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
        return [LocalContext(self._home, each.id, language=each.language, cwd=each.cwd) for each in made]

    async def checkpoints(self) -> builtins.list[Mark]:
        return (await self._running_context()).marks()

    async def forget(self, mark: str) -> None:
        (await self._running_context()).forget(mark)

    async def variables(self) -> Variables:
        return await (await self._running_context()).variables()

    async def history(self) -> History:
        return read_history(await self._home.awake(), self.id)

    async def notebook(self) -> bytes:
        return await export_notebook(await self._home.awake(), self.id)


class LocalCommands:
    def __init__(self, home: SandboxHandle):
        self._home = home

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
        return await (await self._home.awake()).commands.start(
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
        commands = (await self._home.awake()).commands
        return await commands.run(command, user=user, env=env, cwd=cwd, timeout_seconds=timeout_seconds, stdin=stdin)

    async def list(self) -> builtins.list[ProcessInfo]:
        return await (await self._home.awake()).commands.list()

    async def kill(self, id: str) -> None:
        (await self._home.awake()).commands.kill(id)


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
