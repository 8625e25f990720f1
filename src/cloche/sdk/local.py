"""A sandbox of the engine in this process, as the public classes see it."""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import AsyncGenerator, Sequence

from cloche import errors
from cloche.engine.commands.process import Process, ProcessResult
from cloche.engine.engine import Engine
from cloche.engine.executions.context import Context
from cloche.engine.executions.execution import Execution
from cloche.engine.executions.history import history_of, notebook_of
from cloche.engine.executions.input import InputSource
from cloche.engine.executions.runs import Line
from cloche.engine.sandboxes.create import all_made
from cloche.engine.sandboxes.files import Content, Watch
from cloche.engine.sandboxes.sandbox import DEFAULT_CONTEXT, Sandbox
from cloche.events import Numbered, Run, RunInfo
from cloche.model import (
    FileChange,
    FileInfo,
    Mark,
    ProcessInfo,
    SandboxInfo,
    SnapshotInfo,
    Tool,
    User,
    Variables,
    VolumeInfo,
)
from cloche.network_policy import NetworkPolicy, with_secrets
from cloche.notebook import History
from cloche.sdk import backend
from cloche.sdk.arguments import OWNER
from cloche.sdk.backend import NetworkLog

# Where a sandbox of this process's engine is now.

_LIVE = ("running", "paused")


class Home:
    """A sandbox that was paused may come back in another cell: whoever uses it asks here, each time."""

    def __init__(self, engine: Engine, core: Sandbox):
        self._engine = engine
        self.id = core.id
        self.owner = core.spec.owner
        self.core = core  # as it was when it was last used

    @property
    def ended(self) -> bool:
        """Whether it is known here that it has ended."""
        return self.core.record.state not in _LIVE

    async def awake(self) -> Sandbox:
        """The sandbox, running. Raises Gone, or SandboxPaused where it is paused and may not be woken."""
        self.core = await self._engine.get(self.id, self.owner)
        return self.core

    async def resume(self, timeout_seconds: float | None) -> Sandbox:
        """Raises Gone, Unavailable."""
        self.core = await resumed(self._engine, self.id, self.owner, timeout_seconds)
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


async def resumed(engine: Engine, id: str, owner: str, timeout_seconds: float | None) -> Sandbox:
    """The sandbox of that id, running. Raises SandboxNotFound, Gone, Unavailable."""
    sandbox = await engine.resume(id, owner, seconds=timeout_seconds)
    if timeout_seconds is not None:
        sandbox.renew(timeout_seconds)  # it may have been running
    return sandbox


# The files of a sandbox of the engine in this process, as the public classes see them.


class NearFiles:
    def __init__(self, home: Home):
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

    def watch(self, path: str, *, recursive: bool = False, user: User | None = None) -> NearWatch:
        return NearWatch(self._home, path, recursive=recursive, user=user)


class NearWatch:
    """Begins at `__aenter__`, as the engine's own does."""

    def __init__(self, home: Home, path: str, *, recursive: bool, user: User | None):
        self._home = home
        self._asked = (path, recursive, user)
        self._core: Watch | None = None

    async def __aenter__(self) -> NearWatch:
        path, recursive, user = self._asked
        self._core = (await self._home.awake()).files.watch(path, recursive=recursive, user=user)
        await self._core.__aenter__()
        return self

    def __aiter__(self) -> NearWatch:
        return self

    async def __anext__(self) -> FileChange:
        if self._core is None:
            raise errors.InvalidRequest("a watch sees changes between `with` and its end")
        return await anext(self._core)

    def close(self) -> None:
        if self._core is not None:
            self._core.close()


class NearSandbox:
    def __init__(self, engine: Engine, core: Sandbox):
        self._engine = engine
        self._home = Home(engine, core)
        self.id = core.id
        self.limits = core.limits
        self.files: backend.Files = NearFiles(self._home)
        self.commands: backend.Commands = NearCommands(self._home)
        self.network: backend.Network = NearNetwork(self._home, engine)

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

    async def fork(self, count: int = 1, timeout_seconds: float | None = None) -> list[NearSandbox]:
        made = await self._engine.fork(self.id, self._home.owner, count, seconds=timeout_seconds)
        return [NearSandbox(self._engine, each) for each in await all_made(made)]

    async def history(self) -> History:
        return history_of(await self._home.awake())

    def context(self, id: str | None = None) -> NearContext:
        core = self._home.core
        if core.record.state == "paused":  # it may be running again, elsewhere: its use will tell
            return NearContext(self._home, id or DEFAULT_CONTEXT, cwd=core.spec.cwd)
        return self._near(core.context(id))

    async def find_context(self, id: str) -> NearContext:
        return self._near((await self._home.awake()).context(id))

    async def list_contexts(self) -> list[backend.Context]:
        return [self._near(each) for each in (await self._home.awake()).contexts]

    async def create_context(self, *, language: str = "python", cwd: str | None = None) -> NearContext:
        return self._near(await (await self._home.awake()).create_context(language=language, cwd=cwd))

    def _near(self, core: Context) -> NearContext:
        return NearContext(self._home, core.id, language=core.language, cwd=core.cwd)

    async def remove_context(self, id: str) -> None:
        (await self._home.awake()).remove_context(id)


