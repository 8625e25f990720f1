"""The end of a zygote, or of its cradle, that does not answer any more.

It cannot be left there: it is the parent of the first kernels of its cells, and no pid 1 is dead before all of its
namespace have been collected. When it is gone, what holds the nursery collects them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress


def kill_zygote(inits: Iterable[int]) -> None:
    """Kills the cradle, which is the parent of these pids 1, and its parent, the zygote.

    Not what holds the nursery, a pid 1 itself, to which they may have been left.
    """
    for init in inits:
        with suppress(OSError, ValueError, StopIteration):
            ancestors = [cradle := int(_field(init, "PPid")), int(_field(cradle, "PPid"))]
            living = [pid for pid in ancestors if pid > 1 and _field(pid, "NSpid").split()[-1] != "1"]
            for pid in reversed(living):
                os.kill(pid, signal.SIGKILL)
            if living:
                return


def _field(pid: int, name: str) -> str:
    with open(f"/proc/{pid}/status") as file:
        return next(line.partition(":")[2] for line in file if line.startswith(f"{name}:"))
