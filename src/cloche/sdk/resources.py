"""The list of snapshots: list, get, remove. `Sandbox.snapshot` makes them."""

from __future__ import annotations

import asyncio
import builtins

from cloche.model import SnapshotInfo, VolumeInfo
from cloche.sdk.arguments import SnapshotLike, VolumeLike, snapshot_ref, volume_ref
from cloche.sdk.backend import Transport, transport_to


class Snapshots:
    """The caller's snapshots on a server, or on this machine. `cloche.snapshots` is this without arguments."""

    def __init__(self, *, url: str | None = None, api_key: str | None = None):
        self._server = (url, api_key)

    def list(self, sandbox: str | None = None) -> builtins.list[SnapshotInfo]:
        """The newest first; with the id of a sandbox, only those made of it."""
        transport = transport_to(*self._server)
        return transport.call(lambda: transport.snapshots.list(sandbox))

    def get(self, ref: SnapshotLike) -> SnapshotInfo:
        """By its id or name. Raises SnapshotNotFound."""
        transport, id = transport_to(*self._server), snapshot_ref(ref)
        return transport.call(lambda: transport.snapshots.get(id))

    def remove(self, ref: SnapshotLike) -> None:
        """Sandboxes that were made from it stay. Raises SnapshotNotFound."""
        transport, id = transport_to(*self._server), snapshot_ref(ref)
        transport.call(lambda: transport.snapshots.remove(id))


class AsyncSnapshots:
    """The same with `await`."""

    def __init__(self, *, url: str | None = None, api_key: str | None = None):
        self._server = (url, api_key)

    async def list(self, sandbox: str | None = None) -> builtins.list[SnapshotInfo]:
        """The newest first; with the id of a sandbox, only those made of it."""
        transport = await self._open_transport()
        return await transport.acall(lambda: transport.snapshots.list(sandbox))

    async def get(self, ref: SnapshotLike) -> SnapshotInfo:
        """By its id or name. Raises SnapshotNotFound."""
        transport, id = await self._open_transport(), snapshot_ref(ref)
        return await transport.acall(lambda: transport.snapshots.get(id))

    async def remove(self, ref: SnapshotLike) -> None:
        """Sandboxes that were made from it stay. Raises SnapshotNotFound."""
        transport, id = await self._open_transport(), snapshot_ref(ref)
        await transport.acall(lambda: transport.snapshots.remove(id))

    async def _open_transport(self) -> Transport:
        return await asyncio.to_thread(transport_to, *self._server)


snapshots = Snapshots()


# Named volumes: create, list, get, remove. `Sandbox(volumes={"/mnt/NAME": volume})` mounts them.


class Volumes:
    """The caller's volumes on a server, or on this machine. `cloche.volumes` is this without arguments."""

    def __init__(self, *, url: str | None = None, api_key: str | None = None):
        self._server = (url, api_key)

    def create(self, name: str) -> VolumeInfo:
        """Raises VolumeConflict where there is one of that name, InvalidRequest."""
        transport, wanted = transport_to(*self._server), volume_ref(name)
        return transport.call(lambda: transport.volumes.create(wanted))

    def list(self) -> builtins.list[VolumeInfo]:
        """The oldest first."""
        transport = transport_to(*self._server)
        return transport.call(lambda: transport.volumes.list())

    def get(self, ref: VolumeLike) -> VolumeInfo:
        """By its id or name. Raises VolumeNotFound."""
        transport, id = transport_to(*self._server), volume_ref(ref)
        return transport.call(lambda: transport.volumes.get(id))

    def remove(self, ref: VolumeLike) -> None:
        """With all its files. Raises VolumeConflict while a sandbox has it, VolumeNotFound."""
        transport, id = transport_to(*self._server), volume_ref(ref)
        transport.call(lambda: transport.volumes.remove(id))


class AsyncVolumes:
    """The same with `await`."""

    def __init__(self, *, url: str | None = None, api_key: str | None = None):
        self._server = (url, api_key)

    async def create(self, name: str) -> VolumeInfo:
        """Raises VolumeConflict where there is one of that name, InvalidRequest."""
        transport, wanted = await self._open_transport(), volume_ref(name)
        return await transport.acall(lambda: transport.volumes.create(wanted))

    async def list(self) -> builtins.list[VolumeInfo]:
        """The oldest first."""
        transport = await self._open_transport()
        return await transport.acall(lambda: transport.volumes.list())

    async def get(self, ref: VolumeLike) -> VolumeInfo:
        """By its id or name. Raises VolumeNotFound."""
        transport, id = await self._open_transport(), volume_ref(ref)
        return await transport.acall(lambda: transport.volumes.get(id))

    async def remove(self, ref: VolumeLike) -> None:
        """With all its files. Raises VolumeConflict while a sandbox has it, VolumeNotFound."""
        transport, id = await self._open_transport(), volume_ref(ref)
        await transport.acall(lambda: transport.volumes.remove(id))

    async def _open_transport(self) -> Transport:
        return await asyncio.to_thread(transport_to, *self._server)


volumes = Volumes()
