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
from cloche.mcp.backend import SandboxBackend
from cloche.mcp.server import create_server, server_options
from cloche.mcp.workspace import McpWorkspace
from cloche.model import SnapshotInfo
from cloche.sdk import backend

# Our stdin and stdout, reserved for the protocol: nothing else in this process reads or writes them.
#
# In daemon threads: a client that neither writes nor reads must not keep the process from ending.

MAX_LINE_BYTES = 64 << 20
MAX_WAITING_LINES = 16


class StdinReader:
    """Incoming lines, in the form that the package reads."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self._loop = asyncio.get_running_loop()
        self._came: asyncio.Queue[str] = asyncio.Queue()
        self._room = threading.Semaphore(MAX_WAITING_LINES)
        threading.Thread(target=self._read_lines, name="mcp-stdin", daemon=True).start()

    def __aiter__(self) -> StdinReader:
        return self

    async def __anext__(self) -> str:
        line = await self._came.get()
        self._room.release()
        if not line:
            self._came.put_nowait("")  # for the next read
            raise StopAsyncIteration
        return line

    def end(self) -> None:
        self._came.put_nowait("")

    def _read_lines(self) -> None:
        line = b"-"
        while line:
            self._room.acquire()
            try:
                line = self._file.readline(MAX_LINE_BYTES)
            except (OSError, ValueError):
                line = b""
            try:
                self._loop.call_soon_threadsafe(self._came.put_nowait, line.decode("utf-8", "replace"))
            except RuntimeError:  # the loop has ended
                return


class StdoutWriter:
    """Outgoing lines. Once the client has closed its end, the incoming lines end."""

    def __init__(self, fd: int, lines: StdinReader):
        self._fd = fd
        self._lines = lines
        self._loop = asyncio.get_running_loop()
        self._work: queue.SimpleQueue[tuple[bytes, asyncio.Future[None]]] = queue.SimpleQueue()
        threading.Thread(target=self._write_queued, name="mcp-stdout", daemon=True).start()

    async def write(self, text: str) -> None:
        written: asyncio.Future[None] = self._loop.create_future()
        self._work.put((text.encode("utf-8", "backslashreplace"), written))
        await written

    async def flush(self) -> None:
        """Does nothing: `write` returns when all has gone."""

    def _write_queued(self) -> None:
        while True:
            data, written = self._work.get()
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(self._fd, view) :]
                done = _set_written
            except OSError:
                done = self._on_broken_pipe
            try:
                self._loop.call_soon_threadsafe(done, written)
            except RuntimeError:  # the loop has ended
                return

    def _on_broken_pipe(self, written: asyncio.Future[None]) -> None:
        self._lines.end()
        _set_written(written)


def _set_written(written: asyncio.Future[None]) -> None:
    if not written.done():
        written.set_result(None)


@contextlib.contextmanager
def take_over_stdio() -> Iterator[tuple[BinaryIO, int]]:
    """Our stdin, and the descriptor of our stdout.

    Meanwhile descriptor 0 has nothing to read, and writes of other code to 1 go to stderr.
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


async def serve_stdio(workspace: McpWorkspace) -> None:
    """Serves until the client closes our stdin. Then the sandboxes of the session end."""

    @contextlib.asynccontextmanager
    async def lifespan(server: Any) -> AsyncIterator[McpWorkspace]:
        yield workspace

    server = create_server(lifespan)
    with take_over_stdio() as (stdin, stdout):
        lines = StdinReader(stdin)
        try:
            # It wants anyio's files, of which it uses no more than these have.
            ours = cast(Any, lines), cast(Any, StdoutWriter(stdout, lines))
            async with stdio_server(*ours) as (reading, writing):
                await server.run(reading, writing, server_options(server))
        finally:
            await workspace.aclose()


# A backend that opens while its client lists tools: a nursery takes seconds, a template minutes.


class OpeningBackend:
    """Its callers wait until it is open, and get the errors of opening it."""

    def __init__(self, opening: Awaitable[SandboxBackend]):
        self._opening = asyncio.ensure_future(opening)
        self._opening.add_done_callback(_retrieve_error)
        self.snapshots: backend.BackendSnapshots = _OpeningSnapshots(self)

    @property
    def is_open(self) -> bool:
        """Whether it is ready, or never will be."""
        return self._opening.done()

    async def opened(self) -> SandboxBackend:
        if self._opening.done():
            return self._opening.result()
        return await asyncio.shield(self._opening)

    async def create(self, template: str) -> backend.BackendSandbox:
        return await (await self.opened()).create(template)

    async def find(self, id: str) -> backend.BackendSandbox:
        return await (await self.opened()).find(id)

    async def fork(self, box: backend.BackendSandbox) -> backend.BackendSandbox:
        return await (await self.opened()).fork(box)

    async def end(self, box: backend.BackendSandbox) -> None:
        await (await self.opened()).end(box)


class _OpeningSnapshots:
    def __init__(self, place: OpeningBackend):
        self._place = place

    async def list(self, sandbox: str | None = None) -> list[SnapshotInfo]:
        return await (await self._place.opened()).snapshots.list(sandbox)

    async def get(self, ref: str) -> SnapshotInfo:
        return await (await self._place.opened()).snapshots.get(ref)

    async def remove(self, ref: str) -> None:
        await (await self._place.opened()).snapshots.remove(ref)


def _retrieve_error(opening: asyncio.Future[SandboxBackend]) -> None:
    """Marks the error as retrieved: callers of the backend get it; without one it does not matter."""
    if not opening.cancelled() and isinstance(opening.exception(), errors.ClocheError):
        opening.exception()
