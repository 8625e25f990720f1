"""A volume that is in use: its tmpfs, and the cell that reads, writes and saves its files for the host."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec

from cloche.engine.images import Images
from cloche.engine.nursery import LiveNursery
from cloche.engine.pool import ReadyCell, prepare
from cloche.engine.queue import Bell
from cloche.isolation.base import CellSpec, Mounts, Volume
from cloche.model import MIB, Limits
from cloche.store.volumes import VolumeRecord

PLACE = "/mnt/data"  # where the vault itself has it
_SPACE_BYTES = 16 * MIB  # of the vault's own


class Vault:
    """Made by `open`. `holders` are those who have the volume."""

    def __init__(self, record: VolumeRecord, nursery: LiveNursery, volume: Volume):
        self.record = record
        self.volume = volume
        self.limits: Limits = msgspec.structs.replace(Limits(), space_bytes=_SPACE_BYTES)
        self.holders: set[object] = set()
        self.changed = False  # whether it may hold what no image has
        self.saved_image = record.image
        self.saving = asyncio.Lock()
        self._writers: set[object] = set()
        self._leaving: set[object] = set()
        self._moved = Bell()
        self._nursery = nursery
        self._cell: ReadyCell | None = None
        self._making = asyncio.Lock()
        self._closed = asyncio.Event()

    @classmethod
    async def open(cls, record: VolumeRecord, nursery: LiveNursery, images: Images) -> Vault:
        """With the files that were saved last. Raises as `Engine.create` does, NoSpace, NotFound."""
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
                mounts = Mounts({PLACE: self.volume}, lambda: None, lambda: None)
                self._cell = await prepare(self._nursery, spec, self.limits, mounts=mounts)
            return self._cell

    def take(self, holder: object, *, writes: bool) -> None:
        self.holders.add(holder)
        self._moved.ring()
        if writes:
            self._writers.add(holder)
            self.changed = True

    def leave(self, holder: object) -> None:
        """It uses it no more, and lets go of it soon. Harmless when it has."""
        if holder in self.holders:
            self._leaving.add(holder)

    async def left(self) -> None:
        """Returns when nobody has it, or somebody who does not leave."""
        while self.holders and self.holders <= self._leaving:
            await self._moved.heard()

    def let_go(self, holder: object) -> bool:
        """Whether that was the last one. Harmless when it has let go already."""
        if holder not in self.holders:
            return False
        self.holders.discard(holder)
        self._leaving.discard(holder)
        self._moved.ring()
        if holder in self._writers:
            self._writers.discard(holder)
            self.changed = True
        return not self.holders

    def disown(self) -> None:
        """Nobody has it from now on, whatever they think."""
        self.holders.clear()
        self._leaving.clear()
        self._moved.ring()

    @property
    def lost(self) -> bool:
        """Whether nobody has its files any more, since all that had them died."""
        cell = self._cell is not None and self._cell.guest.alive
        return not self.holders and not cell and not self.volume.alive

    async def image(self, images: Images) -> str:
        """A new image of its files. Each file is as it was when its turn came. Raises as `Images.save` does."""
        self.changed = bool(self._writers)
        try:
            ready = await self.cell()
            return (await images.save(ready.guest, self.record.size_bytes + _SPACE_BYTES)).id
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
