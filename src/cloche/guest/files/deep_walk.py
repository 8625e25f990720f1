"""A stack of open directories on the way down into a tree.

However deep it is, the number of open ones is bounded.
"""

from __future__ import annotations

import errno
import os

_READ = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_LOCATE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_AT_ONCE = 256


def open_directory(name: str | bytes, parent: int | None = None, flags: int = 0) -> int:
    """Opens a directory that is no symlink. Raises OSError.

    In two steps: gVisor follows a symlink if O_DIRECTORY comes with O_NOFOLLOW, and does not with O_PATH.
    """
    place = os.open(name, _LOCATE, dir_fd=parent)
    try:
        return os.open(".", _READ | flags, dir_fd=place)
    finally:
        os.close(place)


class _OpenDirectory:
    __slots__ = ("fd", "identity", "load")

    def __init__(self, fd: int, load):
        self.fd = fd  # -1 while it is closed
        self.identity: tuple = ()
        self.load = load


class DirectoryStack:
    """Each level is an open directory with the data (`load`) that its user attached."""

    def __init__(self) -> None:
        self._levels: list = []

    def __len__(self) -> int:
        return len(self._levels)

    @property
    def fd(self) -> int:
        """The descriptor of the current directory."""
        return self._levels[-1].fd

    @property
    def load(self):
        return self._levels[-1].load

    def enter(self, fd: int, load=None) -> None:
        """Enters a directory. Owns `fd` from now on."""
        self._levels.append(_OpenDirectory(fd, load))
        if len(self._levels) > _OPEN_AT_ONCE + 1:  # the first one stays open
            self._close_level(self._levels[-_OPEN_AT_ONCE])

    def leave(self) -> None:
        """Returns to the directory above.

        Raises OSError if that is another one by now: a program has moved this one.
        """
        left = self._levels.pop()
        try:
            if self._levels and self._levels[-1].fd < 0:
                self._reopen_level(self._levels[-1], left.fd)
        finally:
            os.close(left.fd)

    def _close_level(self, level: _OpenDirectory) -> None:
        level.identity = _directory_identity(level.fd)
        os.close(level.fd)
        level.fd = -1

    def _reopen_level(self, level: _OpenDirectory, below: int) -> None:
        level.fd = os.open("..", _READ, dir_fd=below)
        if _directory_identity(level.fd) != level.identity:
            raise OSError(errno.EBUSY, "a directory was moved meanwhile")


def _directory_identity(fd: int) -> tuple:
    about = os.fstat(fd)
    return about.st_dev, about.st_ino
