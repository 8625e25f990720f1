"""A place that is got ready while its client asks what there is: a nursery takes seconds, a template minutes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from cloche import errors
from cloche.mcp.place import Place
from cloche.model import SnapshotInfo
from cloche.sdk import seam


class OpeningPlace:
    """Whoever needs it waits. What getting it ready raises is raised then."""

    def __init__(self, opening: Awaitable[Place]):
        self._opening = asyncio.ensure_future(opening)
        self._opening.add_done_callback(_heard)
        self.snapshots: seam.Snapshots = _Snapshots(self)

    @property
    def is_open(self) -> bool:
        """Whether it is ready, or never will be."""
        return self._opening.done()

    async def opened(self) -> Place:
        if self._opening.done():
            return self._opening.result()
        return await asyncio.shield(self._opening)

    async def create(self, template: str) -> seam.Sandbox:
        return await (await self.opened()).create(template)

    async def find(self, id: str) -> seam.Sandbox:
        return await (await self.opened()).find(id)

    async def fork(self, box: seam.Sandbox) -> seam.Sandbox:
        return await (await self.opened()).fork(box)

    async def end(self, box: seam.Sandbox) -> None:
        await (await self.opened()).end(box)


class _Snapshots:
    def __init__(self, place: OpeningPlace):
        self._place = place

    async def list(self, sandbox: str | None = None) -> list[SnapshotInfo]:
        return await (await self._place.opened()).snapshots.list(sandbox)

    async def get(self, ref: str) -> SnapshotInfo:
        return await (await self._place.opened()).snapshots.get(ref)

    async def remove(self, ref: str) -> None:
        await (await self._place.opened()).snapshots.remove(ref)


def _heard(opening: asyncio.Future[Place]) -> None:
    """Whoever uses it is told what went wrong; where nobody does, nobody needs to know."""
    if not opening.cancelled() and isinstance(opening.exception(), errors.ClocheError):
        opening.exception()
