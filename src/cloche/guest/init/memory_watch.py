"""Where there are no cgroups, init watches memory itself and ends the largest context. It can be outrun."""

from __future__ import annotations

import os
import signal
import time

_PERIOD_SECONDS = 0.25


class Watchman:
    def __init__(self, processes, event):
        self.limit_bytes = None
        self.resting = False  # nobody runs who could use more
        self._processes = processes
        self._event = event
        self._next_look = 0.0
        self.zygote_bytes = 0  # what a fork of the zygote has of its memory, which is nobody's here

    def pause_seconds(self, otherwise: float) -> float:
        return _PERIOD_SECONDS if self.limit_bytes and not self.resting else otherwise

    def look(self) -> None:
        """Ends the process that holds most if all together hold too much."""
        if not self.limit_bytes or self.resting or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _PERIOD_SECONDS
        if _most() + _space_used() <= self.limit_bytes:
            return
        held = _held(self.zygote_bytes)
        if sum(held.values()) + _space_used() > self.limit_bytes and held:
            largest = max(held, key=held.__getitem__)
            kernel = self._processes.kernel_of(largest)
            if kernel:
                self._event({"ev": "over_memory", "kernel": kernel})
            os.kill(largest, signal.SIGKILL)

    def usage(self, *_) -> dict:
        """What all of the sandbox uses, as far as can be told from inside; nothing where others are seen as well."""
        if os.getpid() != 1:
            return {"memory_bytes": 0, "space_bytes": 0, "cpu_milliseconds": 0}
        pids = _pids()
        return {
            "memory_bytes": sum(_held(self.zygote_bytes).values()),
            "space_bytes": _space_used(),
            "cpu_milliseconds": sum(_cpu_ticks(pid) for pid in pids) * 1000 // os.sysconf("SC_CLK_TCK"),
        }


def _cpu_ticks(pid: int) -> int:
    """Of a process, and of all its children that have ended and were waited for."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # its name, in brackets, may hold anything
    except OSError:
        return 0
    return sum(map(int, fields[11:15]))


def _pids() -> list:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _most() -> int:
    """More than all processes can hold, which is told at once: to tell what is whose takes milliseconds for each."""
    return sum(_pages(pid)[0] for pid in _pids() if pid != 1) * os.sysconf("SC_PAGESIZE")


def _held(zygote_bytes: int) -> dict:
    """By its pid, what each process but init has."""
    return {pid: _own_bytes(pid, zygote_bytes) for pid in _pids() if pid != 1}


def _own_bytes(pid: int, zygote_bytes: int) -> int:
    """What is that process's own, and its share of what it has together with its copies; the zygote's does not count.

    Where only its size is told, each of several copies counts in full; and a program that has nothing of the zygote's
    counts as less than it has: it cannot be told from one that has.
    """
    try:
        rows = _rollup(pid)
    except PermissionError:  # of another uid, or behind other rules of Landlock's, as kernels are
        return max(anonymous_bytes(pid) - zygote_bytes, 0)
    except OSError:
        return 0
    own = sum(size for name, size in rows.items() if name.startswith("Private_"))
    shared = min(rows.get("Pss_Anon", 0), anonymous_bytes(pid) - zygote_bytes)
    return max(own, shared) + rows.get("Swap", 0)


def _rollup(pid: int) -> dict:
    with open(f"/proc/{pid}/smaps_rollup") as file:
        rows = [line.split() for line in file if line.startswith(("Private_", "Pss_Anon:", "Swap:"))]
    return {name.rstrip(":"): int(size) * 1024 for name, size, *_ in rows}


def anonymous_bytes(pid: int) -> int:
    """All that is not a file's."""
    resident, of_files = _pages(pid)
    return (resident - of_files) * os.sysconf("SC_PAGESIZE")


def _pages(pid: int) -> tuple:
    """In memory, and how many of these are a file's."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            _, resident, of_files, *_ = map(int, file.read().split())
    except OSError:
        return 0, 0
    return resident, of_files


def _space_used() -> int:
    space = os.statvfs("/tmp")
    return (space.f_blocks - space.f_bfree) * space.f_frsize
