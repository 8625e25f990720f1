"""Backends for the sandboxes of MCP's clients: in this process, or on a server."""

from __future__ import annotations

import builtins
import contextlib
from typing import Protocol

from cloche import errors
from cloche.engine.engine import Engine
from cloche.model import SandboxSpec, SnapshotInfo
from cloche.sdk import backend, remote_sandbox
from cloche.sdk.local import LocalSandbox, resume_for
from cloche.sdk.remote_sandbox import RemoteSnapshots
from cloche.sdk.remote_server import ServerClient

SESSION_ENDED_REASON = "its MCP session ended"


class SandboxBackend(Protocol):
    """Creates and finds sandboxes of one owner; other owners' sandboxes are not found."""

    async def create(self, template: str) -> backend.BackendSandbox:
        """A new sandbox of a template or snapshot. Raises as `Engine.create` does."""

    async def find(self, id: str) -> backend.BackendSandbox:
        """One that runs already; one that is paused is resumed. Raises SandboxNotFound, Gone."""

    async def fork(self, box: backend.BackendSandbox) -> backend.BackendSandbox:
        """A new one with its files. Raises as `Engine.fork` does."""

    async def end(self, box: backend.BackendSandbox) -> None:
        """Harmless when it has ended."""

    @property
    def snapshots(self) -> backend.BackendSnapshots: ...


class LocalSandboxBackend:
    """The engine of this process. `spec` has the settings of every new sandbox, except its template."""

    def __init__(self, engine: Engine, spec: SandboxSpec):
        self._engine = engine
        self._spec = spec
        self.snapshots: backend.BackendSnapshots = OwnerSnapshots(engine, spec.owner)

    async def create(self, template: str) -> backend.BackendSandbox:
        return LocalSandbox(self._engine, await self._engine.create(with_template(self._spec, template)))

    async def find(self, id: str) -> backend.BackendSandbox:
        return LocalSandbox(self._engine, await resume_for(await self._engine.handle(id, self._spec.owner), None))

    async def fork(self, box: backend.BackendSandbox) -> backend.BackendSandbox:
        return (await box.fork(1, self._spec.lifetime_seconds))[0]

    async def end(self, box: backend.BackendSandbox) -> None:
        with contextlib.suppress(errors.Gone, errors.NotFound):
            await self._engine.kill(box.id, self._spec.owner, SESSION_ENDED_REASON)


class OwnerSnapshots:
    """The snapshots of one owner, in the engine of this process."""

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


class RemoteSandboxBackend:
    """A server. Its sandboxes end with this process, even if it crashes: the server sees its connection close."""

    def __init__(self, server: ServerClient, spec: SandboxSpec):
        self._server = server
        self._spec = spec
        self._holds: dict[str, contextlib.AsyncExitStack] = {}
        self.snapshots: backend.BackendSnapshots = RemoteSnapshots(server)

    async def create(self, template: str) -> backend.BackendSandbox:
        return await self._hold_sandbox(
            await remote_sandbox.create_sandbox(self._server, with_template(self._spec, template))
        )

    async def find(self, id: str) -> backend.BackendSandbox:
        return await remote_sandbox.connect_sandbox(self._server, id)

    async def fork(self, box: backend.BackendSandbox) -> backend.BackendSandbox:
        forked = (await box.fork(1, self._spec.lifetime_seconds))[0]
        assert isinstance(forked, remote_sandbox.RemoteSandbox)
        return await self._hold_sandbox(forked)

    async def _hold_sandbox(self, box: remote_sandbox.RemoteSandbox) -> backend.BackendSandbox:
        stack = contextlib.AsyncExitStack()
        try:
            await stack.enter_async_context(box.held())
        except BaseException:
            with contextlib.suppress(errors.ClocheError):
                await box.kill()
            raise
        self._holds[box.id] = stack
        return box

    async def end(self, box: backend.BackendSandbox) -> None:
        try:
            await box.kill()
        finally:
            held = self._holds.pop(box.id, None)
            if held is not None:
                with contextlib.suppress(errors.ClocheError):
                    await held.aclose()


def with_template(spec: SandboxSpec, template: str) -> SandboxSpec:
    """The spec with that template. Raises TemplateNotFound for an invalid name."""
    import msgspec

    return msgspec.structs.replace(spec, template=template)
