"""The cgroups of this process, with all above them: their limits bound it."""

from __future__ import annotations

import os
from collections.abc import Iterator

CGROUP_ROOT = "/sys/fs/cgroup"


def cgroup_directories(controller: str, memberships: str | None = None, root: str = CGROUP_ROOT) -> list[str]:
    """The directories, of v2, and of that controller where it is in v1; the own one first.

    Some may not be visible.

    `memberships`: as in /proc/self/cgroup, which is read where it is not given.
    """
    lines = (read_text("/proc/self/cgroup") or "") if memberships is None else memberships
    found: list[str] = []
    for line in lines.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += _paths_upwards(root, path)
        elif controller in controllers.split(","):
            found += _paths_upwards(f"{root}/{controller}", path)
    return found


def read_number(directory: str, name: str) -> int | None:
    """The number in a file of a cgroup; None where there is no such file, or no number in it, such as `max`."""
    said = (read_text(f"{directory}/{name}") or "").strip()
    return int(said) if said.isdigit() else None


def read_text(path: str) -> str | None:
    """The text of a file; None where it cannot be read."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return None


def _paths_upwards(root: str, path: str) -> Iterator[str]:
    while path.strip("/"):
        yield root + path
        path = os.path.dirname(path)
    yield root


# The memory that this host has left: all of it, or the rest that this process's cgroups allow.

MEMINFO = "/proc/meminfo"
_AVAILABLE_KEY = b"MemAvailable:"
_LIMIT_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))  # of v2 and v1
_HIGHEST = 1 << 60  # a v1 cgroup without a limit says a number about as large as that


def available_bytes() -> int | None:
    """The bytes that programs can be given without pushing anything out; None where the host does not tell."""
    told = [each for each in (_host_available_bytes(), *map(cgroup_bytes_left, _LIMITED_CGROUPS)) if each is not None]
    return min(told) if told else None


def cgroup_bytes_left(directory: str) -> int | None:
    """The rest of a cgroup's limit; None where it has none. Cached pages count as left."""
    for most, used in _LIMIT_FILES:
        limit, usage = read_number(directory, most), read_number(directory, used)
        if limit is not None and usage is not None and limit < _HIGHEST:
            return max(limit - usage + _cached_bytes(directory), 0)
    return None


def _host_available_bytes() -> int | None:
    """Read for every sandbox that is made, so by bare calls."""
    try:
        fd = os.open(MEMINFO, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        told = os.read(fd, 4096)
    finally:
        os.close(fd)
    at = told.find(_AVAILABLE_KEY)
    return int(told[at + len(_AVAILABLE_KEY) :].split(None, 1)[0]) << 10 if at >= 0 else None


def _cached_bytes(directory: str) -> int:
    """Bytes of inactive file cache. In v1 the sum with the groups below is `total_`."""
    sizes = dict(
        line.split(" ", 1) for line in (read_text(f"{directory}/memory.stat") or "").splitlines() if " " in line
    )
    return int(sizes.get("total_inactive_file", sizes.get("inactive_file", "0")))


_LIMITED_CGROUPS = tuple(
    each for each in cgroup_directories("memory") if cgroup_bytes_left(each) is not None
)  # looked for once
