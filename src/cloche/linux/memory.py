"""How much memory this host has left: all of it, or what the cgroups allow in which this process runs."""

from __future__ import annotations

import os

from cloche.linux.own_cgroups import directories, number_in, read

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
