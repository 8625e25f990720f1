"""Whether a kernel can be copied by a fork, and what stands in the way: whatever the copy would share, or would lack.

Memory, the working directory, the environment and regular files are all that a fork copies, or that can be opened once
more. A thread is not there in the copy, and a lock that it held is never released; bytes of a socket or a pipe are read
by one of the two. So what has any of these is refused, and the refusal names it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
import threading
from typing import Any

from cloche.guest import shared_memory

_MOST_NAMED = 5
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


class NotCopyable(Exception):
    """Says why, and what to do."""


class Descriptors:
    """What this process has open: regular files and directories, aliases of its own output pipes, and all else."""

    def __init__(self, own: set, outputs: tuple):
        self.files: list = []
        self.aliases: list = [[] for _ in outputs]
        self.others: list = []
        pipes = [_identity(os.fstat(fd)) for fd in outputs]
        for fd in sorted(int(name) for name in os.listdir("/proc/self/fd")):
            if fd not in own:
                self._sort(fd, pipes)

    def _sort(self, fd: int, pipes: list) -> None:
        try:
            info = os.fstat(fd)
        except OSError:  # that of the listing itself
            return
        if _identity(info) in pipes:
            self.aliases[pipes.index(_identity(info))].append(fd)
        elif stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode):
            self.files.append(fd)
        elif not (stat.S_ISCHR(info.st_mode) and target(fd) in _DEVICES):
            self.others.append(fd)


def check(loop: Any, branches: set, descriptors: Descriptors, shared: list) -> None:
    """Raises NotCopyable. `branches`: pids of copies that were made before; `loop`: that of the kernel's cells."""
    found = {
        "threads": _threads(),
        "connections or pipes": [f"{target(fd)} as descriptor {fd}" for fd in descriptors.others],
        "running child processes": _children(branches),
        "locked files": [target(fd) for fd in descriptors.files if _is_locked(fd)],
        "shared memory": shared_memory.unfit(shared),
        "timers": _timers(),
        "tasks of the event loop": _tasks(loop),
    }
    if any(found.values()):
        parts = [f"{what} ({_named(names)})" for what, names in found.items() if names]
        raise NotCopyable(f"this program cannot be copied while it has {', '.join(parts)}: end or close these first")


def _named(names: list) -> str:
    return ", ".join(names[:_MOST_NAMED]) + (f" and {len(names) - _MOST_NAMED} more" if names[_MOST_NAMED:] else "")


def _threads() -> list:
    """Those that Python knows, by their names: its own list has also some that have ended, and lacks some that run."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    running = set(sys._current_frames()) - {threading.get_ident()}
    return sorted(str(names.get(ident, "without a name")) for ident in running)


def _children(branches: set) -> list:
    pids: set = set()
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/children") as file:
            pids.update(map(int, file.read().split()))
    return [f"{pid} {name}" for pid in sorted(pids - branches) if (name := _running_name(pid))]


def _running_name(pid: int) -> str:
    """Empty for a process that has ended, waited for or not."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            before, _, behind = file.read().rpartition(")")
    except OSError:
        return ""
    return "" if behind.split()[0] == "Z" else before.partition("(")[2]


def _is_locked(fd: int) -> bool:
    return "\nlock:" in _about(fd)


def _timers() -> list:
    timers = {
        "ITIMER_REAL": signal.ITIMER_REAL,
        "ITIMER_VIRTUAL": signal.ITIMER_VIRTUAL,
        "ITIMER_PROF": signal.ITIMER_PROF,
    }
    return [name for name, timer in timers.items() if signal.getitimer(timer)[0]]


def _tasks(loop: Any) -> list:
    """What goes on in the loop while nobody runs a cell: in the copy, too, it would."""
    if loop is None or loop.is_closed():
        return []
    if not isinstance(loop, asyncio.SelectorEventLoop):
        return [f"of another kind, {type(loop).__module__}.{type(loop).__qualname__}"]
    tasks = [task.get_name() for task in asyncio.all_tasks(loop)]
    return sorted(tasks) + ["call_later" for handle in loop._scheduled if not handle.cancelled()]  # type: ignore[attr-defined]


def target(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return "?"


def place_and_flags(fd: int) -> tuple:
    """Where it stands in its file, and how it was opened."""
    fields = dict(line.split(":", 1) for line in _about(fd).splitlines() if ":" in line)
    return int(fields["pos"]), int(fields["flags"], 8)


def move_together(fd: int, other: int) -> bool:
    """Whether both are numbers of one open file. The system tells nobody here, so one is moved for a moment."""
    info = os.fstat(fd)
    if _identity(info) != _identity(os.fstat(other)) or not stat.S_ISREG(info.st_mode):
        return False
    place, flags = place_and_flags(fd)
    if place_and_flags(other)[0] != place or flags & os.O_PATH:
        return False
    os.lseek(fd, place + 1, os.SEEK_SET)
    try:
        return place_and_flags(other)[0] == place + 1
    finally:
        os.lseek(fd, place, os.SEEK_SET)


def is_writable(fd: int) -> bool:
    return place_and_flags(fd)[1] & os.O_ACCMODE != os.O_RDONLY


def _about(fd: int) -> str:
    with open(f"/proc/self/fdinfo/{fd}") as file:
        return file.read()


def _identity(info: os.stat_result) -> tuple:
    return info.st_dev, info.st_ino
