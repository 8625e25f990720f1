"""Background tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
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
