"""Threads of numerical libraries: at rest they hold nothing, and their libraries make them again when needed.

OpenBLAS ends its own in a fork (it has registered for that). OpenMP's, which are never told, are ended before it.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import time

_OPENMP = re.compile(r"(/\S*/lib(?:gomp|omp|iomp5)[-.\w]*\.so[.\d]*)$", re.MULTILINE)
_PAUSE_HARD = 2  # of omp_pause_resource_all: threads are ended, what the program has set is kept
_KNOWN = ("pyarrow", "polars", "torch", "tensorflow", "jax", "duckdb", "cv2", "numba", "grpc", "zmq")
_END_SECONDS = 0.25  # what a thread may take to end that was told to


def threads() -> list:
    """The ids of all threads of this process but the main one."""
    main = str(os.getpid())
    return [task for task in os.listdir("/proc/self/task") if task != main]


def end_openmp() -> None:
    """Ends the threads of every OpenMP that is loaded. The next parallel region starts new ones."""
    with open("/proc/self/maps") as file:
        paths = set(_OPENMP.findall(file.read()))
    for path in paths:
        try:
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            library.omp_pause_resource_all(_PAUSE_HARD)
        except (OSError, AttributeError):  # an old one: its threads are found where those are that stay
            continue


def some_stay() -> bool:
    """Whether there are threads that have not ended in a moment."""
    until = time.monotonic() + _END_SECONDS
    while (left := threads()) and time.monotonic() < until:
        time.sleep(0.001)
    return bool(left)


def suspects() -> str:
    """Whose threads those may be: they have no names that would tell."""
    found = [name for name in _KNOWN if name in sys.modules]
    return f"a library of it ({' or '.join(found)}, it seems)" if found else "a library of it"
