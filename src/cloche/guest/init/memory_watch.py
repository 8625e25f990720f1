"""The memory watch: without cgroups, init checks memory itself and ends a process.

It looks four times a second; SECURITY.md has the bounds on what a program can take meanwhile.
"""

from __future__ import annotations

import os
import signal
import time

_PERIOD_SECONDS = 0.25
_FREEING_SECONDS = 0.25  # until the memory of a process that was ended is free in that kernel: else more would end
_OWN_KERNEL_SECONDS = 0.05  # where the memory of all can be read at once, and the host's limit would end the sandbox


class MemoryWatch:
    def __init__(self, processes, event):
        self.limit_bytes = None
        self.resting = False  # nobody runs who could use more
        self._processes = processes
        self._event = event
        self._next_look = 0.0
        self.kernel_bytes: int | None = None  # with a kernel of its own: what all held before it was a sandbox
        self.zygote_bytes = 0  # what a fork of the zygote has of its memory, which is nobody's here

    def pause_seconds(self, otherwise: float) -> float:
        return self._period_seconds if self.limit_bytes and not self.resting else otherwise

    @property
    def _period_seconds(self) -> float:
        return _PERIOD_SECONDS if self.kernel_bytes is None else _OWN_KERNEL_SECONDS

    def look(self) -> None:
        """If all together hold too much, ends the process that the kernel would: see the scores in `limits`."""
        if not self.limit_bytes or self.resting or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + self._period_seconds
        if self._seems_within(self.limit_bytes):
            return
        held = _bytes_by_pid(self.zygote_bytes)
        if held and (self.kernel_bytes is not None or sum(held.values()) + _space_used() > self.limit_bytes):
            limit_bytes = self.limit_bytes
            self._end_process(max(held, key=lambda pid: held[pid] + _oom_score(pid) * limit_bytes // 1000))

    def _used_bytes(self) -> int:
        if self.kernel_bytes is not None:
            return max(all_bytes() - self.kernel_bytes - _space_used(), 0)
        return sum(_bytes_by_pid(self.zygote_bytes).values())

    def _seems_within(self, limit_bytes: int) -> bool:
        if self.kernel_bytes is not None:
            return all_bytes() - self.kernel_bytes <= limit_bytes
        return _upper_bound_bytes() + _space_used() <= limit_bytes

    def _end_process(self, pid: int) -> None:
        kernel = self._processes.kernel_of(pid)
        if kernel:
            self._event({"ev": "over_memory", "kernel": kernel})
        os.kill(pid, signal.SIGKILL)
        if self.kernel_bytes is not None:
            self._next_look = time.monotonic() + _FREEING_SECONDS

    def usage(self, *_) -> dict:
        """The usage of the whole sandbox as seen from inside; zeros where other processes are visible as well."""
        if os.getpid() != 1:
            return {"memory_bytes": 0, "space_bytes": 0, "cpu_milliseconds": 0}
        pids = _list_pids()
        return {
            "memory_bytes": self._used_bytes(),
            "space_bytes": _space_used(),
            "cpu_milliseconds": sum(_cpu_ticks(pid) for pid in pids) * 1000 // os.sysconf("SC_CLK_TCK"),
        }


def _oom_score(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/oom_score_adj", "rb") as file:
            return int(file.read())
    except OSError:
        return 0


def _cpu_ticks(pid: int) -> int:
    """Of a process, and of all its children that have ended and were waited for."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # its name, in brackets, may hold anything
    except OSError:
        return 0
    return sum(map(int, fields[11:15]))


def _list_pids() -> list:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _upper_bound_bytes() -> int:
    """An upper bound of all processes' memory, read quickly: exact shares take milliseconds per process."""
    return sum(_resident_pages(pid)[0] for pid in _list_pids() if pid != 1) * os.sysconf("SC_PAGESIZE")


def _bytes_by_pid(zygote_bytes: int) -> dict:
    """The bytes held by each process but init, by pid."""
    return {pid: _own_bytes(pid, zygote_bytes) for pid in _list_pids() if pid != 1}


def _own_bytes(pid: int, zygote_bytes: int) -> int:
    """The private bytes of a process, and its share of memory common with its copies, without the zygote's.

    Where only its size can be read, each of several copies counts in full; and a program without the zygote's
    memory counts as less than it has: the two cases cannot be told apart.
    """
    try:
        rows = _read_rollup(pid)
    except OSError:  # of another uid, or behind other rules of Landlock's, as kernels are; or it has ended
        return max(anonymous_bytes(pid) - zygote_bytes, 0)
    own = sum(size for name, size in rows.items() if name.startswith("Private_"))
    shared = min(rows.get("Pss_Anon", 0), anonymous_bytes(pid) - zygote_bytes)
    return max(own, shared) + rows.get("Swap", 0)


def all_bytes() -> int:
    """The memory of all programs, with their files in memory, of a kernel that has none but a sandbox's."""
    with open("/proc/meminfo", encoding="ascii") as file:
        rows = [line.split() for line in file]
    return sum(int(row[1]) for row in rows if row[0] in ("AnonPages:", "Shmem:")) * 1024


def _read_rollup(pid: int) -> dict:
    with open(f"/proc/{pid}/smaps_rollup") as file:
        rows = [line.split() for line in file if line.startswith(("Private_", "Pss_Anon:", "Swap:"))]
    return {name.rstrip(":"): int(size) * 1024 for name, size, *_ in rows}


def anonymous_bytes(pid: int) -> int:
    """All resident memory that is not backed by a file."""
    resident, of_files = _resident_pages(pid)
    return (resident - of_files) * os.sysconf("SC_PAGESIZE")


def _resident_pages(pid: int) -> tuple:
    """Resident pages, and how many of these belong to files."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            _, resident, of_files, *_ = map(int, file.read().split())
    except OSError:
        return 0, 0
    return resident, of_files


def _space_used() -> int:
    space = os.statvfs("/tmp")
    return (space.f_blocks - space.f_bfree) * space.f_frsize
