"""A sandbox's files. All of it is done by the guest's init under the caller's identity; the host opens no path."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import Any

from cloche import errors
from cloche.engine.descriptors import CHUNK_BYTES, PipeWriter, check_regular, only_fd, read_at
from cloche.engine.frames import file_info
from cloche.engine.guest import Guest, Reply, error_of
from cloche.engine.paths import sandbox_path
from cloche.engine.watch import Watch
from cloche.guest import wire
from cloche.isolation.channel import Header
from cloche.model import FileInfo, Limits, User

Content = bytes | bytearray | memoryview | str | Iterable[bytes] | AsyncIterable[bytes]

MIN_READ_LIMIT = 64 << 20


class Files:
    """Paths are absolute, or relative to the sandbox's cwd. `..` and symlinks never leave the sandbox.

    All methods raise InvalidPath, FileNotFound, PermissionDenied, IsADirectory, NotADirectory, NoSpace or FileError
    as the sandbox's file system says, and SandboxLost if it is gone.
    """

    def __init__(self, guest: Guest, *, user: User, cwd: str, limits: Limits):
        self._guest = guest
        self._user = user
        self._cwd = cwd
        # A sparse file may claim any size; what is over the writable space cannot be real.
        self._read_limit = max(limits.space_bytes, MIN_READ_LIMIT)

    async def read(self, path: str, *, user: User | None = None) -> bytes:
        """The whole content. Files over the sandbox's writable space are refused: use `open_read`."""
        reply = await self._ask("file_read", path, user, max_inline=wire.INLINE_BYTES)
        if not reply.fds:
            return reply.body
        fd = only_fd(reply)
        try:
            size = check_regular(fd).st_size
            if size > self._read_limit:
                raise errors.FileError(f"{path} claims {size} bytes: read it in a stream")
            return await asyncio.to_thread(read_at, fd, size, 0)
        finally:
            os.close(fd)

    async def open_read(self, path: str, *, user: User | None = None) -> AsyncIterator[bytes]:
        """The content in chunks of up to 1 MiB, read as they are asked for. Raises before the first chunk."""
        reply = await self._ask("file_read", path, user, max_inline=0)
        if not reply.fds:
            return _once(reply.body)
        fd = only_fd(reply)
        try:
            check_regular(fd)
        except BaseException:
            os.close(fd)
            raise
        return _chunks(fd)

    async def write(
        self, path: str, content: Content, *, user: User | None = None, mode: int | None = None
    ) -> FileInfo:
        """Makes or replaces a file, and the directories above it."""
        if isinstance(content, str):
            content = content.encode()
        if isinstance(content, (bytes, bytearray, memoryview)):
            content = bytes(content)
            if len(content) <= wire.INLINE_BYTES:
                return await self._write_small(path, content, user, mode)
            content = (content,)
        return await self._write_stream(path, content, user, mode)

    async def list(self, path: str = ".", *, depth: int = 1, user: User | None = None) -> list[FileInfo]:
        """What is in a directory, sorted by path, down to `depth` levels."""
        if type(depth) is not int or depth < 1:
            raise errors.InvalidRequest(f"depth must be 1 or more, not {depth!r}")
        reply = await self._ask("file_list", path, user, depth=depth)
        found = reply.ok.get("files")
        if not isinstance(found, list):
            raise errors.ProtocolViolation("the guest's init sent no list of files")
        return [_info(one) for one in found]

    async def stat(self, path: str, *, user: User | None = None) -> FileInfo:
        """What lies at that path; a symlink is not followed."""
        return _info((await self._ask("file_stat", path, user)).ok)

    async def exists(self, path: str, *, user: User | None = None) -> bool:
        try:
            await self.stat(path, user=user)
        except (errors.FileNotFound, errors.NotADirectory):
            return False
        return True

    async def make_dir(self, path: str, *, user: User | None = None) -> bool:
        """Makes a directory and those above it. False if it was there."""
        return (await self._ask("file_make_dir", path, user)).ok.get("created") is True

    async def move(self, path: str, to: str, *, user: User | None = None) -> FileInfo:
        reply = await self._ask("file_move", path, user, to=sandbox_path(to, self._cwd))
        return _info(reply.ok)

    async def remove(self, path: str, *, user: User | None = None) -> None:
        """Removes a file, or a directory with all that is in it."""
        await self._ask("file_remove", path, user)

    def watch(self, path: str, *, recursive: bool = False, user: User | None = None) -> Watch:
        """Changes below a directory from now on: `async with files.watch(p) as changes: async for change in ..`."""
        return Watch(self._guest, sandbox_path(path, self._cwd), recursive=recursive, user=user or self._user)

    async def _ask(self, verb: str, path: str, user: User | None, body: bytes = b"", **fields: Any) -> Reply:
        full = sandbox_path(path, self._cwd)
        try:
            return await self._guest.request(verb, body, path=full, user=user or self._user, **fields)
        except (errors.FileError, errors.FileNotFound, errors.InvalidPath) as error:
            raise _naming(path, error) from None

    async def _write_small(self, path: str, content: bytes, user: User | None, mode: int | None) -> FileInfo:
        reply = await self._ask("file_write", path, user, content, mode=mode, size=len(content))
        return _info(reply.ok)

    async def _write_stream(
        self, path: str, content: Iterable[bytes] | AsyncIterable[bytes], user: User | None, mode: int | None
    ) -> FileInfo:
        reply = await self._ask("file_write", path, user, mode=mode, size=None, stream=True)
        pipe = PipeWriter(only_fd(reply))
        written: asyncio.Future[Header] = asyncio.get_running_loop().create_future()
        self._guest.subscribe("written", reply.ok.get("write"), written.set_result)
        try:
            with contextlib.suppress(BrokenPipeError):  # init has stopped reading; `written` says why
                await _copy(content, pipe)
            pipe.close()
            return _written(path, await self._guest.wait(written))
        finally:
            pipe.close()
            self._guest.unsubscribe("written", reply.ok.get("write"))


async def _copy(content: Iterable[bytes] | AsyncIterable[bytes], pipe: PipeWriter) -> None:
    if isinstance(content, AsyncIterable):
        async for chunk in content:
            await pipe.write(chunk)
        return
    if not isinstance(content, Iterable):
        raise errors.InvalidRequest(f"a file's content must be bytes, text or chunks, not {type(content).__name__}")
    for chunk in content:
        await pipe.write(chunk)


async def _once(body: bytes) -> AsyncIterator[bytes]:
    if body:
        yield body


async def _chunks(fd: int) -> AsyncIterator[bytes]:
    try:
        offset = 0
        while chunk := await asyncio.to_thread(os.pread, fd, CHUNK_BYTES, offset):
            yield chunk
            offset += len(chunk)
    finally:
        os.close(fd)


def _naming(path: str, error: errors.ClocheError) -> errors.ClocheError:
    return type(error)(f"{path}: {error}")


def _written(path: str, header: Header) -> FileInfo:
    if "err" in header:
        raise _naming(path, error_of(header["err"]))
    return _info(header.get("info"))


def _info(described: object) -> FileInfo:
    try:
        return file_info(described)
    except wire.WireError as error:
        raise errors.ProtocolViolation(str(error)) from None
