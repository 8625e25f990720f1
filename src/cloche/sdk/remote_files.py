"""The files of a sandbox on a server."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Iterable
from types import TracebackType
from typing import Any, cast
from urllib.parse import quote

from cloche import errors
from cloche.engine.executions.streams import Bell
from cloche.engine.sandboxes.files import MAX_WAITING, Content, chunk_of, chunks_of, sandbox_path
from cloche.model import FileChange, FileInfo, User, check_mode, check_user
from cloche.protocol import requests, responses
from cloche.sdk.remote_server import Server, events_of


class RemoteFiles:
    def __init__(self, server: Server, sandbox: str):
        self._server = server
        self._path = f"/sandboxes/{quote(sandbox)}/files"

    async def read(self, path: str, *, user: User | None = None) -> bytes:
        query = {**_at(path, user), "whole": True}
        content: bytes = await self._server.ask("GET", f"{self._path}/content", query=query)
        return content

    async def open_read(self, path: str, *, user: User | None = None) -> AsyncGenerator[bytes, None]:
        opening = contextlib.AsyncExitStack()
        streaming = self._server.streaming(f"{self._path}/content", _at(path, user))
        chunks = await opening.enter_async_context(streaming)

        async def read() -> AsyncGenerator[bytes, None]:
            async with opening:
                async for chunk in chunks:
                    yield chunk

        return read()

    async def write(
        self, path: str, content: Content, *, user: User | None = None, mode: int | None = None
    ) -> FileInfo:
        check_mode(mode)
        query = {**_at(path, user), "mode": None if mode is None else f"{mode:o}"}
        info: FileInfo = await self._server.ask(
            "PUT", f"{self._path}/content", FileInfo, query=query, content=_sent(content)
        )
        return info

    async def list(self, path: str = ".", *, depth: int = 1, user: User | None = None) -> builtins.list[FileInfo]:
        if type(depth) is not int or depth < 1:
            raise errors.InvalidRequest(f"depth must be 1 or more, not {depth!r}")
        found: list[FileInfo] = await self._server.ask(
            "GET", f"{self._path}/list", list[FileInfo], query={**_at(path, user), "depth": depth}
        )
        return found

    async def stat(self, path: str, *, user: User | None = None) -> FileInfo:
        info: FileInfo = await self._server.ask("GET", f"{self._path}/stat", FileInfo, query=_at(path, user))
        return info

    async def exists(self, path: str, *, user: User | None = None) -> bool:
        found: responses.Exists = await self._server.ask(
            "GET", f"{self._path}/exists", responses.Exists, query=_at(path, user)
        )
        return found.exists

    async def make_dir(self, path: str, *, user: User | None = None) -> bool:
        body = requests.Path(**_at(path, user))
        made: responses.Made = await self._server.ask("POST", f"{self._path}/make_dir", responses.Made, body=body)
        return made.created

    async def move(self, path: str, to: str, *, user: User | None = None) -> FileInfo:
        sandbox_path(to, "/")
        body = requests.MovePath(**_at(path, user), to=to)
        info: FileInfo = await self._server.ask("POST", f"{self._path}/move", FileInfo, body=body)
        return info

    async def remove(self, path: str, *, user: User | None = None) -> None:
        await self._server.ask("POST", f"{self._path}/remove", body=requests.Path(**_at(path, user)))

    def watch(self, path: str, *, recursive: bool = False, user: User | None = None) -> RemoteWatch:
        return RemoteWatch(self._server, f"{self._path}/watch", {**_at(path, user), "recursive": recursive})


class RemoteWatch:
    """As `cloche.engine.sandboxes.files.Watch`."""

    def __init__(self, server: Server, path: str, query: dict[str, Any]):
        self.missed = 0
        self._server = server
        self._target = (path, query)
        self._changes: deque[FileChange] = deque()
        self._bell = Bell()
        self._begun = False
        self._error: errors.ClocheError | None = None
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> RemoteWatch:
        """Returns when changes are seen. Raises what the server says."""
        self._reading = asyncio.create_task(self._read())
        try:
            while not self._begun and not self._reading.done():
                await self._bell.heard()
        except BaseException:
            self.close()
            raise
        if self._error is not None:
            raise self._error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __aiter__(self) -> RemoteWatch:
        return self

    async def __anext__(self) -> FileChange:
        while not self._changes:
            if self._error is not None:
                raise self._error
            if self._reading is None or self._reading.done():
                raise StopAsyncIteration
            await self._bell.heard()
        return self._changes.popleft()

    def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        self._bell.ring()

    def _put(self, change: FileChange) -> None:
        if len(self._changes) < MAX_WAITING:
            self._changes.append(change)
        else:
            self.missed += 1

    async def _read(self) -> None:
        try:
            async with self._server.streaming(*self._target) as chunks:
                async for event in events_of(chunks):
                    self._begun = True
                    if isinstance(event, responses.Change):
                        self._put(FileChange(kind=cast(Any, event.kind), path=event.path))
                    self._bell.ring()
            raise self._server.lost()
        except errors.ClocheError as error:
            self._error = error
        finally:
            asyncio.get_running_loop().call_soon(self._bell.ring)  # once this task is done


def _at(path: str, user: User | None) -> dict[str, Any]:
    """Refuses here what the engine would refuse, in its words."""
    sandbox_path(path, "/")
    check_user(user)
    return {"path": path, "user": user}


def _sent(content: Content) -> bytes | AsyncIterable[bytes]:
    if isinstance(content, (Iterable, AsyncIterable)) and not isinstance(content, (str, bytes, bytearray, memoryview)):
        return chunks_of(content)
    return chunk_of(content)
