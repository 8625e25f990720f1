"""Work that outlives the request that asked for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Errands:
    """Tasks that nobody waits for. They are held here, and cancelled when the server stops."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self.closing = False  # whether whoever is cancelled is so because the server stops

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def aclose(self) -> None:
        """Cancels all, and waits until they have ended."""
        self.closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
