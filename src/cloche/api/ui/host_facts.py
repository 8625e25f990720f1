"""What the host has, and how much of it is used: what the page of its health shows beside the engine's own numbers."""

from __future__ import annotations

import os
import platform
import shutil
import sqlite3
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("cloche", "starlette", "uvicorn", "uvloop", "msgspec")
BLOCK_BYTES = 512  # in which `st_blocks` counts, whatever the file system has
_PLAIN = {
    "templates": "templates, with their packages",
    "images": "snapshots, paused sandboxes and volumes",
    "blobs": "uploaded files",
    "cache": "packages that were fetched",
    "audit": "the audit log",
    "run": "what servers that run need",
    "builds": "logs of builds",
    "secret": "what tokens are signed with",
}


class Disk(NamedTuple):
    """Of the data directory's file system."""

    path: str
    free_bytes: int
    total_bytes: int

    @property
    def used_part(self) -> float:
        return 1 - self.free_bytes / self.total_bytes if self.total_bytes else 0.0


class Part(NamedTuple):
    """Of the data directory."""

    name: str
    what: str
    size_bytes: int


def disk_of(data_dir: str) -> Disk | None:
    """None where it cannot be told."""
    try:
        found = shutil.disk_usage(data_dir)
    except OSError:
        return None
    return Disk(data_dir, found.free, found.total)


def parts_of(data_dir: str) -> list[Part]:
    """What takes room, the largest first. It looks at every file: in a thread."""
    found: dict[str, int] = {}
    for entry in _entries(data_dir):
        name = "store" if entry.name.startswith("store.") else entry.name
        found[name] = found.get(name, 0) + _size(entry)
    parts = (Part(name, _PLAIN.get(name, "records" if name == "store" else ""), size) for name, size in found.items())
    return sorted(parts, key=lambda each: -each.size_bytes)


def _size(entry: os.DirEntry[str]) -> int:
    """With all below it. What goes meanwhile, or may not be seen, counts for nothing."""
    try:
        own = entry.stat(follow_symlinks=False).st_blocks * BLOCK_BYTES
    except OSError:
        return 0
    if not entry.is_dir(follow_symlinks=False):
        return own
    return own + sum(_size(each) for each in _entries(entry.path))


def _entries(directory: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as found:
            yield from found
    except OSError:
        return


def versions() -> list[tuple[str, str]]:
    """Of what matters when somebody asks what is wrong."""
    own = [(name.capitalize() if name == "cloche" else name, version(name)) for name in PACKAGES]
    host = [("Python", platform.python_version()), ("Linux", platform.release()), ("SQLite", sqlite3.sqlite_version)]
    return [own[0], *host, *own[1:]]


def memory_of_server() -> int | None:
    """Of this process; None where the host does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def uptime_seconds() -> float:
    """Of this process."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
