"""Named volumes: directories that several sandboxes of one owner share, and that outlast them.

While one is in use, its files are in memory, in a tmpfs of its own. A cell without client programs has it
mounted as well: it reads and writes its files for callers, and makes the images that outlast the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from cloche import errors
from cloche.config.sections import VolumeLimits
from cloche.engine.instance import Instance
from cloche.engine.operations.audit import AuditLog
from cloche.engine.pauses.images import SandboxImages
from cloche.engine.sandboxes.files import SandboxFiles
from cloche.engine.sandboxes.live_nursery import LiveNursery
from cloche.engine.sandboxes.pool import CellSupply, ReadyCell, prepare_cell
from cloche.events import Signal
from cloche.isolation.base import CellMounts, CellSpec, CellVolume, VolumeMount
from cloche.model import MIB, Limits, Template, new_id
from cloche.store.volumes import StoredVolumes, VolumeRecord, volume_not_found
from cloche.tasks import TaskSet
from cloche.telemetry import log

# A mounted volume: its tmpfs, and the cell that reads, writes and saves its files for the host.

VOLUME_PATH = "/mnt/data"  # where the vault itself has it
_CELL_SPACE_BYTES = 16 * MIB  # of the vault's own


class MountedVolume:
    """Made by `open`. `holders` are the sandboxes and requests that use the volume."""

    def __init__(self, record: VolumeRecord, nursery: LiveNursery, volume: CellVolume):
        self.record = record
        self.volume = volume
        self.limits: Limits = msgspec.structs.replace(Limits(), space_bytes=_CELL_SPACE_BYTES)
        self.holders: set[object] = set()
        self.changed = False  # whether it may hold changes that no image has
        self.saved_image = record.image
        self.saving = asyncio.Lock()
        self._writers: set[object] = set()
        self._leaving: set[object] = set()
        self._moved = Signal()
        self._nursery = nursery
        self._cell: ReadyCell | None = None
        self._making = asyncio.Lock()
        self._closed = asyncio.Event()

    @classmethod
    async def open(cls, record: VolumeRecord, nursery: LiveNursery, images: SandboxImages) -> MountedVolume:
        """Mounts the volume with the files that were saved last. Raises as `Engine.create` does, NoSpace, NotFound."""
        vault = cls(record, nursery, await (await nursery.get()).make_volume(record.size_bytes))
        try:
            ready = await vault.cell()
            if record.image is not None:
                await images.restore(ready.guest, record.image)
        except BaseException:
            await vault.aclose()
            raise
        return vault

    async def cell(self) -> ReadyCell:
        """The cell that has the volume. Should it have died, another one: its files are still there."""
        async with self._making:
            if self._cell is not None and not self._cell.guest.alive:
                await self._cell.aclose()
                self._cell = None
            if self._cell is None:
                spec = CellSpec(space_bytes=self.limits.space_bytes)
                mounts = CellMounts({VOLUME_PATH: VolumeMount(self.volume)}, lambda: None, lambda: None)
                self._cell = await prepare_cell(self._nursery, spec, self.limits, mounts=mounts)
            return self._cell

    def take(self, holder: object, *, writes: bool) -> None:
        self.holders.add(holder)
        self._moved.wake_all()
        if writes:
            self._writers.add(holder)
            self.changed = True

    def leave(self, holder: object) -> None:
        """The holder uses it no more, and releases it soon. Harmless when it has."""
        if holder in self.holders:
            self._leaving.add(holder)

    async def left(self) -> None:
        """Returns when it has no holder, or one that does not leave."""
        while self.holders and self.holders <= self._leaving:
            await self._moved.wait()

    def let_go(self, holder: object) -> bool:
        """Whether that was the last holder. Harmless when it has released it already."""
        if holder not in self.holders:
            return False
        self.holders.discard(holder)
        self._leaving.discard(holder)
        self._moved.wake_all()
        if holder in self._writers:
            self._writers.discard(holder)
            self.changed = True
        return not self.holders

    def disown(self) -> None:
        """Removes all holders, without their consent."""
        self.holders.clear()
        self._leaving.clear()
        self._moved.wake_all()

    @property
    def lost(self) -> bool:
        """Whether its files are gone, since all processes that had them died."""
        cell = self._cell is not None and self._cell.guest.alive
        return not self.holders and not cell and not self.volume.alive

    async def image(self, images: SandboxImages) -> str:
        """A new image of its files, each as it was when its turn came. Raises as `SandboxImages.save` does."""
        self.changed = bool(self._writers)
        try:
            ready = await self.cell()
            return (await images.save(ready.guest, self.record.size_bytes + _CELL_SPACE_BYTES)).id
        except BaseException:
            self.changed = True
            raise

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    async def closed_within(self, seconds: float) -> bool:
        """Waits for so long, or until it is closed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closed.wait()
        return self.closed

    async def aclose(self) -> None:
        """Nothing is saved. The files are gone with the last sandbox that has them."""
        self._closed.set()
        if self._cell is not None:
            await self._cell.aclose()
        self.volume.drop()


