"""Control files of version 1: one directory per hierarchy.

Each class stands for one controller of one group.
"""

from __future__ import annotations

import errno
import os

from cloche.linux.cgroups.files import FileBytes, Hierarchy, file_bytes, read_control, read_field, write_control

CPU_PERIOD_US = 100_000
_LEAST_QUOTA_US = 1000


def unusable_reason(hierarchy: Hierarchy) -> str:
    """Why groups cannot be made below the process's own in this hierarchy; empty if they can."""
    if hierarchy.own is None:
        return "the process's own group is not among those mounted"
    if not os.access(hierarchy.own, os.W_OK) or not os.access(os.path.join(hierarchy.own, "cgroup.procs"), os.W_OK):
        return "cgroup v1 takes root, with the hierarchy mounted writable"
    return ""


class MemoryV1:
    def __init__(self, directory: bytes) -> None:
        self._directory = directory

    def limit(self, size_bytes: int) -> None:
        """Limits memory, and memory and swap together to the same, so that nothing is swapped."""
        value = b"%d" % size_bytes
        try:
            write_control(self._directory + b"/memory.limit_in_bytes", value)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # It would be above the limit of both, as when it is raised: the other one first.
            self._limit_with_swap(value)
            write_control(self._directory + b"/memory.limit_in_bytes", value)
        else:
            self._limit_with_swap(value)

    def _limit_with_swap(self, value: bytes) -> None:
        try:
            write_control(self._directory + b"/memory.memsw.limit_in_bytes", value)
        except FileNotFoundError:
            pass  # a kernel that does not account for swap

    def limit_sockets(self, size_bytes: int) -> None:
        """Limits the buffers of TCP and UDP, which count apart from memory; -1 only begins to count.

        The first group that counts makes the kernel change its code, for a millisecond and as long as there is one.
        """
        try:
            write_control(self._directory + b"/memory.kmem.tcp.limit_in_bytes", b"%d" % size_bytes)
        except FileNotFoundError:
            pass  # a kernel without the limit

    def used_bytes(self) -> int:
        return int(read_control(self._directory + b"/memory.usage_in_bytes"))

    def file_bytes(self) -> FileBytes:
        return file_bytes(self._directory + b"/memory.stat", b"cache")

    def peak_bytes(self) -> int:
        return int(read_control(self._directory + b"/memory.max_usage_in_bytes"))

    def oom_kills(self) -> int:
        return read_field(self._directory + b"/memory.oom_control", b"oom_kill")


class CpuV1:
    def __init__(self, directory: bytes) -> None:
        self._directory = directory

    def limit(self, cpus: float) -> None:
        # The period of a new group is 100 ms already.
        write_control(self._directory + b"/cpu.cfs_quota_us", b"%d" % max(_LEAST_QUOTA_US, cpus * CPU_PERIOD_US))


class CpuClockV1:
    """CPU time, from the cpuacct controller."""

    def __init__(self, directory: bytes) -> None:
        self._directory = directory

    def seconds(self) -> float:
        return int(read_control(self._directory + b"/cpuacct.usage")) / 1e9


class PidsController:
    """The same files in both versions."""

    def __init__(self, directory: bytes) -> None:
        self._directory = directory

    def limit(self, count: int) -> None:
        write_control(self._directory + b"/pids.max", b"%d" % count)

    def count(self) -> int:
        return int(read_control(self._directory + b"/pids.current"))


class FreezerV1:
    """Frozen processes of version 1 take no signals, not even SIGKILL, until they are thawed."""

    FILE, FROZEN, THAWED = b"/freezer.state", b"FROZEN", b"THAWED"

    def __init__(self, directory: bytes) -> None:
        self._directory = directory

    def freeze(self) -> None:
        write_control(self._directory + self.FILE, self.FROZEN)

    def thaw(self) -> None:
        write_control(self._directory + self.FILE, self.THAWED)

    def frozen(self) -> bool:
        return read_control(self._directory + self.FILE).startswith(self.FROZEN)
