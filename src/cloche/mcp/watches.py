"""Files of a sandbox whose changes a client wants to hear of."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from cloche import errors
from cloche.mcp.uris import path_of
from cloche.sdk import seam

MOST_WATCHED = 32

Heard = Callable[[str], Awaitable[None]]  # of a URI whose file has changed


class Watches:
    """Those files of a session whose changes its client wants to hear of."""

    def __init__(self) -> None:
        self._watching: dict[str, asyncio.Task[None]] = {}

    async def add(self, box: seam.Sandbox, uri: str, heard: Heard) -> None:
        """Raises FileNotFound for what names no file, InvalidRequest where there are too many."""
        path = path_of(uri)
        if uri in self._watching:
            return
        if len(self._watching) >= MOST_WATCHED:
            raise errors.InvalidRequest(f"{MOST_WATCHED} resources are watched already: unsubscribe from one")
        ready = asyncio.Event()
        task = self._watching[uri] = asyncio.create_task(_watch(box, path, uri, heard, ready))
        task.add_done_callback(lambda _: self._watching.pop(uri, None) if self._watching.get(uri) is task else None)
        begun = asyncio.create_task(ready.wait())
        await asyncio.wait((task, begun), return_when=asyncio.FIRST_COMPLETED)
        begun.cancel()
        if task.done() and not ready.is_set():
            task.result()

    def remove(self, uri: str) -> None:
        task = self._watching.pop(uri, None)
        if task is not None:
            task.cancel()

    def close(self) -> None:
        for uri in list(self._watching):
            self.remove(uri)


async def _watch(box: seam.Sandbox, path: str, uri: str, heard: Heard, ready: asyncio.Event) -> None:
    """Watches the directory that it is in, so that the file may come, go, and be replaced."""
    watch = box.files.watch(path.rpartition("/")[0] or "/")
    try:
        await watch.__aenter__()
        ready.set()
        async for change in watch:
            if change.path == path:
                await heard(uri)
    except (errors.Gone, errors.NotFound):
        if not ready.is_set():
            raise  # else it is over, with its sandbox
    finally:
        watch.close()