class VolumeReference(NamedTuple):
    """A volume's id or name, and how a sandbox has it."""

    ref: str
    subpath: str = ""
    read_only: bool = False


def parse_volume_reference(given: str) -> VolumeReference:
    """Parses `NAME`, `NAME/DIRECTORY`, `NAME:ro` and `NAME/DIRECTORY:ro`. Raises InvalidRequest."""
    whole = given.removesuffix(":ro")
    ref, _, subpath = whole.partition("/")
    parts = subpath.split("/") if subpath else []
    if len(subpath) > MAX_SUBPATH or any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise errors.InvalidRequest(f"volumes: {subpath[:80]!r} is not a directory in a volume: give one such as a/b")
    return VolumeReference(ref, subpath, whole != given)


LINGER_SECONDS = 5.0  # after its last use, in which the next one finds it as it is
SAVE_SECONDS = 60.0  # between images of one that is in use
SAVE_SHARE = 20  # and so many times as long as the last one took
LEAVE_SECONDS = 20.0  # that sandboxes which have ended may take to be gone: a hundredth of one, on an idle host
MAX_MOUNTS = 8
MAX_SUBPATH = 1024  # letters
VOLUME_TEMPLATE = "python"  # of the cell that has a volume which is first used without a sandbox
_VOLUME_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class VolumeRegistry:
    def __init__(
        self,
        limits: VolumeLimits,
        store: StoredVolumes,
        images: SandboxImages,
        instance: Instance,
        cell_supply: CellSupply,
        audit_log: AuditLog,
    ):
        self._audit_log = audit_log
        self._limits = limits
        self._store = store
        self._images = images
        self._instance = instance
        self._cell_supply = cell_supply
        self._vaults: dict[str, MountedVolume] = {}
        self._changing: dict[str, asyncio.Lock] = {}  # held while that volume is opened, closed or removed
        self._background = TaskSet()
        self._closed = False

    # -- listing

    async def create(self, name: str, owner: str) -> VolumeRecord:
        """Raises InvalidRequest, VolumeConflict where there is one of that name, Unavailable."""
        _check_name(name)
        volume = VolumeRecord(
            id=new_id("v"), owner=owner, name=name, size_bytes=self._limits.bytes, created_at=time.time()
        )
        await self._store.add(volume, self._limits.per_owner)
        log.info("volume.made", volume=volume.id, owner=owner)
        self._audit_log.record("volume.made", owner, id=volume.id)
        return volume

    async def list(self, owner: str) -> Sequence[VolumeRecord]:
        """The oldest first."""
        return await self._store.list(owner)

    async def get(self, ref: str, owner: str | None) -> VolumeRecord:
        """By its id or name; with None as the owner by its id, of any owner. Raises VolumeNotFound."""
        found = await self._store.find(ref, owner)
        if found is None:
            raise volume_not_found(ref)
        return found

    async def remove(self, ref: str, owner: str) -> None:
        """With all its files. Raises VolumeNotFound; VolumeConflict while it is in use.

        Sandboxes that have ended are waited for: a client could not kill them to free the volume.
        """
        id = (await self.get(ref, owner)).id
        await self._wait_until_released(id)
        async with self._volume_lock(id):
            vault = self._vaults.get(id)
            if vault is not None and vault.holders:
                raise errors.VolumeConflict(
                    f"the volume {vault.record.name!r} is in use: kill the sandboxes with it first"
                )
            if vault is not None:
                await self._drop_volume(vault)
            claimed = await self._store.claim(id, self._instance.name, self._instance.is_live)
            await self._store.remove(id)
            if claimed.image is not None:
                await self._images.remove(claimed.image)
        self._changing.pop(id, None)
        log.info("volume.removed", volume=id, owner=owner)
        self._audit_log.record("volume.removed", owner, id=id)

    # -- using them

    async def acquire_mounts(self, wanted: Mapping[str, str], owner: str, template: Template) -> CellMounts:
        """For a new cell of that template: by path, the id or name of each, see `parse_volume_reference`.

        The caller releases them once. Raises InvalidRequest for invalid paths and numbers, VolumeNotFound,
        VolumeConflict, Unavailable.
        """
        _check_mount_paths(wanted)
        views = {path: parse_volume_reference(ref) for path, ref in wanted.items()}
        records = {path: await self.get(view.ref, owner) for path, view in views.items()}
        if len({each.id for each in records.values()}) < len(records):
            raise errors.InvalidRequest("volumes: one can be mounted once in a sandbox, not at two paths")
        holder = object()
        held: list[MountedVolume] = []

        def let_go() -> None:
            for vault in held:
                self._release_volume(vault, holder)

        def leave() -> None:
            for vault in held:
                vault.leave(holder)

        try:
            for path, record in records.items():
                held.append(await self._acquire_volume(record, holder, template, writes=not views[path].read_only))
        except BaseException:
            let_go()
            raise
        mounts = {
            path: VolumeMount(vault.volume, view.read_only, view.subpath)
            for (path, view), vault in zip(views.items(), held, strict=True)
        }
        return CellMounts(mounts, let_go, leave)

    @contextlib.asynccontextmanager
    async def files(self, record: VolumeRecord, *, writes: bool) -> AsyncIterator[SandboxFiles]:
        """Its files, below VOLUME_PATH, with root's rights. Raises VolumeNotFound, VolumeConflict, Unavailable."""
        holder = object()
        vault = await self._acquire_volume(record, holder, None, writes=writes)
        try:
            ready = await vault.cell()
            ready.guest.noted = self._audit_log.of(f"volume:{record.id}", record.owner)
            yield SandboxFiles(ready.guest, user="root", cwd=VOLUME_PATH, limits=vault.limits)
        finally:
            self._release_volume(vault, holder)

    async def discard(self, owner: str) -> None:
        """Drops the volumes of that owner, even those in use, and saves none."""
        for vault in [each for each in self._vaults.values() if each.record.owner == owner]:
            async with self._volume_lock(vault.record.id):
                vault.disown()
                await self._drop_volume(vault)

    async def aclose(self) -> None:
        """Saves all volumes and unmounts them."""
        self._closed = True
        for lock in list(self._changing.values()):
            async with lock:  # it may be opened just now
                pass
        for vault in list(self._vaults.values()):
            vault.disown()
            await self._retire_volume(vault)
            if vault.record.id in self._vaults:  # it could not be saved, and nothing is left to wait for
                await self._drop_volume(vault)
        await asyncio.gather(*self._background, return_exceptions=True)

    # -- inside

    async def _wait_until_released(self, id: str) -> None:
        vault = self._vaults.get(id)
        if vault is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_SECONDS):
                    await vault.left()

    def _volume_lock(self, id: str) -> asyncio.Lock:
        return self._changing.setdefault(id, asyncio.Lock())

    async def _acquire_volume(
        self, record: VolumeRecord, holder: object, template: Template | None, *, writes: bool
    ) -> MountedVolume:
        async with self._volume_lock(record.id):
            if self._closed:
                raise errors.ShuttingDown("the host is shutting down")
            vault = self._vaults.get(record.id)
            if vault is not None and vault.lost:
                await self._drop_lost_volume(vault)
                vault = None
            vault = vault or await self._open_volume(record.id, template)
            vault.take(holder, writes=writes)
            return vault

    async def _open_volume(self, id: str, template: Template | None) -> MountedVolume:
        """In the nursery of that template, which runs anyway, or that of the default one."""
        record = await self._store.claim(id, self._instance.name, self._instance.is_live)
        try:
            vault = await MountedVolume.open(
                record,
                self._cell_supply.nursery(template or await self._cell_supply.template(VOLUME_TEMPLATE)),
                self._images,
            )
        except BaseException:
            await asyncio.shield(self._store.release(id, self._instance.name))
            raise
        self._vaults[id] = vault
        self._background.start(self._save_at_times(vault))
        return vault

    def _release_volume(self, vault: MountedVolume, holder: object) -> None:
        if vault.let_go(holder) and not self._closed:
            asyncio.get_running_loop().call_later(LINGER_SECONDS, self._retire_later, vault)

    def _retire_later(self, vault: MountedVolume) -> None:
        if not vault.holders and self._vaults.get(vault.record.id) is vault and not self._closed:
            self._background.start(self._retire_volume(vault))

    async def _retire_volume(self, vault: MountedVolume) -> None:
        """Saves a volume without holders and frees its memory. One that cannot be saved stays there."""
        async with self._volume_lock(vault.record.id):
            if vault.holders or self._vaults.get(vault.record.id) is not vault:
                return
            if vault.lost:
                await self._drop_lost_volume(vault)
                return
            if vault.changed and not await self._save_volume(vault):
                return
            await self._drop_volume(vault)

    async def _drop_lost_volume(self, vault: MountedVolume) -> None:
        """Drops a volume whose files are gone; changes after the last image are lost."""
        log.error("volume.lost_changes", volume=vault.record.id, owner=vault.record.owner)
        await self._drop_volume(vault)

    async def _drop_volume(self, vault: MountedVolume) -> None:
        self._vaults.pop(vault.record.id, None)
        async with vault.saving:
            await vault.aclose()
        await self._store.release(vault.record.id, self._instance.name)

    async def _save_at_times(self, vault: MountedVolume) -> None:
        pause = SAVE_SECONDS
        while not self._closed and not await vault.closed_within(pause):
            began = time.monotonic()
            if vault.changed:
                await self._save_volume(vault)
            pause = max(SAVE_SECONDS, SAVE_SHARE * (time.monotonic() - began))
            if not vault.holders:  # it could not be saved when the last one let go of it
                await self._retire_volume(vault)

    async def _save_volume(self, vault: MountedVolume) -> bool:
        """Whether its files are kept as they are now."""
        async with vault.saving:
            if vault.closed:
                return True
            try:
                saved = await vault.image(self._images)
                if not await self._store.keep(vault.record.id, saved):
                    await self._images.remove(saved)
                    return True
            except (errors.ClocheError, OSError) as error:
                log.error("volume.not_saved", volume=vault.record.id, owner=vault.record.owner, reason=str(error))
                return False
            before, vault.saved_image = vault.saved_image, saved
            if before is not None:
                await self._images.remove(before)
        return True


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not _VOLUME_NAME.fullmatch(name):
        raise errors.InvalidRequest(
            f"a volume's name has 1 to 64 letters, digits, dots, dashes and underscores, not {str(name)[:80]!r}"
        )


def _check_mount_paths(wanted: Mapping[str, str]) -> None:
    if len(wanted) > MAX_MOUNTS:
        raise errors.InvalidRequest(f"volumes: a sandbox can have {MAX_MOUNTS}, not {len(wanted)}")
    for path in wanted:
        name = path.removeprefix("/mnt/")
        if name == path or name == "data" or not _VOLUME_NAME.fullmatch(name):
            raise errors.InvalidRequest(
                f"volumes: one is mounted at /mnt/NAME, with a NAME of letters, digits, dots, dashes and underscores "
                f"that is not data, and not at {path[:80]!r}"
            )
