"""Memory that a fork does not copy, but shares: what is nobody else's is made anew in the copy.

A program without child processes shares such memory with nobody. Locks of `multiprocessing` lie there, and many a
library makes one (tqdm does), as do anonymous mappings of `mmap`. What has a name, or a descriptor, others may reach.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import re
import struct
from typing import Any

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


def find() -> list:
    """(start, size, whether it can be executed, name) of every mapping that is written to and shared.

    To read all mappings takes as long as a small fork. So the system is asked first whether there is any such.
    """
    with open("/proc/self/maps", "rb", buffering=0) as file:
        rows = _MAPPING.findall(file.read()) if _there_is_one(file) else []
    return [(int(start, 16), int(end, 16) - int(start, 16), bit == b"x", name) for start, end, bit, name in rows]


def _there_is_one(maps: Any) -> bool:
    """True also where the system (before Linux 6.11) does not know the question."""
    try:
        fcntl.ioctl(maps, _PROCMAP_QUERY, _QUESTION.pack(_QUESTION.size, _WRITTEN_AND_SHARED, *[0] * 13))
    except OSError as error:
        return error.errno != errno.ENOENT
    return True


def unfit(found: list) -> list:
    """What can be neither copied nor left to both, as the system calls it. (Files are left to both, mapped or not.)"""
    ours = [each for each in found if _is_ours(*each)]
    too_much = sum(size for _, size, _, _ in ours) > _MAX_BYTES
    others = [each[-1] for each in found if too_much or not _is_ours(*each)]
    names = [name for name in others if name.startswith(_REFUSED) or name.endswith(b"(deleted)") or not name]
    return [name.decode(errors="replace") or "without a name" for name in names]


def renew(found: list) -> None:
    """In a copy: that memory, with what is in it, is its own from now on. Raises OSError."""
    for start, size, executable, name in found:
        if _is_ours(start, size, executable, name):
            new = _libc.mmap(None, size, _READ_WRITE, _SHARED_ANONYMOUS, -1, 0)
            if new == _FAILED:
                raise OSError(ctypes.get_errno(), "mmap")
            ctypes.memmove(new, start, size)
            if _libc.mremap(new, size, size, _TO_THERE, start) == _FAILED:
                raise OSError(ctypes.get_errno(), "mremap")


def _is_ours(_start: int, _size: int, executable: bool, name: bytes) -> bool:
    return not executable and _OURS.fullmatch(name) is not None
