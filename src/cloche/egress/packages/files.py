"""Files of packages: fetched once for all concurrent requests, checked, kept, and read while they arrive.

A request for a file that is being fetched reads the bytes that have arrived already. Its last bytes are held
back until all of it was checked: no program ever gets the whole of a file that differs from its index's
description.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import NamedTuple

from cloche.egress.packages.cache import CacheReservation, FileDigest, PackageCache, file_key
from cloche.egress.packages.replies import HashMismatch, NoCacheRoom, PackageThreads, RareWarnings, UpstreamError
from cloche.egress.packages.upstream import IndexAnswer, IndexClient, url_origin

CHUNK_BYTES = 256 << 10
HELD_BYTES = 64 << 10
FILE_SECONDS = 1800.0  # to fetch one
FILE_HEADERS = {"accept": "*/*", "accept-encoding": "identity", "user-agent": "cloche"}


class FileReference(NamedTuple):
    """A file as a page of an index names it."""

    url: str
    digest: FileDigest | None

    @property
    def key(self) -> str:
        return file_key(self.url, self.digest)


class FileBody(ABC):
    """A file that is there, or arrives. `size` is known from the beginning."""

    def __init__(self, size: int, threads: PackageThreads):
        self.size = size
        self.threads = threads

    @abstractmethod
    def parts(self, start: int, stop: int) -> AsyncGenerator[bytes, None]:
        """Raises UpstreamError if the file breaks off or fails its check."""

    @property
    def has_ranges(self) -> bool:
        return True

    @property
    def is_here(self) -> bool:
        """Whether the file is cached. Else all of it has to be fetched, for any part."""
        return False


class CachedFile(FileBody):
    """A whole file in the cache."""

    def __init__(self, fd: int, threads: PackageThreads):
        """Reads the file: call it in a thread."""
        super().__init__(os.fstat(fd).st_size, threads)
        self._fd = fd
        self._whole = os.pread(fd, CHUNK_BYTES, 0) if self.size <= CHUNK_BYTES else b""

    @property
    def is_here(self) -> bool:
        return True

    async def parts(self, start: int, stop: int) -> AsyncGenerator[bytes, None]:
        if start < stop <= len(self._whole):
            yield self._whole[start:stop]
            return
        while start < stop:
            part = await self.threads.run(os.pread, self._fd, min(CHUNK_BYTES, stop - start), start)
            if not part:
                raise UpstreamError("the file was cut short on this host")
            start += len(part)
            yield part


class PassthroughFile(FileBody):
    """Through this host and not kept, since there is no room for it."""

    def __init__(self, answer: IndexAnswer, digest: FileDigest | None, limit_bytes: int, threads: PackageThreads):
        if answer.length is None:
            raise UpstreamError("this host has no room for a file whose length its index does not give")
        super().__init__(answer.length, threads)
        self._answer = answer
        self._check = DownloadCheck(digest, answer.length, limit_bytes)

    @property
    def has_ranges(self) -> bool:
        return False

    async def parts(self, start: int, stop: int) -> AsyncGenerator[bytes, None]:
        held = b""
        async for part in self._answer.raw(CHUNK_BYTES):
            await self.threads.run(self._check.add, part)
            if held:
                yield held
            held = part
        self._check.finish()
        yield held


class DownloadCheck:
    """Checks arriving bytes against the index's description."""

    def __init__(self, digest: FileDigest | None, length: int | None, limit_bytes: int):
        self._digest = digest
        self._hash = digest.new() if digest is not None else None
        self._length = length
        self._limit_bytes = limit_bytes
        self.arrived_bytes = 0
        if (length or 0) > limit_bytes:
            raise self._too_large()

    def add(self, part: bytes) -> None:
        """Raises UpstreamError."""
        self.arrived_bytes += len(part)
        if self.arrived_bytes > self._limit_bytes:
            raise self._too_large()
        if self._hash is not None:
            self._hash.update(part)

    def finish(self) -> None:
        """Raises UpstreamError."""
        if self._length is not None and self.arrived_bytes != self._length:
            raise UpstreamError(f"the index broke off after {self.arrived_bytes} of {self._length} bytes")
        if self._hash is not None and self._digest is not None and self._hash.hexdigest() != self._digest.hex:
            raise HashMismatch(
                f"the file is not the one that its index describes: its {self._digest.algorithm} is another, so it is "
                "not passed on"
            )

    def _too_large(self) -> UpstreamError:
        return UpstreamError(
            f"the file is over {self._limit_bytes} bytes, the limit of this host (packages.file_bytes)"
        )


