"""The files below the data directory that a cell made or changed."""

from __future__ import annotations

import grp
import os
import pwd
import stat
import time
from collections.abc import Iterator

DATA_DIRECTORY = "/mnt/data"
MAX_SCANNED_ENTRIES = 1000

_CLOCK_REALTIME_COARSE = 5  # linux/time.h; the time module does not name it


class WrittenFiles:
    """Records the state of the data directory at `start()`; `changed()` returns the differences since."""

    def __init__(self) -> None:
        self._seen: dict = {}
        self._since_ns = 0
        self._empty_ns = 0  # when the directory had been changed last, and was seen to be empty since; 0: it was not

    def start(self) -> None:
        """A cell begins: earlier changes, for instance uploads, are not its own."""
        # The coarse clock is the one that stamps files; the exact one may be ahead of it.
        self._since_ns = time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)
        self._seen = {path: _change_key(info) for path, info in self._list_files()}

    def changed(self) -> list:
        """FileInfo fields of regular files changed since `start`.

        Looks at no more than MAX_SCANNED_ENTRIES entries.
        """
        # The times exclude files that `start` did not see because there were too many.
        return [
            _file_fields(path, info)
            for path, info in self._list_files()
            if info.st_ctime_ns >= self._since_ns and self._seen.get(path) != _change_key(info)
        ]

    def _list_files(self) -> list:
        """(path, stat) of those that are there; most cells have none, which then is known without looking inside."""
        if self._empty_ns and _changed_ns() == self._empty_ns:
            return []
        found = list(_walk_files(DATA_DIRECTORY))
        self._empty_ns = 0 if found else _empty_since_ns()
        return found


def _changed_ns() -> int:
    """The time of the directory's last change (ctime, which programs cannot set); 0 if there is none."""
    try:
        return os.stat(DATA_DIRECTORY).st_ctime_ns
    except OSError:
        return 0


def _empty_since_ns() -> int:
    """The time of its last change, if the directory is empty: for as long as it has that time, it still is. Else 0.

    Changes within one tick of the clock that stamps them have the same time, so that the tick must be over.
    """
    changed_ns, now_ns = _changed_ns(), time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)
    try:
        return changed_ns if changed_ns < now_ns and not os.listdir(DATA_DIRECTORY) else 0
    except OSError:
        return 0


def _change_key(info: os.stat_result) -> tuple:
    return (info.st_mtime_ns, info.st_size, info.st_ino)


def _walk_files(directory: str) -> Iterator:
    """(path, stat) of regular files, parents first; symlinks are not followed."""
    pending, left = [directory], MAX_SCANNED_ENTRIES
    while pending:
        try:
            entries = os.scandir(pending.pop())
        except OSError:
            continue
        with entries:
            for entry in entries:
                if not left:
                    return
                left -= 1
                try:
                    info = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                if stat.S_ISDIR(info.st_mode):
                    pending.append(entry.path)
                elif stat.S_ISREG(info.st_mode):
                    yield entry.path, info


def _file_fields(path: str, info: os.stat_result) -> dict:
    return {
        "path": path,
        "name": os.path.basename(path),
        "kind": "file",
        "size_bytes": info.st_size,
        "mode": stat.S_IMODE(info.st_mode),
        "owner": _user_name(info.st_uid),
        "group": _group_name(info.st_gid),
        "modified_at": info.st_mtime,
    }


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
