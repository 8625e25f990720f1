"""Making directories, for whoever shall own them."""

from __future__ import annotations

import errno
import os

MODE = 0o755


def make(path: str, owner: tuple | None = None) -> bool:
    """Makes a directory and those above it, all of them `owner`'s; else the caller's. False if it was there.

    Not os.makedirs, which recurses: a path may have two thousand parts.
    """
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for each in reversed(missing):
        _make_one(each, owner)
    return bool(missing)


def _make_one(path: str, owner: tuple | None) -> None:
    try:
        os.mkdir(path, MODE)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
        return  # somebody was faster
    if owner is not None:
        os.lchown(path, *owner)


# Extended attributes of files: those that begin with `user.`, which any program may set.

PREFIX = "user."
MAX_BYTES = 8192  # of one file's names and values together, in what is told of it
_NONE = frozenset({errno.ENOTSUP, errno.ENODATA, errno.ENOENT, errno.EACCES, errno.EPERM, errno.ERANGE, errno.E2BIG})


def read(file: str | int) -> dict:
    """Names, without their prefix, and values as text. What is over MAX_BYTES is left out. A symlink has none."""
    found, size = {}, 0
    for name in _names(file):
        value = _value(file, name)
        size += len(name) + len(value or "")
        if size > MAX_BYTES:
            break
        if value is not None:
            found[_text(os.fsencode(name[len(PREFIX) :]))] = value
    return found


def replace(fd: int, space: str, values: dict) -> None:
    """Those below `user.SPACE.` are these from now on. Raises OSError that says so where a file can have none."""
    before = PREFIX + space + "."
    for name in _names(fd):
        if name.startswith(before) and name[len(before) :] not in values:
            os.removexattr(fd, name)
    for name, value in values.items():
        _set(fd, before + name, value.encode())


def copy(source: int, target: int) -> None:
    for name in _names(source):
        try:
            os.setxattr(target, name, os.getxattr(source, name))
        except OSError as error:
            if error.errno not in _NONE:
                raise


def _set(fd: int, name: str, value: bytes) -> None:
    try:
        os.setxattr(fd, name, value)
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        why = "files here cannot have metadata: the host needs Linux 6.6 or newer for that"
        raise OSError(errno.ENOTSUP, why) from None


def _names(file: str | int) -> list:
    try:
        names = os.listxattr(file, follow_symlinks=isinstance(file, int))
    except OSError as error:
        if error.errno not in _NONE:
            raise
        return []
    return sorted(name for name in names if name.startswith(PREFIX))


def _value(file: str | int, name: str) -> str | None:
    try:
        return _text(os.getxattr(file, name, follow_symlinks=isinstance(file, int)))
    except OSError:
        return None  # gone by now


def _text(content: bytes) -> str:
    return content.decode("utf-8", "replace")
