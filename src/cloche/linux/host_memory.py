"""The cgroups that this process is in, with all above them: whose limits bound whatever it does."""

from __future__ import annotations

import os
from collections.abc import Iterator

ROOT = "/sys/fs/cgroup"


def directories(controller: str, memberships: str | None = None, root: str = ROOT) -> list[str]:
    """Of v2, and of that controller where it is in v1; the own one first. Some may not be visible from here.

    `memberships`: as in /proc/self/cgroup, which is read where it is not given.
    """
    lines = (read("/proc/self/cgroup") or "") if memberships is None else memberships
    found: list[str] = []
    for line in lines.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += _upwards(root, path)
        elif controller in controllers.split(","):
            found += _upwards(f"{root}/{controller}", path)
    return found


def number_in(directory: str, name: str) -> int | None:
    """What a file of a cgroup says; None where there is none, or where it says no number, such as `max`."""
    said = (read(f"{directory}/{name}") or "").strip()
    return int(said) if said.isdigit() else None


def read(path: str) -> str | None:
    """None where it cannot be."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return None


def _upwards(root: str, path: str) -> Iterator[str]:
    while path.strip("/"):
        yield root + path
        path = os.path.dirname(path)
    yield root


# How much memory this host has left: all of it, or what the cgroups allow in which this process runs.

MEMINFO = "/proc/meminfo"
_TOLD = b"MemAvailable:"
_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))  # of v2 and v1
_HIGHEST = 1 << 60  # a v1 cgroup without a limit says a number about as large as that


def available_bytes() -> int | None:
    """What programs can still be given without anything being pushed out; None where this host does not tell."""
    told = [each for each in (_of_host(), *map(left_in, _LIMITED)) if each is not None]
    return min(told) if told else None


def left_in(directory: str) -> int | None:
    """Of a cgroup's limit, None where it has none. What it merely caches counts as left."""
    for most, used in _FILES:
        limit, usage = number_in(directory, most), number_in(directory, used)
        if limit is not None and usage is not None and limit < _HIGHEST:
            return max(limit - usage + _cached(directory), 0)
    return None


def _of_host() -> int | None:
    """Looked at for every sandbox that is made, so by bare calls."""
    try:
        fd = os.open(MEMINFO, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        told = os.read(fd, 4096)
    finally:
        os.close(fd)
    at = told.find(_TOLD)
    return int(told[at + len(_TOLD) :].split(None, 1)[0]) << 10 if at >= 0 else None


def _cached(directory: str) -> int:
    """What is in v1 of those below, too, is `total_`."""
    sizes = dict(line.split(" ", 1) for line in (read(f"{directory}/memory.stat") or "").splitlines() if " " in line)
    return int(sizes.get("total_inactive_file", sizes.get("inactive_file", "0")))


_LIMITED = tuple(each for each in directories("memory") if left_in(each) is not None)  # looked for once
