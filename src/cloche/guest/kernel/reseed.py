"""What makes a fork differ from its siblings where it must: random numbers, keys. We fork without Python's hooks."""

from __future__ import annotations

import os
import random
import sys


def diverge() -> None:
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(int.from_bytes(os.urandom(4), "little"))
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.seed()
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None:
        processes.current_process().authkey = os.urandom(32)
