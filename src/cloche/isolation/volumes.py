"""Volumes as the host sees them: a name that a zygote knows, and descriptors of mounts that go from it into cells.

The host never opens a path in one. A mount comes from the zygote that made the volume, and goes with the order for a
cell to that cell's own zygote, which may be another one.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from cloche import errors
from cloche.isolation.base import Mounts
from cloche.isolation.channel import close_all
from cloche.isolation.ids import volume_maps
from cloche.isolation.nursery import Trees, ZygoteNursery
from cloche.model import KIB

_BYTES_PER_INODE = 4 * KIB


class ZygoteVolume:
    """Made by `make`."""

    def __init__(self, zygote: ZygoteNursery, name: str, size_bytes: int):
        self._zygote = zygote
        self._name = name
        self.bytes = size_bytes

    @classmethod
    async def make(cls, zygote: ZygoteNursery, size_bytes: int, owner: int) -> ZygoteVolume:
        """`owner`: the id in it whose it is. Raises NurseryFailed, Unavailable."""
        volume = cls(zygote, secrets.token_hex(8), size_bytes)
        inodes = max(size_bytes // _BYTES_PER_INODE, 1024)
        try:
            asked = zygote.ask_volume("make", volume=volume._name, bytes=size_bytes, inodes=inodes, owner=owner)
            close_all(await asked)
        except BaseException:  # whoever is cancelled does not know whether it was made
            volume.drop()
            raise
        return volume

    @property
    def alive(self) -> bool:
        return self._zygote.alive

    async def tree(self, share: dict[str, Any]) -> int:
        fds = await self._zygote.ask_volume("tree", volume=self._name, **volume_maps(share))
        if len(fds) != 1:
            close_all(fds)
            raise errors.NurseryFailed("the zygote passed no mount for a volume")
        return fds[0]

    def drop(self) -> None:
        self._zygote.tell_volume("drop", volume=self._name)


@asynccontextmanager
async def trees_for(mounts: Mounts, share: dict[str, Any]) -> AsyncIterator[Trees]:
    """Mounts for a cell with those ids, until its zygote has them. Raises as `Volume.tree` does."""
    fds: list[int] = []
    try:
        for volume in mounts.volumes.values():
            fds.append(await volume.tree(share))
        yield Trees(list(mounts.volumes), fds, mounts.bytes)
    finally:
        close_all(fds)
