"""Limits of one process that back up, or stand in for, those of the sandbox's cgroups."""

from __future__ import annotations

import os
import resource

# Scores of oom_score_adj: thousandths of the sandbox's limit that count as a process's own when memory is short. So
# commands are killed first, then a kernel that executes, an idle one last. A kernel shares a hundred megabytes with the
# zygote, which count as its own: a command's lead must be more than that.
OOM_COMMAND = b"1000"
OOM_EXECUTING = b"300"
OOM_IDLE = b"0"


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


def prefer_for_oom_kill() -> None:
    """Gives the calling process, and its children, the score of a command."""
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return  # a host without walls may hide its /proc
    os.write(fd, OOM_COMMAND)
    os.close(fd)
