"""What the first steps of a build made, kept so that the next build need not do them again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from cloche.model import GIB, Snapshot
from cloche.store.base import Snapshots as Store
from cloche.store.retention_clock import surely_past

T = TypeVar("T")

MAX_LAYERS = 8  # of one owner, beside what whole builds made; the oldest go first
MAX_BYTES = 4 * GIB
KEPT_SECONDS = 7 * 86400.0


class Layers:
    """A layer is a snapshot with a digest of its base and its steps. What a whole build made serves as one, too."""

    def __init__(self, store: Store, discard: Callable[[str], Awaitable[None]]):
        self._store = store
        self._discard = discard

    async def longest(self, owner: str, digests: Sequence[str]) -> tuple[int, Snapshot] | None:
        """The one of the last of those digests that there is, and which of them that is, counted from 1."""
        known = {each.layer: each.id for each in await self._store.list(owner) if each.layer is not None}
        for number in range(len(digests), 0, -1):
            id = known.get(digests[number - 1])
            if id is not None and (layer := await self._store.find(id, owner)) is not None:
                return number, layer
        return None

    async def keep(self, layer: Snapshot) -> None:
        """Raises Unavailable; its image is gone then. It takes the place of another one of the same digest."""
        await recorded(self._store.add(layer), lambda: self._discard(layer.image))
        await self._give_up(layer.owner)

    async def clean(self) -> None:
        """Removes what is too old, whoever's it is."""
        for owner in {each.owner for each in await self._store.list(None) if _is_layer(each)}:
            await self._give_up(owner)

    async def _give_up(self, owner: str) -> None:
        kept, size, seen = 0, 0, set()
        for layer in filter(_is_layer, await self._store.list(owner)):  # the newest first
            kept, size = kept + 1, size + layer.bytes
            old = layer.created_at < surely_past() - KEPT_SECONDS
            if old or kept > MAX_LAYERS or size > MAX_BYTES or layer.layer in seen:
                await self._store.remove(layer.id, owner)
                await self._discard(layer.image)
            seen.add(layer.layer)


async def recorded(work: Coroutine[Any, Any, T], undo: Callable[[], Awaitable[None]]) -> T:
    """What `work` gives. It is done also where whoever waits is cancelled; only where it has failed, it is undone."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except BaseException:
        await asyncio.wait([task])
        if task.exception() is not None:
            await undo()
        raise


def _is_layer(snapshot: Snapshot) -> bool:
    return snapshot.layer is not None and not snapshot.of_build
