"""Images of sandboxes' files, in a directory: one file each. Nobody on this side ever looks into one.

All of it blocks: for threads.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from cloche import errors
from cloche.model import MIB, new_id

_DRAFT = ".draft-"
# An image is named by itself and by the host process that made it, which makes it known a moment later.
_ID = re.compile(r"m[a-z0-9]{20}-([a-z0-9]{1,64})")
RESERVE_BYTES = 64 * MIB  # so much of the disk is left to others: a full one would harm the whole server
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Draft:
    """An image on its way in, open as `fd`. Whoever has it keeps or discards it."""

    def __init__(self, id: str, path: Path):
        self.id = id
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def check_room(self) -> None:
        """Raises Unavailable when the disk is nearly full."""
        space = os.fstatvfs(self.fd)
        if space.f_blocks and space.f_bavail * space.f_frsize < RESERVE_BYTES:
            raise errors.Unavailable(
                f"the server's disk is full, but for {RESERVE_BYTES // MIB} MiB which are kept free: its operator must "
                "make room"
            )

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class ImageFiles:
    """An image is there whole or not at all, whatever happens, a loss of power included."""

    def __init__(self, directory: Path, instance: str):
        self._directory = directory
        self._instance = instance

    def create(self) -> Draft:
        """Raises Unavailable."""
        id = f"{new_id('m')}-{self._instance}"
        path = self._directory / f"{_DRAFT}{id}"
        with disk_troubles():
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            return Draft(id, path)

    def keep(self, draft: Draft) -> int:
        """It is an image from now on; how many bytes it has. Raises Unavailable; then it is still to be discarded."""
        with disk_troubles():
            os.fsync(draft.fd)
            size = os.fstat(draft.fd).st_size
            os.rename(draft.path, self._path(draft.id))
            self._sync()
        draft.close()
        return size

    def discard(self, draft: Draft) -> None:
        """Also one that was kept, but that nobody will know of."""
        draft.close()
        draft.path.unlink(missing_ok=True)
        self._path(draft.id).unlink(missing_ok=True)

    def open(self, id: str) -> int:
        """A descriptor to read it by. Raises NotFound, Unavailable."""
        with disk_troubles():
            try:
                return os.open(self._path(id), os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                raise _gone() from None

    def size(self, id: str) -> int:
        """Raises NotFound."""
        fd = self.open(id)
        try:
            return os.fstat(fd).st_size
        finally:
            os.close(fd)

    def copy(self, id: str) -> str:
        """The same image under another id; neither notices when the other is removed. Raises NotFound, Unavailable."""
        copy = f"{new_id('m')}-{self._instance}"
        with disk_troubles():
            try:
                os.link(self._path(id), self._path(copy))  # it never changes: this is a copy that takes no room
            except FileNotFoundError:
                raise _gone() from None
            except OSError as error:  # this file system has no links, or no more of this one
                if error.errno not in (errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
                    raise
                return self._copy_bytes(id)
            self._sync()
        return copy

    def remove(self, id: str) -> None:
        """Harmless when it is not there."""
        self._path(id).unlink(missing_ok=True)

    def left(self, is_live: Callable[[str], bool]) -> list[Path]:
        """Drafts and images of host processes that are gone: none of them is made known from here on.

        Whoever looks for what nobody knows asks what is known after this, never before. Only looks.
        """
        found = []
        for path in self._directory.iterdir() if self._directory.is_dir() else ():
            made = _ID.fullmatch(path.name.removeprefix(_DRAFT))
            if made and not is_live(made[1]):
                found.append(path)
        return found

    def remove_all(self, paths: Collection[Path]) -> None:
        """Harmless for those that are not there."""
        for path in paths:
            path.unlink(missing_ok=True)

    def _copy_bytes(self, id: str) -> str:
        source, draft = self.open(id), self.create()
        try:
            with disk_troubles(), open(source, "rb") as read, open(draft.fd, "wb", closefd=False) as write:
                shutil.copyfileobj(read, write, 1 << 20)
            self.keep(draft)
        except BaseException:
            self.discard(draft)
            raise
        return draft.id

    def _sync(self) -> None:
        """A new name is kept when its directory is."""
        fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _path(self, id: str) -> Path:
        if not _ID.fullmatch(id):
            raise errors.NotFound("there is no such image")
        return self._directory / id


def abandoned_drafts(directory: Path, is_live: Callable[[str], bool]) -> list[str]:
    """The names of drafts in a directory of images whose host processes are gone. Only looks."""
    found = (_ID.fullmatch(path.name.removeprefix(_DRAFT)) for path in directory.glob(f"{_DRAFT}*"))
    return sorted(draft[0] for draft in found if draft and not is_live(draft[1]))


def _gone() -> errors.NotFound:
    return errors.NotFound("the image of these files is no longer kept")


def _disk_full() -> errors.Unavailable:
    return errors.Unavailable("the server's disk is full: its operator must make room")


@contextlib.contextmanager
def disk_troubles() -> Iterator[None]:
    """An OSError inside it is Unavailable, which says what is wrong with this host."""
    try:
        yield
    except OSError as error:
        if isinstance(error, errors.ClocheError):
            raise
        if error.errno in _FULL:
            raise _disk_full() from None
        why = error.strerror or str(error)
        raise errors.Unavailable(f"the server cannot keep or read images of files ({why})") from None
