"""Images of sandboxes' files in a directory, one file each. The host never reads their contents.

All functions block: call them in threads.
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
_IMAGE_ID = re.compile(r"m[a-z0-9]{20}-([a-z0-9]{1,64})")
RESERVE_BYTES = 64 * MIB  # so much of the disk is left to others: a full one would harm the whole server
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class ImageDraft:
    """An image that is being written, open as `fd`. Its holder keeps or discards it."""

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
    """The directory of images. An image is there whole or not at all, even after a loss of power."""

    def __init__(self, directory: Path, instance: str):
        self._directory = directory
        self._instance = instance

    def create(self) -> ImageDraft:
        """Raises Unavailable."""
        id = f"{new_id('m')}-{self._instance}"
        path = self._directory / f"{_DRAFT}{id}"
        with translate_disk_errors():
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            return ImageDraft(id, path)

    def keep(self, draft: ImageDraft) -> int:
        """Makes the draft an image and returns its size. Raises Unavailable; then it is still to be discarded."""
        with translate_disk_errors():
            os.fsync(draft.fd)
            size = os.fstat(draft.fd).st_size
            os.rename(draft.path, self._image_path(draft.id))
            self._sync_directory()
        draft.close()
        return size

    def discard(self, draft: ImageDraft) -> None:
        """Discards a draft, also one that was kept but not registered."""
        draft.close()
        draft.path.unlink(missing_ok=True)
        self._image_path(draft.id).unlink(missing_ok=True)

    def open(self, id: str) -> int:
        """Returns a descriptor for reading. Raises NotFound, Unavailable."""
        with translate_disk_errors():
            try:
                return os.open(self._image_path(id), os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                raise _image_gone() from None

    def size(self, id: str) -> int:
        """Raises NotFound."""
        fd = self.open(id)
        try:
            return os.fstat(fd).st_size
        finally:
            os.close(fd)

    def copy(self, id: str) -> str:
        """Copies the image to a new id; removing one does not affect the other. Raises NotFound, Unavailable."""
        copy = f"{new_id('m')}-{self._instance}"
        with translate_disk_errors():
            try:
                os.link(
                    self._image_path(id), self._image_path(copy)
                )  # it never changes: this is a copy that takes no room
            except FileNotFoundError:
                raise _image_gone() from None
            except OSError as error:  # this file system has no links, or no more of this one
                if error.errno not in (errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
                    raise
                return self._copy_bytes(id)
            self._sync_directory()
        return copy

    def remove(self, id: str) -> None:
        """Removes the image; a missing one is ignored."""
        self._image_path(id).unlink(missing_ok=True)

    def left(self, is_live: Callable[[str], bool]) -> list[Path]:
        """Returns drafts and images of dead host processes: none of them is registered from here on.

        A search for unregistered images lists the registered ones after this call, never before. Removes nothing.
        """
        found = []
        for path in self._directory.iterdir() if self._directory.is_dir() else ():
            made = _IMAGE_ID.fullmatch(path.name.removeprefix(_DRAFT))
            if made and not is_live(made[1]):
                found.append(path)
        return found

    def remove_all(self, paths: Collection[Path]) -> None:
        """Removes the files; missing ones are ignored."""
        for path in paths:
            path.unlink(missing_ok=True)

    def _copy_bytes(self, id: str) -> str:
        source, draft = self.open(id), self.create()
        try:
            with translate_disk_errors(), open(source, "rb") as read, open(draft.fd, "wb", closefd=False) as write:
                shutil.copyfileobj(read, write, 1 << 20)
            self.keep(draft)
        except BaseException:
            self.discard(draft)
            raise
        return draft.id

    def _sync_directory(self) -> None:
        """Syncs the directory, which makes a new name durable."""
        fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _image_path(self, id: str) -> Path:
        if not _IMAGE_ID.fullmatch(id):
            raise errors.NotFound("there is no such image")
        return self._directory / id


def abandoned_drafts(directory: Path, is_live: Callable[[str], bool]) -> list[str]:
    """Returns the names of drafts of dead host processes in a directory of images. Removes nothing."""
    found = (_IMAGE_ID.fullmatch(path.name.removeprefix(_DRAFT)) for path in directory.glob(f"{_DRAFT}*"))
    return sorted(draft[0] for draft in found if draft and not is_live(draft[1]))


def _image_gone() -> errors.NotFound:
    return errors.NotFound("the image of these files is no longer kept")


def _disk_full_error() -> errors.Unavailable:
    return errors.Unavailable("the server's disk is full: its operator must make room")


@contextlib.contextmanager
def translate_disk_errors() -> Iterator[None]:
    """Translates an OSError to Unavailable, with an explanation of the problem on this host."""
    try:
        yield
    except OSError as error:
        if isinstance(error, errors.ClocheError):
            raise
        if error.errno in _FULL:
            raise _disk_full_error() from None
        why = error.strerror or str(error)
        raise errors.Unavailable(f"the server cannot keep or read images of files ({why})") from None
