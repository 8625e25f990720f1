"""A file of a sandbox that is open for reading: in memory when it is small, else as a descriptor that init passed."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator
from types import TracebackType

from cloche.engine.descriptors import CHUNK_BYTES, check_regular, only_fd
from cloche.engine.frames import number
from cloche.engine.guest import Reply


class OpenFile:
    """Its size and time are those of when it was opened. Owns the descriptor: `close`, or `async with`."""

    def __init__(self, size_bytes: int, modified_at: float, *, content: bytes = b"", fd: int | None = None):
        self.size_bytes = size_bytes
        self.modified_at = modified_at
        self._content = content
        self._fd = fd

    @property
    def small(self) -> bytes | None:
        """All of it, where it is so small that it has come with the answer."""
        return self._content if self._fd is None else None

    async def __aenter__(self) -> OpenFile:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def chunks(self, start: int = 0, end: int | None = None) -> AsyncGenerator[bytes, None]:
        """The bytes from `start` up to `end`, else to the file's own end, in chunks of up to 1 MiB.

        Fewer than that come where a program has cut the file meanwhile.
        """
        while chunk := await self._read(start, CHUNK_BYTES if end is None else min(CHUNK_BYTES, end - start)):
            yield chunk
            start += len(chunk)

    async def until_read(self, end: int | None = None) -> AsyncGenerator[bytes, None]:
        """All chunks, up to `end`; the file is closed then."""
        async with self, contextlib.aclosing(self.chunks(end=end)) as chunks:
            async for chunk in chunks:
                yield chunk

    def close(self) -> None:
        """Harmless when it is closed."""
        if self._fd is not None:
            os.close(self._fd)
        self._fd, self._content = None, b""

    async def _read(self, start: int, size: int) -> bytes:
        if self._fd is None:
            return self._content[start : start + size]
        return await asyncio.to_thread(os.pread, self._fd, size, start)


def opened(reply: Reply) -> OpenFile:
    """What init has opened. Raises PermissionDenied unless it is a regular file, ProtocolViolation."""
    if not reply.fds:
        return OpenFile(len(reply.body), number(reply.ok, "modified_at"), content=reply.body)
    fd = only_fd(reply)
    try:
        about = check_regular(fd)
    except BaseException:
        os.close(fd)
        raise
    return OpenFile(about.st_size, about.st_mtime, fd=fd)
