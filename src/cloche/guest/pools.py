"""Threads of libraries that make them again after a fork: at rest they hold nothing, and need not be copied.

OpenBLAS ends its own in a fork (it has registered for that). OpenMP's, which are never told, are ended before it. Those
of Arrow, and of the allocator in it, stay in the kernel and are started anew in the copy by their own hooks.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import struct
import sys
import time

_OPENMP = re.compile(r"(/\S*/lib(?:gomp|omp|iomp5)[-.\w]*\.so[.\d]*)$", re.MULTILINE)
_ARROW = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) r-xp .*/libarrow\.so[.\d]*$", re.MULTILINE)
_PAUSE_HARD = 2  # of omp_pause_resource_all: threads are ended, what the program has set is kept
_KNOWN = ("pyarrow", "polars", "torch", "tensorflow", "jax", "duckdb", "cv2", "numba", "grpc", "zmq")
_END_SECONDS = 0.25  # what a thread may take to end that was told to
_FUTEX = {"x86_64": "202", "aarch64": "98"}.get(platform.machine())
_STACK_BYTES = 1024  # of a worker that waits for work: it has not come far
_FORKS_SINCE = 12  # the version of Arrow


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
    """Whether there are threads that have not ended in a moment, and of which nobody knows that a copy has them too."""
    until, arrow = time.monotonic() + _END_SECONDS, _arrow()
    while (left := [task for task in threads() if not _made_again(task, arrow)]) and time.monotonic() < until:
        time.sleep(0.001)
    return bool(left)


def suspects() -> str:
    """Whose threads those may be: they have no names that would tell."""
    found = [name for name in _KNOWN if name in sys.modules]
    return f"a library of it ({' or '.join(found)}, it seems)" if found else "a library of it"


def _made_again(task: str, arrow: list) -> bool:
    try:
        with open(f"/proc/self/task/{task}/comm") as file:
            if file.read() == "jemalloc_bg_thd\n":
                return True
        return bool(arrow) and _waits_in(task, arrow)
    except (OSError, ValueError):  # it has just ended, or cannot be looked at
        return False


def _waits_in(task: str, places: list) -> bool:
    """Whether a thread sleeps, and was sent to sleep by code that lies there."""
    with open(f"/proc/self/task/{task}/syscall") as file:
        call, *_, stack, _ = file.read().split()  # one word if it runs
    if call != _FUTEX:
        return False
    memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        words = struct.unpack(f"{_STACK_BYTES // 8}Q", os.pread(memory, _STACK_BYTES, int(stack, 16)))
    except struct.error:
        return False
    finally:
        os.close(memory)
    return any(first <= word < last for word in words for first, last in places)


def _arrow() -> list:
    """Where its code lies, if it is one that can be forked."""
    version = getattr(sys.modules.get("pyarrow"), "__version__", "0")
    if not re.match(r"\d+", str(version)) or int(str(version).partition(".")[0]) < _FORKS_SINCE:
        return []
    with open("/proc/self/maps") as file:
        return [(int(first, 16), int(last, 16)) for first, last in _ARROW.findall(file.read())]
