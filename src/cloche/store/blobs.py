"""Blobs: contents of files in a directory, one file each, named by an id of ours."""

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
from cloche.store.retention_clock import retention_now

CHUNK_BYTES = 1 * MIB
DRAFT_PREFIX = ".draft-"
ORPHAN_SECONDS = 3600.0

_FULL = "its disk is full, and its operator must make room"
_READ_ONLY = "its disk cannot be written, and its operator must look into that"
_DISK_PROBLEMS = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: _FULL,  # a limit on the size of files
    errno.EROFS: _READ_ONLY,
    errno.EACCES: _READ_ONLY,
    errno.EIO: _READ_ONLY,
}
_BLOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")


class Blobs:
    """A directory of blobs. `put` writes a draft and renames it: a reader sees a whole content or none."""

    def __init__(self, directory: Path):
        self._directory = directory

    async def put(self, id: str, chunks: AsyncIterable[bytes], max_bytes: int) -> int:
        """Returns the size in bytes.

        Raises TooLarge, Unavailable, and the errors of the chunks; nothing is left then.
        """
        draft = self._directory / f"{DRAFT_PREFIX}{secrets.token_hex(8)}"
        target = self._blob_path(id)
        try:
            with _translate_disk_errors():
                size = await _write_chunks(await _create_shielded(draft), chunks, max_bytes)
                await asyncio.to_thread(os.replace, draft, target)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        return size

    async def chunks(self, id: str) -> AsyncGenerator[bytes, None]:
        """Returns the content. Raises FileNotFound before the first chunk."""
        try:
            file = await asyncio.to_thread(open, self._blob_path(id), "rb")
        except FileNotFoundError:
            raise errors.FileNotFound("this content is no longer kept") from None
        return _read_chunks(file)

    async def contents(self, ids: Sequence[str]) -> list[bytes | None]:
        """Returns the contents of small blobs, all at once. None for a missing one."""
        return await asyncio.to_thread(_read_all, [self._blob_path(id) for id in ids])

    async def link(self, id: str, other: str) -> None:
        """Links the content of `id` to a second id; replacing one does not affect the other.

        Raises FileNotFound, Unavailable.
        """
        with _translate_disk_errors():
            await asyncio.to_thread(_link_file, self._blob_path(id), self._blob_path(other))

    async def remove_orphans(self, prefixes: tuple[str, ...], known: Callable[[list[str]], Awaitable[set[str]]]) -> int:
        """Removes unfinished drafts, and contents with such ids that `known` does not return. Returns their number.

        Files touched within the last hour are left: the writer of a content registers it a moment later.
        """
        old = await asyncio.to_thread(_list_untouched, self._directory, (DRAFT_PREFIX, *prefixes))
        kept = await known([name for name in old if not name.startswith(DRAFT_PREFIX)])
        orphans = [self._directory / name for name in old if name not in kept]
        await asyncio.to_thread(_unlink_all, orphans)
        return len(orphans)

    async def remove(self, id: str) -> None:
        """Harmless when it is not there."""
        await asyncio.to_thread(self._blob_path(id).unlink, missing_ok=True)

    def _blob_path(self, id: str) -> Path:
        assert _BLOB_ID.fullmatch(id), "ids of blobs are ours"
        return self._directory / id


async def _create_shielded(path: Path) -> IO[bytes]:
    """Creates the file. A cancelled caller waits for it: the thread would create the file after its removal."""
    creating = asyncio.ensure_future(asyncio.to_thread(_create_file, path))
    try:
        return await asyncio.shield(creating)
    except asyncio.CancelledError:
        with contextlib.suppress(OSError):
            (await creating).close()
        raise


def _create_file(path: Path) -> IO[bytes]:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


@contextlib.contextmanager
def _translate_disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, errors.ClocheError) or error.errno not in _DISK_PROBLEMS:
            raise
        raise errors.Unavailable(f"the server cannot keep it: {_DISK_PROBLEMS[error.errno]}") from None


def _read_all(paths: list[Path]) -> list[bytes | None]:
    contents: list[bytes | None] = []
    for path in paths:
        try:
            contents.append(path.read_bytes())
        except FileNotFoundError:
            contents.append(None)
    return contents


def _link_file(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise errors.FileNotFound("this content is no longer kept") from None
    except OSError:  # this file system has no links, or no more of this one
        shutil.copyfile(source, target)


def _list_untouched(directory: Path, prefixes: tuple[str, ...]) -> list[str]:
    before = retention_now() - ORPHAN_SECONDS
    found = []
    for entry in directory.iterdir() if directory.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):
            if entry.name.startswith(prefixes) and entry.stat().st_ctime < before:  # a link changes it, too
                found.append(entry.name)
    return found


def _unlink_all(paths: list[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


async def _write_chunks(file: IO[bytes], chunks: AsyncIterable[bytes], max_bytes: int) -> int:
    size = 0
    with file:
        async for chunk in chunks:
            size += len(chunk)
            if size > max_bytes:
                raise errors.TooLarge(f"a file can have {max_bytes} bytes here")
            await asyncio.to_thread(file.write, chunk)
    return size


async def _read_chunks(file: IO[bytes]) -> AsyncGenerator[bytes, None]:
    with file:
        while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
            yield chunk
