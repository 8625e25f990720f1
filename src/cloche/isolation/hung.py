"""The end of a zygote that does not answer any more.

It cannot be left there: it is the parent of the first kernels of its cells, and no pid 1 is dead before all of its
namespace have been collected. When it is gone, what holds the nursery collects them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress


def kill_zygote(inits: Iterable[int]) -> None:
    """Kills the parent of these pids 1, unless they have been left to what holds the nursery, a pid 1 itself."""
    for init in inits:
        with suppress(OSError, ValueError, StopIteration):
            parent = int(_field(init, "PPid"))
            if parent > 1 and _field(parent, "NSpid").split()[-1] != "1":
                os.kill(parent, signal.SIGKILL)
                return


def _field(pid: int, name: str) -> str:
    with open(f"/proc/{pid}/status") as file:
        return next(line.partition(":")[2] for line in file if line.startswith(f"{name}:"))
