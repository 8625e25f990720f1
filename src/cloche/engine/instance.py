"""`run/<instance>/`: the directory of one live host process, held by a lock that dies with it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cloche import errors
from cloche.linux.remove_tree import remove_tree
from cloche.model import new_id

CONTROL_SOCKET = "control.sock"  # in the directory of an instance that is a server

_LOCK_NAME = "lock"
_FRESH_DRAFT_SECONDS = 3600.0


class Instance:
    """This host process. Its directory exists, and its lock is held, from `open` until `close` or death."""

    def __init__(self, run_dir: Path):
        self.name = new_id("h")
        self.directory = run_dir / self.name
        self._run_dir = run_dir
        self._lock: int | None = None

    def open(self) -> None:
        """Raises Unavailable if the directory cannot be written."""
        # Locked under another name first: no process ever sees it without its lock held.
        draft = self._run_dir / f".{self.name}"
        with errors.using_data_dir(self._run_dir.parent):
            draft.mkdir(parents=True, mode=0o700)
            self._lock = os.open(draft / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            draft.rename(self.directory)

    def close(self, *, keep: bool = False) -> None:
        """`keep`: leaves the directory, with its record of leftovers, to the next `clean`."""
        if self._lock is not None:
            if not keep:
                remove_tree(self.directory)
            os.close(self._lock)
            self._lock = None

    def disown(self) -> None:
        """In a forked child: the lock is the parent's alone."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def is_live(self, name: str) -> bool:
        """Whether the host process of that name still runs."""
        if name == self.name:
            return True
        with _try_lock(self._run_dir / name) as free:
            return not free

    def clean(self) -> list[str]:
        """Removes the directories of dead instances; returns their names."""
        dead = []
        for directory in self._run_dir.iterdir():
            if directory.name.startswith("."):
                self._clean_draft(directory)
                continue
            with _try_lock(directory) as free:
                if free and directory != self.directory:
                    remove_tree(directory)
                    dead.append(directory.name)
        return dead

    def _clean_draft(self, directory: Path) -> None:
        try:
            old = time.time() - directory.stat().st_mtime > _FRESH_DRAFT_SECONDS
        except FileNotFoundError:
            return
        if old:
            remove_tree(directory)


def dead_instances(run_dir: Path) -> list[str]:
    """The names of dead host processes whose directories are still there. Changes nothing."""
    there = run_dir.iterdir() if run_dir.is_dir() else ()
    return sorted(each.name for each in there if not each.name.startswith(".") and not _is_locked(each))


def has_live_instance(run_dir: Path) -> bool:
    """Whether any host process has that directory now. Changes nothing."""
    there = run_dir.iterdir() if run_dir.is_dir() else ()
    return any(_is_locked(each) for each in there if not each.name.startswith("."))


def live_control_sockets(run_dir: Path) -> list[Path]:
    """The control sockets of the servers that live in that directory, the newest first.

    Raises Unavailable where the directory cannot be read: that does not mean that there are none.
    """
    with errors.using_data_dir(run_dir.parent):
        _check_readable(run_dir)
    found = [path for path in run_dir.glob(f"[!.]*/{CONTROL_SOCKET}") if _is_locked(path.parent)]
    return sorted(found, key=_modified_at, reverse=True)


def find_instance_pid(run_dir: Path, name: str) -> int | None:
    """The pid of the host process of that name; None where the kernel does not tell."""
    try:
        found = (run_dir / name / _LOCK_NAME).stat()
        held = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    lines = (line.split() for line in held)
    return next((int(line[4]) for line in lines if line[1] == "FLOCK" and line[5] == place and int(line[4]) > 0), None)


def _check_readable(run_dir: Path) -> None:
    """Raises OSError where a process may have a directory that this user cannot see."""
    try:
        there = [each.path for each in os.scandir(run_dir) if not each.name.startswith(".")]
    except FileNotFoundError:
        return
    for path in there:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # it ended just now, or never was one
            os.scandir(path).close()


def _is_locked(directory: Path) -> bool:
    with _try_lock(directory) as free:
        return not free


def _modified_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # it ended just now
        return 0.0


@contextmanager
def _try_lock(directory: Path) -> Iterator[bool]:
    """Holds the lock of an instance; False if its process holds it. True also where there is no such instance."""
    try:
        fd = os.open(directory / _LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield True
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two that look at once do not take each other for it
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(fd)
