"""MCP over stdin and stdout, for the one client that started us. This module imports `mcp`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Any, BinaryIO, cast

from mcp.server.stdio import stdio_server

from cloche import errors
from cloche.mcp.backend import Place
from cloche.mcp.server import options_of, server_of
from cloche.mcp.workspace import Workspace
from cloche.model import SnapshotInfo
from cloche.sdk import backend

# Our stdin and stdout as the protocol's own: nothing else that is in this process reads or writes them.
#
# In threads that nobody waits for: a client that neither writes nor reads must not keep us from ending.

MOST_LINE_BYTES = 64 << 20
MOST_WAITING = 16


class Lines:
    """What comes in, line by line, as the package reads it."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self._loop = asyncio.get_running_loop()
        self._came: asyncio.Queue[str] = asyncio.Queue()
        self._room = threading.Semaphore(MOST_WAITING)
        threading.Thread(target=self._read, name="mcp-stdin", daemon=True).start()

    def __aiter__(self) -> Lines:
        return self

    async def __anext__(self) -> str:
        line = await self._came.get()
        self._room.release()
        if not line:
            self._came.put_nowait("")  # for whoever asks again
            raise StopAsyncIteration
        return line

    def end(self) -> None:
        self._came.put_nowait("")

    def _read(self) -> None:
        line = b"-"
        while line:
            self._room.acquire()
            try:
                line = self._file.readline(MOST_LINE_BYTES)
            except (OSError, ValueError):
                line = b""
            try:
                self._loop.call_soon_threadsafe(self._came.put_nowait, line.decode("utf-8", "replace"))
            except RuntimeError:  # the loop has ended
                return


class Mouth:
    """What goes out. Once nobody reads it, the lines that come in end."""

    def __init__(self, fd: int, lines: Lines):
        self._fd = fd
        self._lines = lines
        self._loop = asyncio.get_running_loop()
        self._work: queue.SimpleQueue[tuple[bytes, asyncio.Future[None]]] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="mcp-stdout", daemon=True).start()

    async def write(self, text: str) -> None:
        written: asyncio.Future[None] = self._loop.create_future()
        self._work.put((text.encode("utf-8", "backslashreplace"), written))
        await written

    async def flush(self) -> None:
        """All that was written has gone."""

    def _write(self) -> None:
        while True:
            data, written = self._work.get()
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(self._fd, view) :]
                done = _finish
            except OSError:
                done = self._broken
            try:
                self._loop.call_soon_threadsafe(done, written)
            except RuntimeError:  # the loop has ended
                return

    def _broken(self, written: asyncio.Future[None]) -> None:
        self._lines.end()
        _finish(written)


def _finish(written: asyncio.Future[None]) -> None:
    if not written.done():
        written.set_result(None)


@contextlib.contextmanager
def own_pipes() -> Iterator[tuple[BinaryIO, int]]:
    """Our stdin, and the descriptor of our stdout.

    Meanwhile descriptor 0 has nothing to read, and what anybody writes to 1 goes to stderr.
    """
    read, write, nothing = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    try:
        # A thread may wait in it for good, so it is never closed.
        yield os.fdopen(read, "rb", closefd=False), write
    finally:
        os.dup2(read, 0)
        os.dup2(write, 1)


async def serve(workspace: Workspace) -> None:
    """Until the client closes our stdin. Then what was made ends."""

    @contextlib.asynccontextmanager
    async def lifespan(server: Any) -> AsyncIterator[Workspace]:
        yield workspace

    server = server_of(lifespan)
    with own_pipes() as (stdin, stdout):
        lines = Lines(stdin)
        try:
            # It wants anyio's files, of which it uses no more than these have.
            ours = cast(Any, lines), cast(Any, Mouth(stdout, lines))
            async with stdio_server(*ours) as (reading, writing):
                await server.run(reading, writing, options_of(server))
        finally:
            await workspace.aclose()


# A place that is got ready while its client asks what there is: a nursery takes seconds, a template minutes.


class OpeningPlace:
    """Whoever needs it waits. What getting it ready raises is raised then."""

    def __init__(self, opening: Awaitable[Place]):
        self._opening = asyncio.ensure_future(opening)
        self._opening.add_done_callback(_heard)
        self.snapshots: backend.Snapshots = _Snapshots(self)

    @property
    def is_open(self) -> bool:
        """Whether it is ready, or never will be."""
        return self._opening.done()

    async def opened(self) -> Place:
        if self._opening.done():
            return self._opening.result()
        return await asyncio.shield(self._opening)

    async def create(self, template: str) -> backend.Sandbox:
        return await (await self.opened()).create(template)

    async def find(self, id: str) -> backend.Sandbox:
        return await (await self.opened()).find(id)

    async def fork(self, box: backend.Sandbox) -> backend.Sandbox:
        return await (await self.opened()).fork(box)

    async def end(self, box: backend.Sandbox) -> None:
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
