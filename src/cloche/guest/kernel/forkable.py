"""The check whether a kernel can be copied by a fork: it finds resources that the copy would share or lack.

Memory, the working directory, the environment and regular files are all that a fork copies, or that can be
opened once more. A thread is not there in the copy, and a lock that it held is never released; bytes of a
socket or a pipe are read by one of the two. So a program that has any of these is refused, and the refusal
names it.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import os
import re
import signal
import stat
import struct
import sys
import threading
from typing import Any

# Memory that a fork shares instead of copying it: memory of this process alone is made anew in the copy.
#
# A program without child processes shares such memory with no other. Locks of `multiprocessing` lie there, and
# many a library makes one (tqdm does), as do anonymous mappings of `mmap`. Mappings with a name, or a
# descriptor, are within reach of other processes.

_MAPPING = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) rw(.)s \S+ \S+ \d+ *(.*)$", re.MULTILINE)
_OURS = re.compile(rb"/dev/zero \(deleted\)|/dev/shm/sem\.\w+ \(deleted\)")
_REFUSED = (b"/dev/shm/", b"/memfd:", b"/dev/zero", b"/SYSV", b"/anon_hugepage", b"/[aio]")
_MAX_BYTES = 64 << 20
_PROCMAP_QUERY, _WRITTEN_AND_SHARED = 0xC0686611, 0x02 | 0x08 | 0x10  # the first such, from an address on
_QUESTION = struct.Struct("=9Q4I2Q")  # struct procmap_query of linux/fs.h
_READ_WRITE, _SHARED_ANONYMOUS, _TO_THERE = 1 | 2, 0x01 | 0x20, 1 | 2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
_FAILED = ctypes.c_void_p(-1).value


def find_shared_mappings() -> list:
    """(start, size, whether it can be executed, name) of every mapping that is written to and shared.

    To read all mappings takes as long as a small fork. So the system is asked first whether there is any such.
    """
    with open("/proc/self/maps", "rb", buffering=0) as file:
        rows = _MAPPING.findall(file.read()) if _has_shared_mapping(file) else []
    return [(int(start, 16), int(end, 16) - int(start, 16), bit == b"x", name) for start, end, bit, name in rows]


def _has_shared_mapping(maps: Any) -> bool:
    """True also where the system (before Linux 6.11) does not know the question."""
    try:
        fcntl.ioctl(maps, _PROCMAP_QUERY, _QUESTION.pack(_QUESTION.size, _WRITTEN_AND_SHARED, *[0] * 13))
    except OSError as error:
        return error.errno != errno.ENOENT
    return True


def unforkable_names(found: list) -> list:
    """The system's names of mappings that can be neither copied nor shared.

    (Files are shared by both, mapped or not.)
    """
    ours = [each for each in found if _is_unshared(*each)]
    too_much = sum(size for _, size, _, _ in ours) > _MAX_BYTES
    others = [each[-1] for each in found if too_much or not _is_unshared(*each)]
    names = [name for name in others if name.startswith(_REFUSED) or name.endswith(b"(deleted)") or not name]
    return [name.decode(errors="replace") or "without a name" for name in names]


def renew_mappings(found: list) -> None:
    """In a copy: makes that memory, with its contents, the copy's own. Raises OSError."""
    for start, size, executable, name in found:
        if _is_unshared(start, size, executable, name):
            new = _libc.mmap(None, size, _READ_WRITE, _SHARED_ANONYMOUS, -1, 0)
            if new == _FAILED:
                raise OSError(ctypes.get_errno(), "mmap")
            ctypes.memmove(new, start, size)
            if _libc.mremap(new, size, size, _TO_THERE, start) == _FAILED:
                raise OSError(ctypes.get_errno(), "mremap")


def _is_unshared(_start: int, _size: int, executable: bool, name: bytes) -> bool:
    return not executable and _OURS.fullmatch(name) is not None


_MOST_NAMED = 5
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


class KernelNotForkable(Exception):
    """The kernel cannot be copied. The message says why, and how to make it possible."""


