"""The files of a sandbox of the engine in this process, as the public classes see them."""

from __future__ import annotations

import builtins
from collections.abc import AsyncGenerator

from cloche import errors
from cloche.engine.sandboxes.files import Content, Watch
from cloche.model import FileChange, FileInfo, User
from cloche.sdk.near_home import Home


class NearFiles:
    def __init__(self, home: Home):
        self._home = home

    async def read(self, path: str, *, user: User | None = None) -> bytes:
        return await (await self._home.awake()).files.read(path, user=user)

    async def open_read(self, path: str, *, user: User | None = None) -> AsyncGenerator[bytes, None]:
        return await (await self._home.awake()).files.open_read(path, user=user)

    async def write(
        self, path: str, content: Content, *, user: User | None = None, mode: int | None = None
    ) -> FileInfo:
        return await (await self._home.awake()).files.write(path, content, user=user, mode=mode)

    async def list(self, path: str = ".", *, depth: int = 1, user: User | None = None) -> builtins.list[FileInfo]:
        return await (await self._home.awake()).files.list(path, depth=depth, user=user)

    async def stat(self, path: str, *, user: User | None = None) -> FileInfo:
        return await (await self._home.awake()).files.stat(path, user=user)

    async def exists(self, path: str, *, user: User | None = None) -> bool:
        return await (await self._home.awake()).files.exists(path, user=user)

    async def make_dir(self, path: str, *, user: User | None = None) -> bool:
        return await (await self._home.awake()).files.make_dir(path, user=user)

    async def move(self, path: str, to: str, *, user: User | None = None) -> FileInfo:
        return await (await self._home.awake()).files.move(path, to, user=user)

    async def remove(self, path: str, *, user: User | None = None) -> None:
        await (await self._home.awake()).files.remove(path, user=user)

    def watch(self, path: str, *, recursive: bool = False, user: User | None = None) -> NearWatch:
        return NearWatch(self._home, path, recursive=recursive, user=user)


class NearWatch:
    """Begins at `__aenter__`, as the engine's own does."""

    def __init__(self, home: Home, path: str, *, recursive: bool, user: User | None):
        self._home = home
        self._asked = (path, recursive, user)
        self._core: Watch | None = None

    async def __aenter__(self) -> NearWatch:
        path, recursive, user = self._asked
        self._core = (await self._home.awake()).files.watch(path, recursive=recursive, user=user)
        await self._core.__aenter__()
        return self

    def __aiter__(self) -> NearWatch:
        return self

    async def __anext__(self) -> FileChange:
        if self._core is None:
            raise errors.InvalidRequest("a watch sees changes between `with` and its end")
        return await anext(self._core)

    def close(self) -> None:
        if self._core is not None:
            self._core.close()
