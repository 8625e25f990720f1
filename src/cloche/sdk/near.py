"""A sandbox of the engine in this process, as the public classes see it."""

from __future__ import annotations

import builtins
from collections.abc import Sequence

from cloche.engine.answers import InputSource
from cloche.engine.commands import Commands
from cloche.engine.context import Context
from cloche.engine.execution import Execution
from cloche.engine.networks import Networks
from cloche.engine.process import Process, ProcessResult
from cloche.engine.sandbox import Sandbox
from cloche.events import Run
from cloche.model import ProcessInfo, SandboxInfo, User
from cloche.network_policy import NetworkPolicy, with_secrets
from cloche.sdk import seam
from cloche.sdk.network_log import NetworkLog
from cloche.tools import Tool


class NearSandbox:
    def __init__(self, core: Sandbox, networks: Networks):
        self._core = core
        self.id = core.id
        self.limits = core.limits
        self.files: seam.Files = core.files
        self.commands: seam.Commands = NearCommands(core.commands)
        self.network: seam.Network = NearNetwork(core, networks)

    @property
    def ended(self) -> bool:
        return self._core.record.state != "running"

    def check_running(self) -> None:
        self._core.check_running()

    async def describe(self) -> SandboxInfo:
        return self._core.info

    async def renew(self, seconds: float) -> SandboxInfo:
        return self._core.renew(seconds)

    async def kill(self) -> None:
        await self._core.kill()

    def context(self, id: str | None = None) -> NearContext:
        return NearContext(self._core.context(id))

    async def find_context(self, id: str) -> NearContext:
        return self.context(id)

    async def list_contexts(self) -> list[seam.Context]:
        return [NearContext(each) for each in self._core.contexts]

    async def create_context(self, *, language: str = "python", cwd: str | None = None) -> NearContext:
        return NearContext(await self._core.create_context(language=language, cwd=cwd))

    async def remove_context(self, id: str) -> None:
        self._core.remove_context(id)


class NearNetwork:
    def __init__(self, core: Sandbox, networks: Networks):
        self._core = core
        self._networks = networks

    async def policy(self) -> NetworkPolicy:
        return self._core.network.policy.redacted()

    async def log(self) -> NetworkLog:
        return NetworkLog(self._core.network.log, self._core.network.dropped)

    async def set(self, policy: NetworkPolicy, *, keep_secrets: bool) -> NetworkPolicy:
        if keep_secrets:
            policy = with_secrets(policy, self._core.network.policy.secrets)
        await self._networks.replace(self._core, policy)
        return await self.policy()


class NearContext:
    def __init__(self, core: Context):
        self._core = core
        self.id = core.id
        self.language = core.language
        self.cwd = core.cwd

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
        return self._core.execute(
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
        execution = self._core.execute(code, env=env, cwd=cwd, timeout_seconds=timeout_seconds, input=input)
        return await execution.result()

    async def interrupt(self) -> bool:
        return self._core.interrupt()

    async def restart(self) -> None:
        await self._core.restart()


class NearCommands:
    def __init__(self, core: Commands):
        self._core = core

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
        return await self._core.start(
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
        return await self._core.run(command, user=user, env=env, cwd=cwd, timeout_seconds=timeout_seconds, stdin=stdin)

    async def list(self) -> builtins.list[ProcessInfo]:
        return await self._core.list()

    async def kill(self, id: str) -> None:
        self._core.kill(id)
