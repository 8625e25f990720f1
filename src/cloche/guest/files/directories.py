"""Creation of directories on behalf of their owner."""

from __future__ import annotations

import errno
import os

DIRECTORY_MODE = 0o755


def make_directories(path: str, owner: tuple | None = None) -> bool:
    """Makes a directory and those above it, all of them `owner`'s; else the caller's. False if it was there.

    Not os.makedirs, which recurses: a path may have two thousand parts.
    """
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for each in reversed(missing):
        _make_directory(each, owner)
    return bool(missing)


def _make_directory(path: str, owner: tuple | None) -> None:
    try:
        os.mkdir(path, DIRECTORY_MODE)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
        return  # somebody was faster
    if owner is not None:
        os.lchown(path, *owner)


# Extended attributes of files: those that begin with `user.`, which any program may set.

ATTRIBUTE_PREFIX = "user."
MAX_ATTRIBUTES_BYTES = 8192  # of one file's names and values together, in what is told of it
_NO_ATTRIBUTES = frozenset(
    {errno.ENOTSUP, errno.ENODATA, errno.ENOENT, errno.EACCES, errno.EPERM, errno.ERANGE, errno.E2BIG}
)


def read_attributes(file: str | int) -> dict:
    """Names, without their prefix, and values as text, up to MAX_ATTRIBUTES_BYTES in all. A symlink has none."""
    found, size = {}, 0
    for name in _attribute_names(file):
        value = _attribute_value(file, name)
        size += len(name) + len(value or "")
        if size > MAX_ATTRIBUTES_BYTES:
            break
        if value is not None:
            found[_decode_attribute(os.fsencode(name[len(ATTRIBUTE_PREFIX) :]))] = value
    return found


def replace_attributes(fd: int, space: str, values: dict) -> None:
    """Replaces all attributes below `user.SPACE.` by these.

    Raises OSError that says so where a file can have none.
    """
    before = ATTRIBUTE_PREFIX + space + "."
    for name in _attribute_names(fd):
        if name.startswith(before) and name[len(before) :] not in values:
            os.removexattr(fd, name)
    for name, value in values.items():
        _set_attribute(fd, before + name, value.encode())


def copy_attributes(source: int, target: int) -> None:
    for name in _attribute_names(source):
        try:
            os.setxattr(target, name, os.getxattr(source, name))
        except OSError as error:
            if error.errno not in _NO_ATTRIBUTES:
                raise


def _set_attribute(fd: int, name: str, value: bytes) -> None:
    try:
        os.setxattr(fd, name, value)
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        why = "files here cannot have metadata: the host needs Linux 6.6 or newer for that"
        raise OSError(errno.ENOTSUP, why) from None


def _attribute_names(file: str | int) -> list:
    try:
        names = os.listxattr(file, follow_symlinks=isinstance(file, int))
    except OSError as error:
        if error.errno not in _NO_ATTRIBUTES:
            raise
        return []
    return sorted(name for name in names if name.startswith(ATTRIBUTE_PREFIX))


def _attribute_value(file: str | int, name: str) -> str | None:
    try:
        return _decode_attribute(os.getxattr(file, name, follow_symlinks=isinstance(file, int)))
    except OSError:
        return None  # gone by now


def _decode_attribute(content: bytes) -> str:
    return content.decode("utf-8", "replace")
