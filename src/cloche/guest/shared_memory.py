"""Memory that a fork does not copy, but shares: what is nobody else's is made anew in the copy.

A program without child processes shares such memory with nobody. Locks of `multiprocessing` lie there, and many a
library makes one (tqdm does), as do anonymous mappings of `mmap`. What has a name, or a descriptor, others may reach.
"""

from __future__ import annotations

import ctypes
import re

_MAPPING = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) rw(.)s \S+ \S+ \d+ *(.*)$", re.MULTILINE)
_OURS = re.compile(rb"/dev/zero \(deleted\)|/dev/shm/sem\.\w+ \(deleted\)")
_REFUSED = (b"/dev/shm/", b"/memfd:", b"/dev/zero", b"/SYSV", b"/anon_hugepage", b"/[aio]")
_MAX_BYTES = 64 << 20
_READ_WRITE, _SHARED_ANONYMOUS, _TO_THERE = 1 | 2, 0x01 | 0x20, 1 | 2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
_FAILED = ctypes.c_void_p(-1).value


def unfit() -> list:
    """What can be neither copied nor left to both, as the system calls it. (Files are left to both, mapped or not.)"""
    found = _found()
    ours = [each for each in found if _is_ours(*each)]
    others = [name for _, _, _, name in found if name.startswith(_REFUSED) or name.endswith(b"(deleted)") or not name]
    too_much = sum(size for _, size, _, _ in ours) > _MAX_BYTES
    names = [name for name in others if too_much or not _OURS.fullmatch(name)]
    return [name.decode(errors="replace") or "without a name" for name in names]


def renew() -> None:
    """In a copy: that memory, with what is in it, is its own from now on. Raises OSError."""
    for start, size, executable, name in _found():
        if _is_ours(start, size, executable, name):
            new = _libc.mmap(None, size, _READ_WRITE, _SHARED_ANONYMOUS, -1, 0)
            if new == _FAILED:
                raise OSError(ctypes.get_errno(), "mmap")
            ctypes.memmove(new, start, size)
            if _libc.mremap(new, size, size, _TO_THERE, start) == _FAILED:
                raise OSError(ctypes.get_errno(), "mremap")


def _is_ours(_start: int, _size: int, executable: bool, name: bytes) -> bool:
    return not executable and _OURS.fullmatch(name) is not None


def _found() -> list:
    """(start, size, whether it can be executed, name) of every mapping that is written to and shared."""
    with open("/proc/self/maps", "rb", buffering=0) as file:
        rows = _MAPPING.findall(file.read())
    return [(int(start, 16), int(end, 16) - int(start, 16), bit == b"x", name) for start, end, bit, name in rows]
