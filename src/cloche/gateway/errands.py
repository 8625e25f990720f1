"""Work that outlives the request that asked for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from cloche.engine.principal import acting


class Errands:
    """Tasks that nobody waits for. They are held here, and cancelled when the server stops."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], str] = {}  # with whose each is
        self.closing = False  # whether whoever is cancelled is so because the server stops

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task, who = asyncio.create_task(work), acting()
        self._tasks[task] = "" if who is None else who.owner
        task.add_done_callback(self._tasks.pop)
        return task

    async def cancel(self, owner: str) -> None:
        """Those that an owner asked for, and waits until they have ended."""
        theirs = [task for task, whose in self._tasks.items() if whose == owner]
        for task in theirs:
            task.cancel()
        await asyncio.gather(*theirs, return_exceptions=True)

    async def aclose(self) -> None:
        """Cancels all, and waits until they have ended."""
        self.closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
