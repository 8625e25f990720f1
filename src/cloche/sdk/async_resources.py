"""Snapshots, which `AsyncSandbox.snapshot` makes, and named volumes: list, get, remove."""

from __future__ import annotations

import builtins

from cloche.model import SnapshotInfo, VolumeInfo
from cloche.sdk.arguments import SnapshotLike, VolumeLike, snapshot_ref, volume_ref
from cloche.sdk.backend import open_transport


class AsyncSnapshots:
    """The caller's snapshots on a server, or on this machine."""

    def __init__(self, *, url: str | None = None, api_key: str | None = None):
        self._server = (url, api_key)

    async def list(self, sandbox: str | None = None) -> builtins.list[SnapshotInfo]:
        """The newest first; with the id of a sandbox, only those made of it."""
        transport = await open_transport(*self._server)
        return await transport.acall(lambda: transport.snapshots.list(sandbox))

    async def get(self, ref: SnapshotLike) -> SnapshotInfo:
        """By its id or name. Raises SnapshotNotFound."""
        transport, id = await open_transport(*self._server), snapshot_ref(ref)
        return await transport.acall(lambda: transport.snapshots.get(id))

    async def remove(self, ref: SnapshotLike) -> None:
        """Sandboxes that were made from it stay. Raises SnapshotNotFound."""
        transport, id = await open_transport(*self._server), snapshot_ref(ref)
        await transport.acall(lambda: transport.snapshots.remove(id))


# blocking: snapshots = Snapshots()


class AsyncVolumes:
    """The caller's volumes on a server, or on this machine."""

    def __init__(self, *, url: str | None = None, api_key: str | None = None):
        self._server = (url, api_key)

    async def create(self, name: str) -> VolumeInfo:
        """Raises VolumeConflict where there is one of that name, InvalidRequest."""
        transport, wanted = await open_transport(*self._server), volume_ref(name)
        return await transport.acall(lambda: transport.volumes.create(wanted))

    async def list(self) -> builtins.list[VolumeInfo]:
        """The oldest first."""
        transport = await open_transport(*self._server)
        return await transport.acall(lambda: transport.volumes.list())

    async def get(self, ref: VolumeLike) -> VolumeInfo:
        """By its id or name. Raises VolumeNotFound."""
        transport, id = await open_transport(*self._server), volume_ref(ref)
        return await transport.acall(lambda: transport.volumes.get(id))

    async def remove(self, ref: VolumeLike) -> None:
        """With all its files. Raises VolumeConflict while a sandbox has it, VolumeNotFound."""
        transport, id = await open_transport(*self._server), volume_ref(ref)
        await transport.acall(lambda: transport.volumes.remove(id))


# blocking: volumes = Volumes()
