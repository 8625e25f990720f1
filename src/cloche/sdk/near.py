"""A sandbox of the engine in this process, as the public classes see it."""

from __future__ import annotations

import builtins
from collections.abc import Sequence

from cloche.engine.commands.process import Process, ProcessResult
from cloche.engine.engine import Engine
from cloche.engine.executions.context import Context
from cloche.engine.executions.execution import Execution
from cloche.engine.executions.history import history_of, notebook_of
from cloche.engine.executions.input import InputSource
from cloche.engine.sandboxes.create import all_made
from cloche.engine.sandboxes.sandbox import DEFAULT_CONTEXT, Sandbox
from cloche.events import Run, RunInfo
from cloche.model import Mark, ProcessInfo, SandboxInfo, SnapshotInfo, Tool, User, Variables
from cloche.network_policy import NetworkPolicy, with_secrets
from cloche.notebook import History
from cloche.sdk import seam
from cloche.sdk.near_files import NearFiles
from cloche.sdk.near_home import Home
from cloche.sdk.network_log import NetworkLog


class NearSandbox:
    def __init__(self, engine: Engine, core: Sandbox):
        self._engine = engine
        self._home = Home(engine, core)
        self.id = core.id
        self.limits = core.limits
        self.files: seam.Files = NearFiles(self._home)
        self.commands: seam.Commands = NearCommands(self._home)
        self.network: seam.Network = NearNetwork(self._home, engine)

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

    async def list_contexts(self) -> list[seam.Context]:
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
