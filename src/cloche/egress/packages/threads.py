"""Threads for what blocks: disks, hashes, large pages. Of their own, so that nobody else waits for packages."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

THREADS = 4

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


class Threads:
    """Whoever makes it closes it."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, "cloche-packages")

    async def run(self, function: Callable[_Given, _Result], *given: _Given.args, **named: _Given.kwargs) -> _Result:
        """Who is cancelled meanwhile still waits for its end: it may use a descriptor that is closed next."""
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._pool, lambda: function(*given, **named))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({future})
            if not future.cancelled():
                future.exception()
            raise

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
