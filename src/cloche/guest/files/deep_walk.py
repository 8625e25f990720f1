"""The way down into a tree of directories, as descriptors. However deep it is, only so many are open at once."""

from __future__ import annotations

import errno
import os

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_AT_ONCE = 256


class _Level:
    __slots__ = ("fd", "identity", "load")

    def __init__(self, fd: int, load):
        self.fd = fd  # -1 while it is closed
        self.identity: tuple = ()
        self.load = load


class Descent:
    """Each level is an open directory, and whatever its user keeps with it."""

    def __init__(self) -> None:
        self._levels: list = []

    def __len__(self) -> int:
        return len(self._levels)

    @property
    def fd(self) -> int:
        """Of the directory that it has come to."""
        return self._levels[-1].fd

    @property
    def load(self):
        return self._levels[-1].load

    def enter(self, fd: int, load=None) -> None:
        """Owns `fd` from now on."""
        self._levels.append(_Level(fd, load))
        if len(self._levels) > _OPEN_AT_ONCE + 1:  # the first one stays open
            self._close(self._levels[-_OPEN_AT_ONCE])

    def leave(self) -> None:
        """Back to the directory above. Raises OSError if that is another one by now: somebody has moved this one."""
        left = self._levels.pop()
        try:
            if self._levels and self._levels[-1].fd < 0:
                self._open(self._levels[-1], left.fd)
        finally:
            os.close(left.fd)

    def _close(self, level: _Level) -> None:
        level.identity = _identity(level.fd)
        os.close(level.fd)
        level.fd = -1

    def _open(self, level: _Level, below: int) -> None:
        level.fd = os.open("..", DIRECTORY, dir_fd=below)
        if _identity(level.fd) != level.identity:
            raise OSError(errno.EBUSY, "a directory was moved meanwhile")


def _identity(fd: int) -> tuple:
    about = os.fstat(fd)
    return about.st_dev, about.st_ino
