"""A sandbox on a server, as the public classes see it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from urllib.parse import quote

import msgspec

from cloche import errors
from cloche.model import SandboxInfo, SandboxSpec, check_seconds
from cloche.protocol import asks, networks, told
from cloche.sdk import seam
from cloche.sdk.remote_commands import RemoteCommands
from cloche.sdk.remote_execution import RemoteContext
from cloche.sdk.remote_files import RemoteFiles
from cloche.sdk.remote_network import RemoteNetwork
from cloche.sdk.remote_server import Server

DEFAULT_CONTEXT = told.ContextInfo(id="default", language="python", cwd="/mnt/data")


async def create(server: Server, spec: SandboxSpec) -> RemoteSandbox:
    """Raises as `Engine.create` does."""
    limits = None if spec.limits is None else asks.LimitsAsked(**msgspec.structs.asdict(spec.limits))
    asked = asks.CreateSandbox(
        template=spec.template,
        env=spec.env,
        metadata=spec.metadata,
        limits=limits,
        timeout_seconds=spec.lifetime_seconds,
        network=None if spec.network is None else networks.asked_of(spec.network),
        secrets=[] if spec.network is None else networks.secrets_asked(spec.network),
    )
    return await create_as(server, asked)


async def create_as(server: Server, asked: asks.CreateSandbox) -> RemoteSandbox:
    """Raises as `Engine.create` does."""
    return RemoteSandbox(server, await server.ask("POST", "/sandboxes", SandboxInfo, body=asked))


async def connect(server: Server, id: str) -> RemoteSandbox:
    """Raises SandboxNotFound, SandboxExpired, SandboxKilled or SandboxLost."""
    if not isinstance(id, str) or not id:
        raise errors.SandboxNotFound(f"there is no sandbox {id!r}")
    info = await server.ask("GET", f"/sandboxes/{quote(id, safe='')}", SandboxInfo, query={"running": True})
    return RemoteSandbox(server, info)


class RemoteSandbox:
    def __init__(self, server: Server, info: SandboxInfo):
        self._server = server
        self._path = f"/sandboxes/{quote(info.id, safe='')}"
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
        body = asks.Renew(seconds=seconds)
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

    def context(self, id: str | None = None) -> RemoteContext:
        info = msgspec.structs.replace(DEFAULT_CONTEXT, id=id or DEFAULT_CONTEXT.id)
        return RemoteContext(self._server, self.id, info)

    async def find_context(self, id: str) -> RemoteContext:
        info = await self._server.ask("GET", f"{self._path}/contexts/{quote(id, safe='')}", told.ContextInfo)
        return RemoteContext(self._server, self.id, info)

    async def list_contexts(self) -> list[seam.Context]:
        found = await self._server.ask("GET", f"{self._path}/contexts", list[told.ContextInfo])
        return [RemoteContext(self._server, self.id, each) for each in found]

    async def create_context(self, *, language: str = "python", cwd: str | None = None) -> RemoteContext:
        body = asks.CreateContext(language=language, cwd=cwd)
        info = await self._server.ask("POST", f"{self._path}/contexts", told.ContextInfo, body=body)
        return RemoteContext(self._server, self.id, info)

    async def remove_context(self, id: str) -> None:
        await self._server.ask("DELETE", f"{self._path}/contexts/{quote(id, safe='')}")
