"""CPU time of the kernel's own threads: on some hosts they manage memory, and that grows with sandboxes."""

from __future__ import annotations

import time
from pathlib import Path

_KERNEL_THREAD = 0x00200000  # PF_KTHREAD; in a container there are none to be seen
_REST_CORES, _LOOK_SECONDS, _PATIENCE_SECONDS = 0.03, 0.5, 20.0


def wait_for_rest() -> None:
    """Waits until those threads are nearly idle, at most for some time."""
    end = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < end:
        before = kernel_thread_seconds()
        time.sleep(_LOOK_SECONDS)
        if kernel_thread_seconds() - before < _REST_CORES * _LOOK_SECONDS:
            return


def kernel_thread_seconds() -> float:
    """CPU time of the kernel's own threads, so far."""
    return sum(_thread_seconds(each) for each in Path("/proc").glob("[0-9]*"))


def _thread_seconds(process: Path) -> float:
    try:
        flags = int((process / "stat").read_text().rpartition(")")[2].split()[6])
        return int((process / "schedstat").read_text().split()[0]) / 1e9 if flags & _KERNEL_THREAD else 0.0
    except (OSError, IndexError, ValueError):
        return 0.0  # it has ended, or this system does not tell
