"""Contents of files, in a directory: one file each, named by an id of ours."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from cloche import errors
from cloche.model import MIB
from cloche.store.retention_clock import surely_past

CHUNK_BYTES = 1 * MIB
DRAFT = ".draft-"
ORPHAN_SECONDS = 3600.0

_FULL = "its disk is full, and its operator must make room"
_READ_ONLY = "its disk cannot be written, and its operator must look into that"
_DISK = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: _FULL,  # a limit on the size of files
    errno.EROFS: _READ_ONLY,
    errno.EACCES: _READ_ONLY,
    errno.EIO: _READ_ONLY,
}
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")


class Blobs:
    """`put` writes a draft and renames it: whoever reads sees a whole content or none."""

    def __init__(self, directory: Path):
        self._directory = directory

    async def put(self, id: str, chunks: AsyncIterable[bytes], max_bytes: int) -> int:
        """How many bytes it has. Raises TooLarge, Unavailable, and what the chunks raise; nothing is left then."""
        draft = self._directory / f"{DRAFT}{secrets.token_hex(8)}"
        target = self._path(id)
        try:
            with _disk_full():
                size = await _write(await _created(draft), chunks, max_bytes)
                await asyncio.to_thread(os.replace, draft, target)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        return size

    async def chunks(self, id: str) -> AsyncGenerator[bytes, None]:
        """Raises FileNotFound before the first."""
        try:
            file = await asyncio.to_thread(open, self._path(id), "rb")
        except FileNotFoundError:
            raise errors.FileNotFound("this content is no longer kept") from None
        return _chunks(file)

    async def contents(self, ids: Sequence[str]) -> list[bytes | None]:
        """Of small ones, all at once. None for one that is no longer kept."""
        return await asyncio.to_thread(_read_all, [self._path(id) for id in ids])

    async def link(self, id: str, other: str) -> None:
        """The content of `id` under a second id; neither notices when the other is replaced.

        Raises FileNotFound, Unavailable.
        """
        with _disk_full():
            await asyncio.to_thread(_link, self._path(id), self._path(other))

    async def remove_orphans(self, prefixes: tuple[str, ...], known: Callable[[list[str]], Awaitable[set[str]]]) -> int:
        """Removes drafts that nobody finished, and contents with such ids that `known` does not know. How many.

        What was touched within the last hour is left: whoever writes a content makes it known a moment later.
        """
        old = await asyncio.to_thread(_untouched, self._directory, (DRAFT, *prefixes))
        kept = await known([name for name in old if not name.startswith(DRAFT)])
        orphans = [self._directory / name for name in old if name not in kept]
        await asyncio.to_thread(_unlink_all, orphans)
        return len(orphans)

    async def remove(self, id: str) -> None:
        """Harmless when it is not there."""
        await asyncio.to_thread(self._path(id).unlink, missing_ok=True)

    def _path(self, id: str) -> Path:
        assert _ID.fullmatch(id), "ids of blobs are ours"
        return self._directory / id


async def _created(path: Path) -> IO[bytes]:
    """Whoever is cancelled waits for it: a thread goes on, and would make the file after it was removed."""
    creating = asyncio.ensure_future(asyncio.to_thread(_create, path))
    try:
        return await asyncio.shield(creating)
    except asyncio.CancelledError:
        with contextlib.suppress(OSError):
            (await creating).close()
        raise


def _create(path: Path) -> IO[bytes]:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


@contextlib.contextmanager
def _disk_full() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, errors.ClocheError) or error.errno not in _DISK:
            raise
        raise errors.Unavailable(f"the server cannot keep it: {_DISK[error.errno]}") from None


def _read_all(paths: list[Path]) -> list[bytes | None]:
    contents: list[bytes | None] = []
    for path in paths:
        try:
            contents.append(path.read_bytes())
        except FileNotFoundError:
            contents.append(None)
    return contents


def _link(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise errors.FileNotFound("this content is no longer kept") from None
    except OSError:  # this file system has no links, or no more of this one
        shutil.copyfile(source, target)


def _untouched(directory: Path, prefixes: tuple[str, ...]) -> list[str]:
    before = surely_past() - ORPHAN_SECONDS
    found = []
    for entry in directory.iterdir() if directory.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):
            if entry.name.startswith(prefixes) and entry.stat().st_ctime < before:  # a link changes it, too
                found.append(entry.name)
    return found


def _unlink_all(paths: list[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


async def _write(file: IO[bytes], chunks: AsyncIterable[bytes], max_bytes: int) -> int:
    size = 0
    with file:
        async for chunk in chunks:
            size += len(chunk)
            if size > max_bytes:
                raise errors.TooLarge(f"a file can have {max_bytes} bytes here")
            await asyncio.to_thread(file.write, chunk)
    return size


async def _chunks(file: IO[bytes]) -> AsyncGenerator[bytes, None]:
    with file:
        while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
            yield chunk
