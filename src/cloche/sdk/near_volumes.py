"""The volumes that the engine in this process has for the library."""

from __future__ import annotations

import builtins

from cloche.engine.engine import Engine
from cloche.model import VolumeInfo
from cloche.sdk.request import OWNER


class NearVolumes:
    def __init__(self, engine: Engine):
        self._engine = engine

    async def create(self, name: str) -> VolumeInfo:
        return (await self._engine.volumes.create(name, OWNER)).info

    async def list(self) -> builtins.list[VolumeInfo]:
        return [each.info for each in await self._engine.volumes.list(OWNER)]

    async def get(self, ref: str) -> VolumeInfo:
        return (await self._engine.volumes.get(ref, OWNER)).info

    async def remove(self, ref: str) -> None:
        await self._engine.volumes.remove(ref, OWNER)
