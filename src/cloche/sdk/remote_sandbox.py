"""A sandbox on a server, as the public classes see it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from urllib.parse import quote

import msgspec

from cloche import errors
from cloche.model import SandboxInfo, SandboxSpec, SnapshotInfo, check_seconds
from cloche.notebook import History
from cloche.protocol import requests, responses
from cloche.sdk import seam
from cloche.sdk.remote_commands import RemoteCommands
from cloche.sdk.remote_execution import RemoteContext, history_of
from cloche.sdk.remote_files import RemoteFiles
from cloche.sdk.remote_network import RemoteNetwork
from cloche.sdk.remote_server import Server

DEFAULT_CONTEXT = responses.ContextInfo(id="default", language="python", cwd="/mnt/data")


async def create(server: Server, spec: SandboxSpec) -> RemoteSandbox:
    """Raises as `Engine.create` does."""
    limits = None if spec.limits is None else requests.LimitsAsked(**msgspec.structs.asdict(spec.limits))
    asked = requests.CreateSandbox(
        template=spec.template,
        env=spec.env,
        metadata=spec.metadata,
        limits=limits,
        timeout_seconds=spec.lifetime_seconds,
        network=None if spec.network is None else requests.asked_of(spec.network),
        secrets=[] if spec.network is None else requests.secrets_asked(spec.network),
        on_timeout=spec.on_deadline,
        pause_memory=spec.pause_memory,
        auto_resume=spec.auto_resume,
        volumes=spec.volumes,
    )
    return await create_as(server, asked)


async def create_as(server: Server, asked: requests.CreateSandbox) -> RemoteSandbox:
    """Raises as `Engine.create` does."""
    return RemoteSandbox(server, await server.ask("POST", "/sandboxes", SandboxInfo, body=asked))


async def connect(server: Server, id: str, timeout_seconds: float | None = None) -> RemoteSandbox:
    """Resumes it, where it is paused. Raises SandboxNotFound, SandboxExpired, SandboxKilled or SandboxLost."""
    if not isinstance(id, str) or not id or "/" in id:
        raise errors.SandboxNotFound(f"there is no sandbox {id!r}")
    check_seconds("timeout", timeout_seconds)
    body = requests.Resume(timeout_seconds=timeout_seconds)
    return RemoteSandbox(server, await server.ask("POST", f"{_path(id)}/resume", SandboxInfo, body=body))


class RemoteSandbox:
    def __init__(self, server: Server, info: SandboxInfo):
        self._server = server
        self._path = _path(info.id)
        self.id = info.id
        self.limits = info.limits
        self.ended = False
        self.files: seam.Files = RemoteFiles(server, info.id)
        self.commands: seam.Commands = RemoteCommands(server, info.id)
        self.network: seam.Network = RemoteNetwork(server, info.id)

    def check_running(self) -> None:
        """The server says so itself, and why."""

    async def describe(self) -> SandboxInfo:
        info: SandboxInfo = await self._server.ask("GET", self._path, SandboxInfo)
        return info

    async def renew(self, seconds: float) -> SandboxInfo:
        check_seconds("lifetime", seconds)
        if seconds is None:
            raise errors.InvalidRequest("renew needs a number of seconds")
        body = requests.Renew(seconds=seconds)
        info: SandboxInfo = await self._server.ask("POST", f"{self._path}/renew", SandboxInfo, body=body)
        return info

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """While it lasts the sandbox lives; then it ends, also where this process is killed."""
        async with self._server.streaming(f"{self._path}/hold", {}) as told_:
            await anext(told_)
            yield

    async def kill(self) -> None:
        try:
            await self._server.ask("DELETE", self._path)
        except errors.Gone:
            pass
        self.ended = True

    async def pause(self, *, memory: bool = True) -> SandboxInfo:
        body = requests.Pause(memory=memory)
        info: SandboxInfo = await self._server.ask("POST", f"{self._path}/pause", SandboxInfo, body=body)
        return info

    async def resume(self, timeout_seconds: float | None = None) -> SandboxInfo:
        body = requests.Resume(timeout_seconds=timeout_seconds)
        info: SandboxInfo = await self._server.ask("POST", f"{self._path}/resume", SandboxInfo, body=body)
        return info

    async def snapshot(self, name: str | None = None) -> SnapshotInfo:
        body = requests.MakeSnapshot(name=name)
        info: SnapshotInfo = await self._server.ask("POST", f"{self._path}/snapshots", SnapshotInfo, body=body)
        return info

    async def fork(self, count: int = 1, timeout_seconds: float | None = None) -> list[RemoteSandbox]:
        body = requests.Fork(count=count, timeout_seconds=timeout_seconds)
        made = await self._server.ask("POST", f"{self._path}/fork", list[SandboxInfo], body=body)
        return [RemoteSandbox(self._server, each) for each in made]

    async def history(self) -> History:
        return await history_of(self._server, self.id)

    def context(self, id: str | None = None) -> RemoteContext:
        info = msgspec.structs.replace(DEFAULT_CONTEXT, id=id or DEFAULT_CONTEXT.id)
        return RemoteContext(self._server, self.id, info)

    async def find_context(self, id: str) -> RemoteContext:
        info = await self._server.ask("GET", f"{self._path}/contexts/{quote(id, safe='')}", responses.ContextInfo)
        return RemoteContext(self._server, self.id, info)

    async def list_contexts(self) -> list[seam.Context]:
        found = await self._server.ask("GET", f"{self._path}/contexts", list[responses.ContextInfo])
        return [RemoteContext(self._server, self.id, each) for each in found]

    async def create_context(self, *, language: str = "python", cwd: str | None = None) -> RemoteContext:
        body = requests.CreateContext(language=language, cwd=cwd)
        info = await self._server.ask("POST", f"{self._path}/contexts", responses.ContextInfo, body=body)
        return RemoteContext(self._server, self.id, info)

    async def remove_context(self, id: str) -> None:
        await self._server.ask("DELETE", f"{self._path}/contexts/{quote(id, safe='')}")


def _path(id: str) -> str:
    return f"/sandboxes/{quote(id, safe='')}"
