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