class OpenDescriptors:
    """The open descriptors of this process: files and directories, aliases of its output pipes, all others."""

    def __init__(self, own: set, outputs: tuple):
        self.files: list = []
        self.aliases: list = [[] for _ in outputs]
        self.others: list = []
        pipes = [_file_identity(os.fstat(fd)) for fd in outputs]
        for fd in sorted(int(name) for name in os.listdir("/proc/self/fd")):
            if fd not in own:
                self._classify_descriptor(fd, pipes)

    def _classify_descriptor(self, fd: int, pipes: list) -> None:
        try:
            info = os.fstat(fd)
        except OSError:  # that of the listing itself
            return
        if _file_identity(info) in pipes:
            self.aliases[pipes.index(_file_identity(info))].append(fd)
        elif stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode):
            self.files.append(fd)
        elif not (stat.S_ISCHR(info.st_mode) and descriptor_target(fd) in _DEVICES):
            self.others.append(fd)


def check_forkable(loop: Any, branches: set, descriptors: OpenDescriptors, shared: list) -> None:
    """Raises KernelNotForkable. `branches`: pids of earlier copies; `loop`: that of the kernel's cells."""
    found = {
        "threads": _thread_names(),
        "connections or pipes": [f"{descriptor_target(fd)} as descriptor {fd}" for fd in descriptors.others],
        "running child processes": _child_names(branches),
        "locked files": [descriptor_target(fd) for fd in descriptors.files if _is_locked(fd)],
        "shared memory": unforkable_names(shared),
        "timers": _active_timers(),
        "tasks of the event loop": _loop_tasks(loop),
    }
    if any(found.values()):
        parts = [f"{what} ({_join_names(names)})" for what, names in found.items() if names]
        raise KernelNotForkable(
            f"this program cannot be copied while it has {', '.join(parts)}: end or close these first"
        )


def _join_names(names: list) -> str:
    return ", ".join(names[:_MOST_NAMED]) + (f" and {len(names) - _MOST_NAMED} more" if names[_MOST_NAMED:] else "")


def _thread_names() -> list:
    """The names of Python's running threads: `threading` lists some that have ended, and lacks some that run."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    running = set(sys._current_frames()) - {threading.get_ident()}
    return sorted(str(names.get(ident, "without a name")) for ident in running)


def _child_names(branches: set) -> list:
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
    return "\nlock:" in _read_fdinfo(fd)


def _active_timers() -> list:
    timers = {
        "ITIMER_REAL": signal.ITIMER_REAL,
        "ITIMER_VIRTUAL": signal.ITIMER_VIRTUAL,
        "ITIMER_PROF": signal.ITIMER_PROF,
    }
    return [name for name, timer in timers.items() if signal.getitimer(timer)[0]]


def _loop_tasks(loop: Any) -> list:
    """Tasks and timers that go on in the loop between cells, and would go on in the copy, too."""
    if loop is None or loop.is_closed():
        return []
    if not isinstance(loop, asyncio.SelectorEventLoop):
        return [f"of another kind, {type(loop).__module__}.{type(loop).__qualname__}"]
    tasks = [task.get_name() for task in asyncio.all_tasks(loop)]
    return sorted(tasks) + ["call_later" for handle in loop._scheduled if not handle.cancelled()]  # type: ignore[attr-defined]


def descriptor_target(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return "?"


def offset_and_flags(fd: int) -> tuple:
    """The offset of a descriptor in its file, and the flags it was opened with."""
    fields = dict(line.split(":", 1) for line in _read_fdinfo(fd).splitlines() if ":" in line)
    return int(fields["pos"]), int(fields["flags"], 8)


def share_offset(fd: int, other: int) -> bool:
    """Whether both descriptors share one open file. The system does not tell, so one is moved for a moment."""
    info = os.fstat(fd)
    if _file_identity(info) != _file_identity(os.fstat(other)) or not stat.S_ISREG(info.st_mode):
        return False
    place, flags = offset_and_flags(fd)
    if offset_and_flags(other)[0] != place or flags & os.O_PATH:
        return False
    os.lseek(fd, place + 1, os.SEEK_SET)
    try:
        return offset_and_flags(other)[0] == place + 1
    finally:
        os.lseek(fd, place, os.SEEK_SET)


def is_writable(fd: int) -> bool:
    return offset_and_flags(fd)[1] & os.O_ACCMODE != os.O_RDONLY


def _read_fdinfo(fd: int) -> str:
    with open(f"/proc/self/fdinfo/{fd}") as file:
        return file.read()


def _file_identity(info: os.stat_result) -> tuple:
    return info.st_dev, info.st_ino