class DownloadingFile(FileBody):
    """A file that is fetched into the cache directory, for as long as it has readers."""

    def __init__(self, fd: int, path: Path, threads: PackageThreads):
        super().__init__(0, threads)
        self.fd = fd
        self.path = path
        self.readers = 0
        self._written = 0
        self._has_size = False
        self._ended = False
        self._failure: UpstreamError | None = None
        self._moved = asyncio.Event()

    async def ready(self) -> None:
        """Waits until its size is known. Raises UpstreamError."""
        while not self._has_size:
            if self._failure is not None:
                raise self._failure
            await self._moved.wait()

    def set_size(self, size: int) -> None:
        self.size, self._has_size = size, True
        self._wake_readers()

    def wrote(self, count: int) -> None:
        self._written += count
        self._wake_readers()

    def end(self, failure: UpstreamError | None = None) -> None:
        self._ended, self._failure = failure is None, failure
        if not self._has_size and failure is None:
            self.set_size(self._written)
        self._wake_readers()

    async def parts(self, start: int, stop: int) -> AsyncGenerator[bytes, None]:
        while start < stop:
            readable = self._written if self._ended else self._written - HELD_BYTES
            if start < readable:
                count = min(CHUNK_BYTES, readable - start, stop - start)
                part = await self.threads.run(os.pread, self.fd, count, start)
                start += len(part)
                yield part
            elif self._failure is not None:
                raise self._failure
            elif self._ended:
                raise UpstreamError("the file is shorter than announced")
            else:
                await self._moved.wait()

    def _wake_readers(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()


class PackageFiles:
    """The files of all indexes. Its maker closes it."""

    def __init__(self, cache: PackageCache, threads: PackageThreads, limit_bytes: int, unhashed_seconds: float):
        self.opened = {"hit": 0, "miss": 0}  # whether the cache had it
        self._threads = threads
        self._cache = cache
        self._limit_bytes = limit_bytes
        self._unhashed_seconds = unhashed_seconds
        self._seldom = RareWarnings()
        self._arriving: dict[str, tuple[DownloadingFile, asyncio.Task[None]]] = {}

    @contextlib.asynccontextmanager
    async def open(self, upstream: IndexClient, reference: FileReference) -> AsyncGenerator[FileBody, None]:
        """The file, from the cache, else from the index. Raises UpstreamError, also while it is read."""
        async with contextlib.AsyncExitStack() as stack:
            kept = await self._threads.run(self._open_cached, stack, reference)
            self.opened["miss" if kept is None else "hit"] += 1
            yield kept or await self._open_fetched(stack, upstream, reference)

    def _open_cached(self, stack: contextlib.AsyncExitStack, reference: FileReference) -> CachedFile | None:
        """The cached file. Runs in a thread, which gives the descriptor to the stack before a cancellation can
        come.
        """
        age_seconds = self._unhashed_seconds if reference.key.startswith("url-") else None
        fd = self._cache.open(reference.key, age_seconds)
        if fd is None:
            return None
        stack.callback(os.close, fd)
        return CachedFile(fd, self._threads)

    async def _open_fetched(
        self, stack: contextlib.AsyncExitStack, upstream: IndexClient, reference: FileReference
    ) -> FileBody:
        try:
            body = await stack.enter_async_context(self._share_fetch(upstream, reference))
            await body.ready()
            return body
        except NoCacheRoom:
            self._seldom.warn_rarely("packages.not_kept", reason="there is no room for it on this host")
        answer = await stack.enter_async_context(upstream.get(reference.url, FILE_HEADERS))
        return PassthroughFile(answer, reference.digest, self._limit_bytes, self._threads)

    @contextlib.asynccontextmanager
    async def _share_fetch(
        self, upstream: IndexClient, reference: FileReference
    ) -> AsyncGenerator[DownloadingFile, None]:
        """The single fetch of a file. It ends when its last reader has left."""
        if reference.key not in self._arriving:
            self._begin_fetch(upstream, reference)
        body, task = self._arriving[reference.key]
        body.readers += 1
        try:
            yield body
        finally:
            body.readers -= 1
            if not body.readers:
                self._forget_fetch(reference.key, body)  # at once: no reader may join a fetch that is being closed
                await _cancel_task(task)
                os.close(body.fd)

    def _forget_fetch(self, key: str, body: DownloadingFile) -> None:
        if self._arriving.get(key, (None,))[0] is body:
            del self._arriving[key]

    def _begin_fetch(self, upstream: IndexClient, reference: FileReference) -> None:
        if not self._cache.has_room(0):
            raise NoCacheRoom("there is no room on this host")
        try:
            body = DownloadingFile(*self._cache.create(), self._threads)
        except OSError:
            raise NoCacheRoom("there is no room on this host") from None
        task = asyncio.get_running_loop().create_task(self._fetch_file(upstream, reference, body))
        self._arriving[reference.key] = body, task

    async def _fetch_file(self, upstream: IndexClient, reference: FileReference, body: DownloadingFile) -> None:
        failure: UpstreamError | None = UpstreamError("it was given up")
        try:
            async with asyncio.timeout(FILE_SECONDS), upstream.get(reference.url, FILE_HEADERS) as answer:
                await self._store_answer(answer, reference, body)
            failure = None
        except HashMismatch as error:
            self._seldom.warn_rarely("packages.hash_mismatch", host=url_origin(reference.url).host)
            failure = error
        except UpstreamError as error:
            failure = error
        except TimeoutError:
            failure = UpstreamError(f"the file did not arrive within {FILE_SECONDS:g} s")
        except OSError as error:
            failure = UpstreamError(f"the file cannot be kept on this host: {error.strerror}")
        finally:
            self._forget_fetch(reference.key, body)
            self._cache.discard(body.path)
            body.end(failure)

    async def _store_answer(self, answer: IndexAnswer, reference: FileReference, body: DownloadingFile) -> None:
        check = DownloadCheck(reference.digest, answer.length, self._limit_bytes)
        with self._cache.room() as room:
            await self._threads.run(room.take, answer.length or 0)
            if answer.length is not None:
                body.set_size(answer.length)
            async for part in answer.raw(CHUNK_BYTES):
                body.wrote(await self._threads.run(_store_part, body.fd, part, check, room))
            check.finish()
            await self._threads.run(self._cache.keep, body.path, reference.key, check.arrived_bytes, room)

    async def aclose(self) -> None:
        for _, task in list(self._arriving.values()):
            await _cancel_task(task)


def _store_part(fd: int, part: bytes, check: DownloadCheck, room: CacheReservation) -> int:
    """Raises UpstreamError; NoCacheRoom where its length was not said, and there is none for more."""
    check.add(part)
    room.take(check.arrived_bytes)
    view = memoryview(part)
    while view:
        view = view[os.write(fd, view) :]
    return len(part)


async def _cancel_task(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})
