"""Limits of one process that back up, or stand in for, those of the sandbox's cgroups."""

from __future__ import annotations

import resource


def limit_process(
    processes: int | None = None,
    data_bytes: int | None = None,
    open_files: int | None = None,
    reserved_bytes: int | None = None,
    **_: int,
) -> None:
    """Sets them on the calling process, which cannot raise them again, and on its children.

    The zygote's memory in a process comes on top: it is shared, and more than a small limit leaves. That is
    `reserved_bytes`, or all that this process has; the same for all of a sandbox, whether they have it or not.
    """
    data_bytes = data_bytes and data_bytes + (reserved_bytes or own_data_bytes())
    wanted = (
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_DATA, data_bytes),
        (resource.RLIMIT_NOFILE, open_files),
    )
    for kind, value in wanted:
        if value:
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))


def own_data_bytes() -> int:
    """The bytes that count against RLIMIT_DATA now, and the stack."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[5]) * resource.getpagesize()
