"""Moves and removals of files and whole trees, however deep a program made them: no recursion."""

from __future__ import annotations

import errno
import os
import stat

from cloche.guest.files import directories, ranges
from cloche.guest.files import write as drafts
from cloche.guest.files.deep_walk import open_directory

MAX_REMOVED = 2_000_000
_CHUNK = 1 << 20


def move_path(source: str, target: str, owner: tuple | None = None) -> str:
    """Moves a file or a directory, and gives its new path: a file moved to a directory lands in it.

    Directories that are made for it are `owner`'s, else the caller's.
    """
    is_directory = stat.S_ISDIR(os.lstat(source).st_mode)
    if os.path.isdir(target) and not is_directory:
        target = f"{target}/{os.path.basename(source)}"
    directories.make_directories(os.path.dirname(target), owner)
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _move_across(source, target)
    return target


def _move_across(source: str, target: str) -> None:
    """A move between mounts is a copy (and a sandbox's writable places are several mounts of one file system).

    The first rename proves that the caller may take it away: nothing is copied that could not be removed, such as
    the template's files, or /proc, which would be init's own.
    """
    leaving, arriving = drafts.draft_path(source), drafts.draft_path(target)
    os.rename(source, leaving)
    try:
        _copy_tree(leaving, arriving)
        os.rename(arriving, target)
    except BaseException:
        os.rename(leaving, source)
        if os.path.lexists(arriving):
            remove_path(arriving)
        raise
    remove_path(leaving)


def _copy_tree(source: str, target: str) -> None:
    waiting, directories = [(source, target)], []
    while waiting:
        one, other = waiting.pop()
        about = os.lstat(one)
        if stat.S_ISDIR(about.st_mode):
            os.mkdir(other, 0o700)
            directories.append((one, other, about))
            waiting += [(f"{one}/{name}", f"{other}/{name}") for name in os.listdir(one)]
        elif stat.S_ISLNK(about.st_mode):
            os.symlink(os.readlink(one), other)
            _copy_owner(other, about)
        else:
            _copy_file(one, other)
    for one, other, about in reversed(directories):  # last, or a read-only directory could not be filled
        mode = stat.S_IMODE(about.st_mode)
        _copy_owner(other, about)
        os.chmod(other, mode)
        os.utime(other, ns=(about.st_atime_ns, about.st_mtime_ns))
        if mode & 0o700 != 0o700:
            os.chmod(one, mode | 0o700)  # nor could it be emptied


def _copy_file(source: str, target: str) -> None:
    """A program may put a symlink or a pipe there meanwhile: only the opened file counts."""
    read = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        about = drafts.check_regular(read)
        write = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _copy_data(read, write, about.st_size)
            directories.copy_attributes(read, write)
            _copy_owner(write, about)
            os.fchmod(write, stat.S_IMODE(about.st_mode))
            os.utime(write, ns=(about.st_atime_ns, about.st_mtime_ns))
        finally:
            os.close(write)
    finally:
        os.close(read)


def _copy_owner(copy: str | int, about: os.stat_result) -> None:
    """Gives the copy the original's owner, where the caller may do that."""
    try:
        if isinstance(copy, int):
            os.fchown(copy, about.st_uid, about.st_gid)
        else:
            os.lchown(copy, about.st_uid, about.st_gid)
    except PermissionError:
        pass


def _copy_data(read: int, write: int, size: int) -> None:
    """Holes stay holes."""
    at = 0
    while (at := ranges.next_data(read, at, size)) < size:
        end = ranges.next_hole(read, at, size)
        os.lseek(write, at, os.SEEK_SET)
        while at < end and (moved := ranges.send_some(write, read, at, min(end - at, _CHUNK))):
            at += moved
        if at < end:
            break  # cut short meanwhile
    os.ftruncate(write, size)


def remove_path(path: str) -> None:
    """Removes a file, or a directory with all that is in it."""
    if stat.S_ISDIR(os.lstat(path).st_mode):
        remove_tree(path)
    else:
        os.unlink(path)


def remove_tree(path: str) -> None:
    """Removes a directory with all that is in it, however deep a program made it: no recursion, two descriptors.

    Directories in a directory are moved up to the top before it is removed.
    """
    top = open_directory(path)
    try:
        waiting, left = os.listdir(top), MAX_REMOVED
        while waiting:
            name = waiting.pop()
            left -= 1
            if left < 0:
                raise OSError(errno.EBUSY, "more comes in than can be removed")
            if _is_directory(name, top):
                waiting += _remove_directory(name, top)
            else:
                os.unlink(name, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(path)


def _remove_directory(name: str, top: int) -> list:
    """Removes one directory; those in it are now in `top`, under the names that are returned."""
    moved = []
    inner = open_directory(name, top)
    try:
        for child in os.listdir(inner):
            if _is_directory(child, inner):
                moved.append(f".cloche-{os.urandom(8).hex()}")
                os.rename(child, moved[-1], src_dir_fd=inner, dst_dir_fd=top)
            else:
                os.unlink(child, dir_fd=inner)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=top)
    return moved


def _is_directory(name: str, parent: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
