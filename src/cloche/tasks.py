"""Background tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class TaskSet(set["asyncio.Task[Any]"]):
    """Tasks that run in the background, each until its end.

    An event loop has weak references to its tasks only: a task without another one can vanish before its end.
    """

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A new task of the running loop."""
        return self.keep(asyncio.get_running_loop().create_task(work))

    def keep(self, task: asyncio.Task[T]) -> asyncio.Task[T]:
        """Keeps a task that was started elsewhere."""
        self.add(task)
        task.add_done_callback(self.discard)
        return task


async def run_until_first_ends(*halves: Awaitable[None]) -> None:
    """Runs all halves until the first one ends, and raises its error."""
    tasks = [asyncio.ensure_future(half) for half in halves]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
