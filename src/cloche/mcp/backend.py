"""Where the sandboxes of MCP's clients are: in this process, or on a server."""

from __future__ import annotations

import builtins
import contextlib
from typing import Protocol

from cloche import errors
from cloche.engine.engine import Engine
from cloche.model import SandboxSpec, SnapshotInfo
from cloche.sdk import backend, remote_sandbox
from cloche.sdk.local import NearSandbox, resumed
from cloche.sdk.remote_sandbox import RemoteSnapshots
from cloche.sdk.remote_server import Server

SESSION_ENDED = "its MCP session ended"


class Place(Protocol):
    """What is made here belongs to whoever the place is for; nobody else's is found."""

    async def create(self, template: str) -> backend.Sandbox:
        """A new sandbox of a template or snapshot. Raises as `Engine.create` does."""

    async def find(self, id: str) -> backend.Sandbox:
        """One that runs already; one that is paused is resumed. Raises SandboxNotFound, Gone."""

    async def fork(self, box: backend.Sandbox) -> backend.Sandbox:
        """A new one with its files. Raises as `Engine.fork` does."""

    async def end(self, box: backend.Sandbox) -> None:
        """Harmless when it has ended."""

    @property
    def snapshots(self) -> backend.Snapshots: ...


class NearPlace:
    """An engine of this process. `spec` is what every new sandbox is like, but for its template."""

    def __init__(self, engine: Engine, spec: SandboxSpec):
        self._engine = engine
        self._spec = spec
        self.snapshots: backend.Snapshots = OwnSnapshots(engine, spec.owner)

    async def create(self, template: str) -> backend.Sandbox:
        return NearSandbox(self._engine, await self._engine.create(of_template(self._spec, template)))

    async def find(self, id: str) -> backend.Sandbox:
        return NearSandbox(self._engine, await resumed(self._engine, id, self._spec.owner, None))

    async def fork(self, box: backend.Sandbox) -> backend.Sandbox:
        return (await box.fork(1, self._spec.lifetime_seconds))[0]

    async def end(self, box: backend.Sandbox) -> None:
        with contextlib.suppress(errors.Gone, errors.NotFound):
            await self._engine.kill(box.id, self._spec.owner, SESSION_ENDED)


class OwnSnapshots:
    """Those of one owner, in the engine of this process."""

    def __init__(self, engine: Engine, owner: str):
        self._engine = engine
        self._owner = owner

    async def list(self, sandbox: str | None = None) -> builtins.list[SnapshotInfo]:
        return [each.info for each in await self._engine.snapshots.list(self._owner, sandbox)]

    async def get(self, ref: str) -> SnapshotInfo:
        return (await self._engine.snapshots.get(ref, self._owner)).info

    async def remove(self, ref: str) -> None:
        found = await self._engine.snapshots.get(ref, self._owner)
        await self._engine.snapshots.remove(found.id, found.owner)


class RemotePlace:
    """A server. What is made there ends when this process does, however it ends: the server sees its connection go."""

    def __init__(self, server: Server, spec: SandboxSpec):
        self._server = server
        self._spec = spec
        self._holds: dict[str, contextlib.AsyncExitStack] = {}
        self.snapshots: backend.Snapshots = RemoteSnapshots(server)

    async def create(self, template: str) -> backend.Sandbox:
        return await self._held(await remote_sandbox.create(self._server, of_template(self._spec, template)))

    async def find(self, id: str) -> backend.Sandbox:
        return await remote_sandbox.connect(self._server, id)

    async def fork(self, box: backend.Sandbox) -> backend.Sandbox:
        forked = (await box.fork(1, self._spec.lifetime_seconds))[0]
        assert isinstance(forked, remote_sandbox.RemoteSandbox)
        return await self._held(forked)

    async def _held(self, box: remote_sandbox.RemoteSandbox) -> backend.Sandbox:
        stack = contextlib.AsyncExitStack()
        try:
            await stack.enter_async_context(box.held())
        except BaseException:
            with contextlib.suppress(errors.ClocheError):
                await box.kill()
            raise
        self._holds[box.id] = stack
        return box

    async def end(self, box: backend.Sandbox) -> None:
        try:
            await box.kill()
        finally:
            held = self._holds.pop(box.id, None)
            if held is not None:
                with contextlib.suppress(errors.ClocheError):
                    await held.aclose()


def of_template(spec: SandboxSpec, template: str) -> SandboxSpec:
    """Raises TemplateNotFound for what is no name."""
    import msgspec

    return msgspec.structs.replace(spec, template=template)
