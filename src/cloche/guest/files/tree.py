"""Surveys of the files below a directory; and protection of files below it that `user` must not change."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import time
from itertools import islice

from cloche.guest import wire
from cloche.guest.files.deep_walk import open_directory
from cloche.guest.files.write import check_regular

MAX_SURVEY_ENTRIES = 20_000
MAX_BODY_BYTES = wire.MAX_BODY_FROM_GUEST - 1024
_CHUNK = 1 << 20
_CLOCK_REALTIME_COARSE = 5  # linux/time.h; the time module does not name it
_PYTHON_CACHE = "__pycache__"
_PACKAGES = "node_modules"
_VENV = "pyvenv.cfg"
_OF_VENVS = frozenset({_VENV, "bin", "include", "lib", "lib64", "share"})
_FOLLOW_NOTHING = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOCTTY


class TreeSurvey:
    """A walk below `root` that follows no symlink.

    `known` are relative paths with the sizes that those files had: of one that still has it, the SHA-256 is
    reported. Hidden directories are skipped, and Python's caches, and directories of installed packages, unless
    something known is in them. The last are reported if they came after `since_ns`.
    """

    def __init__(self, root: str, depth: int, known: dict, since_ns: int):
        self._root = root
        self._depth = depth
        self._known = known
        self._since_ns = since_ns
        self._inhabited = {parent for path in known for parent in _parent_paths(path)}
        self._left = MAX_SURVEY_ENTRIES
        self.files: list = []
        self.empty: list = []
        self.passed: dict = {}

    def walk(self) -> bool:
        """False if there is more than can be reported."""
        waiting = [("", 1)]
        while waiting and self._left > 0:
            directory, depth = waiting.pop()
            entries = self._list_entries(directory)
            if not entries and directory and entries is not None:
                self.empty.append(directory)
            for entry in self._without_venv(directory, entries or []):
                self._survey_entry(entry, _join_path(directory, entry.name), depth, waiting)
        return not waiting and self._left > 0

    def _list_entries(self, directory: str) -> list | None:
        """The entries of a directory; None if it cannot be read."""
        try:
            with os.scandir(os.path.join(self._root, directory)) as entries:
                # Where names come and go meanwhile, one may be told twice.
                listed = {each.name: each for each in islice(entries, self._left + 1)}
                found = [listed[name] for name in sorted(listed)]
        except OSError:
            if not directory:
                raise
            self._count_skipped("unreadable")
            return None
        self._left -= len(found)
        return found

    def _survey_entry(self, entry, path: str, depth: int, waiting: list) -> None:
        try:
            path.encode()
            about = entry.stat(follow_symlinks=False)
        except UnicodeEncodeError:
            self._count_skipped("unnamed")
            return
        except OSError:
            return  # it is gone by now
        if stat.S_ISDIR(about.st_mode):
            self._enter_directory(entry.name, path, depth, waiting)
        elif stat.S_ISREG(about.st_mode):
            self.files.append([path, about.st_size, self._known_digest(path, about)])
        else:
            self._count_skipped("symlink" if stat.S_ISLNK(about.st_mode) else "special")

    def _enter_directory(self, name: str, path: str, depth: int, waiting: list) -> None:
        if path not in self._inhabited and (name.startswith(".") or name == _PYTHON_CACHE):
            self._count_skipped("hidden")
        elif path not in self._inhabited and name == _PACKAGES:
            self._count_packages(path)
        elif depth >= self._depth:
            self._count_skipped("deep")
        else:
            waiting.append((path, depth + 1))

    def _without_venv(self, directory: str, entries: list) -> list:
        """The entries without those of a virtual environment; other files beside it are the user's own."""
        if not any(entry.name == _VENV for entry in entries):
            return entries
        own = [
            each for each in entries if each.name not in _OF_VENVS or self._is_known(_join_path(directory, each.name))
        ]
        if len(own) < len(entries):
            self._count_packages(_join_path(directory, _VENV))
        return own

    def _is_known(self, path: str) -> bool:
        return path in self._known or path in self._inhabited

    def _count_packages(self, path: str) -> None:
        with contextlib.suppress(OSError):  # it is gone by now
            about = os.lstat(os.path.join(self._root, path))
            self._count_skipped("packages" if about.st_ctime_ns > self._since_ns else "hidden")

    def _count_skipped(self, why: str) -> None:
        self.passed[why] = self.passed.get(why, 0) + 1

    def _known_digest(self, path: str, about: os.stat_result) -> str | None:
        """A digest, since no time proves a file unchanged: in a tmpfs a mapping can be written unseen."""
        if self._known.get(path) != about.st_size:
            return None
        return file_digest(os.path.join(self._root, path), about.st_size)


def now_ns() -> int:
    """The time of the clock that stamps files. Later changes have this time, or a later one."""
    return time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)


def survey_tree(root: str, depth: int, known: dict, since_ns: int) -> tuple:
    """The answer to `tree_survey`."""
    at_ns = now_ns()
    found = TreeSurvey(root, depth, known, since_ns)
    whole = found.walk()
    body = json.dumps({"files": found.files, "empty": found.empty}, ensure_ascii=False).encode()
    if len(body) > MAX_BODY_BYTES:
        whole, body = False, b'{"files":[],"empty":[]}'
    return {"truncated": not whole, "passed": found.passed, "at_ns": at_ns}, body, ()


def file_digest(path: str, size: int) -> str | None:
    """The SHA-256 of a regular file of that size; None if it cannot be read, or has another size by now.

    No more is read than that: a program may make the file longer faster than it can be read.
    """
    import hashlib  # OpenSSL is large, and most inits never need it

    try:
        fd = os.open(path, _FOLLOW_NOTHING)
    except OSError:
        return None
    try:
        check_regular(fd)
        sha256, left = hashlib.sha256(), size + 1
        while left > 0 and (piece := os.read(fd, min(_CHUNK, left))):
            sha256.update(piece)
            left -= len(piece)
        return sha256.hexdigest() if left == 1 else None
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)


def guard_files(root: str, paths: list, single: bool) -> list:
    """Makes these files root's, and all directories above them up to `root` root's, for all users to add to.

    Those directories are sticky: `user` can neither rename nor remove root's files in them. With a single uid
    there is no root to give them to, and the files merely lose the permission to write. Returns the paths that
    are no files.
    """
    return [path for path in paths if not _guard_file(root, path.split("/"), single)]


def _guard_file(root: str, names: list, single: bool) -> bool:
    fds = [open_directory(root)]
    try:
        for name in names[:-1]:
            fds.append(open_directory(name, fds[-1]))
        file = os.open(names[-1], _FOLLOW_NOTHING, dir_fd=fds[-1])
        directories, fds = fds, [*fds, file]
        check_regular(file)
        _take_ownership(file, 0o444, single)
        for fd in () if single else directories:
            _take_ownership(fd, 0o1777, single)
        return True
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO):
            return False
        raise
    except ValueError:  # no regular file
        return False
    finally:
        for fd in fds:
            os.close(fd)


def _take_ownership(fd: int, mode: int, single: bool) -> None:
    if not single:
        os.fchown(fd, 0, 0)
    os.fchmod(fd, mode)


def _join_path(directory: str, name: str) -> str:
    return f"{directory}/{name}" if directory else name


def _parent_paths(path: str) -> list:
    names = path.split("/")[:-1]
    return ["/".join(names[: count + 1]) for count in range(len(names))]
