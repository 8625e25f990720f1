"""Where there are no cgroups, init watches memory itself and ends the largest context. It can be outrun."""

from __future__ import annotations

import os
import signal
import time

_PERIOD_SECONDS = 0.25


class Watchman:
    def __init__(self, processes, event):
        self.limit_bytes = None
        self._processes = processes
        self._event = event
        self._next_look = 0.0

    def pause_seconds(self, otherwise: float) -> float:
        return _PERIOD_SECONDS if self.limit_bytes else otherwise

    def look(self) -> None:
        """Ends the process that holds most if all together hold too much."""
        if not self.limit_bytes or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _PERIOD_SECONDS
        held = {pid: private_bytes(pid) for pid in _pids() if pid != 1}
        if sum(held.values()) + _space_used() > self.limit_bytes and held:
            largest = max(held, key=held.__getitem__)
            kernel = self._processes.kernel_of(largest)
            if kernel:
                self._event({"ev": "over_memory", "kernel": kernel})
            os.kill(largest, signal.SIGKILL)


def usage() -> dict:
    """What all of the sandbox uses, as far as can be told from inside; nothing where others are to be seen as well."""
    if os.getpid() != 1:
        return {"memory_bytes": 0, "space_bytes": 0, "cpu_milliseconds": 0}
    pids = _pids()
    return {
        "memory_bytes": sum(private_bytes(pid) for pid in pids if pid != 1),
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


def private_bytes(pid: int) -> int:
    """What would be freed if that process ended: pages shared with the zygote do not count."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            rows = [line.split() for line in file if line.startswith(("Private_", "Swap:"))]
    except PermissionError:  # of another uid
        return max(_anonymous_bytes(pid) - _anonymous_bytes(1), 0)
    except OSError:
        return 0
    return sum(int(row[1]) for row in rows) * 1024


def _anonymous_bytes(pid: int) -> int:
    """All that is not a file's; in a kernel about as much of it is the zygote's as in init."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            _, resident, of_files, *_ = map(int, file.read().split())
    except OSError:
        return 0
    return (resident - of_files) * os.sysconf("SC_PAGESIZE")


def _space_used() -> int:
    space = os.statvfs("/tmp")
    return (space.f_blocks - space.f_bfree) * space.f_frsize