class NearNetwork:
    def __init__(self, home: Home, engine: Engine):
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
            policy = with_secrets(policy, core.network.policy.secrets)
        await self._engine.networks.replace(core, policy)
        return await self.policy()


class NearContext:
    """Its methods begin with `_awake()`: a sandbox that was paused may have another cell, and other contexts, now."""

    def __init__(self, home: Home, id: str, *, language: str = "python", cwd: str):
        self._home = home
        self.id = id
        self.language = language
        self.cwd = cwd

    async def _awake(self) -> Context:
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
        tools: Sequence[Tool] = (),
    ) -> Execution:
        return (await self._awake()).execute(
            code, env=env, cwd=cwd, timeout_seconds=timeout_seconds, input=input, argv=argv, tools=tools
        )

    async def run(
        self,
        code: str,
        *,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        timeout_seconds: float | None = None,
        input: InputSource = None,
    ) -> Run:
        execution = (await self._awake()).execute(code, env=env, cwd=cwd, timeout_seconds=timeout_seconds, input=input)
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
        context = await self._awake()
        execution = context.execute(code, env=env, cwd=cwd, timeout_seconds=timeout_seconds, input=input)
        return await self._home.detach(execution, context.id)

    async def interrupt(self) -> bool:
        return (await self._awake()).interrupt()

    async def restart(self) -> None:
        await (await self._awake()).restart()

    async def checkpoint(self) -> Mark:
        return await (await self._awake()).checkpoint()

    async def rollback(self, mark: str) -> None:
        await (await self._awake()).rollback(mark)

    async def fork(self, count: int = 1) -> builtins.list[NearContext]:
        made = await (await self._awake()).fork(count)
        return [NearContext(self._home, each.id, language=each.language, cwd=each.cwd) for each in made]

    async def checkpoints(self) -> builtins.list[Mark]:
        return (await self._awake()).marks()

    async def forget(self, mark: str) -> None:
        (await self._awake()).forget(mark)

    async def variables(self) -> Variables:
        return await (await self._awake()).variables()

    async def history(self) -> History:
        return history_of(await self._home.awake(), self.id)

    async def notebook(self) -> bytes:
        return await notebook_of(await self._home.awake(), self.id)


class NearCommands:
    def __init__(self, home: Home):
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
    ) -> Process:
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


class NearRuns:
    def __init__(self, engine: Engine):
        self._runs = engine.runs

    async def info(self, id: str) -> RunInfo:
        return await self._runs.info(id, OWNER)

    async def list(self, sandbox: str) -> builtins.list[RunInfo]:
        return await self._runs.list(OWNER, sandbox)

    async def attach(self, id: str, after: int) -> AsyncGenerator[builtins.list[Numbered], None]:
        return _numbered(await self._runs.attach(id, OWNER, after))

    async def result(self, id: str) -> Run:
        return await self._runs.result(id, OWNER)

    async def interrupt(self, id: str) -> bool:
        return await self._runs.interrupt(id, OWNER)

    async def remove(self, id: str) -> None:
        await self._runs.remove(id, OWNER)


async def _numbered(followed: AsyncGenerator[list[Line], None]) -> AsyncGenerator[list[Numbered], None]:
    async with contextlib.aclosing(followed):
        async for batch in followed:
            yield [Numbered(line.number, line.event) for line in batch]


# The snapshots that the engine in this process has for the library.


class NearSnapshots:
    def __init__(self, engine: Engine):
        self._engine = engine

    async def list(self, sandbox: str | None = None) -> builtins.list[SnapshotInfo]:
        return [each.info for each in await self._engine.snapshots.list(OWNER, sandbox)]

    async def get(self, ref: str) -> SnapshotInfo:
        return (await self._engine.snapshots.get(ref, OWNER)).info

    async def remove(self, ref: str) -> None:
        await self._engine.snapshots.remove(ref, OWNER)


# The volumes that the engine in this process has for the library.


class NearVolumes:
    def __init__(self, engine: Engine):
        self._engine = engine

    async def create(self, name: str) -> VolumeInfo:
        return (await self._engine.volumes.create(name, OWNER)).info

    async def list(self) -> builtins.list[VolumeInfo]:
        return [each.info for each in await self._engine.volumes.list(OWNER)]

    async def get(self, ref: str) -> VolumeInfo:
        return (await self._engine.volumes.get(ref, OWNER)).info

    async def remove(self, ref: str) -> None:
        await self._engine.volumes.remove(ref, OWNER)
