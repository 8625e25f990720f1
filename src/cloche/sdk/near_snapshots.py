"""The snapshots that the engine in this process has for the library."""

from __future__ import annotations

import builtins

from cloche.engine.engine import Engine
from cloche.model import SnapshotInfo
from cloche.sdk.request import OWNER


class NearSnapshots:
    def __init__(self, engine: Engine):
        self._engine = engine

    async def list(self, sandbox: str | None = None) -> builtins.list[SnapshotInfo]:
        return [each.info for each in await self._engine.snapshots.list(OWNER, sandbox)]

    async def get(self, ref: str) -> SnapshotInfo:
        return (await self._engine.snapshots.get(ref, OWNER)).info

    async def remove(self, ref: str) -> None:
        await self._engine.snapshots.remove(ref, OWNER)
