"""Filling of free memory before forks, so that forks allocate on pages that hold nothing else.

Python keeps small objects in pools of blocks of one size. After the imports nearly every pool has some free
blocks, all over memory, and a fork that takes one writes to the page of the block and to that of the pool's
head: two copies of pages for an object of 32 bytes. Where no pool has a free block, the next one comes from a
new pool, and the objects of a fork lie together. The C library does the same with larger pieces, and keeps
freed ones in lists by size.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

_ALIGNMENT = 16
_BYTES_HEAD = sys.getsizeof(b"")
_fillers: list = []  # nobody reads them: they are there so that the blocks are taken
_LARGEST_PIECE, _SMALLEST_PIECE = 64 << 10, 24  # larger ones are mappings of their own
_EXACT_BYTES, _STEP_BYTES = 1032, 16  # up to there, what was freed is kept by its very size


def fill_heap() -> None:
    """Fills all gaps, before objects are made that are to lie together."""
    fill_gaps()
    fill_pools()


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and newer: `keepcost` is the space behind the last piece in use."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    )


def fill_gaps() -> int:
    """Takes every free piece of the C library's heap for good, except the space behind all others.

    Returns how many; none where it is another library's heap.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return 0
    libc.mallinfo2.restype = _Mallinfo
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
    known = libc.mallinfo2()
    behind, left = libc.sbrk(0) - known.keepcost, known.fordblks - known.keepcost
    taken = 0
    for size in _piece_sizes():
        pieces = _take_pieces(libc, size, behind, left // size)
        taken, left = taken + pieces, left - pieces * size
    return taken


def _take_pieces(libc, size: int, behind: int, most: int) -> int:
    """Until there is none of that size left, so that the next comes from behind all others; `most` are free at all."""
    for taken in range(most):
        piece = libc.malloc(size)
        if piece is None or piece >= behind:
            libc.free(piece)
            return taken
    return most


def _piece_sizes() -> list:
    """The sizes to take, the largest first: the rest of a piece is one of the next."""
    sizes = [_LARGEST_PIECE]
    while sizes[-1] > _EXACT_BYTES:
        sizes.append(sizes[-1] * 7 // 8)
    return sizes[:-1] + list(range(_EXACT_BYTES, _SMALLEST_PIECE - 1, -_STEP_BYTES))


def fill_pools() -> int:
    """Takes every free block of the pools that are in use, for good; gives how many. Allocates nothing if it cannot."""
    for size, free in _free_blocks().items():
        _fillers.append(_allocate_blocks(size, free))
    return sum(map(len, _fillers))


def _allocate_blocks(size: int, count: int) -> list:
    """So many objects that take a block of that size each."""
    if size > _BYTES_HEAD:
        return [bytes(size - _BYTES_HEAD) for _ in range(count)]
    make: Any = object if size == _ALIGNMENT else float
    return [make() for _ in range(count)] if make is object else [float(number) for number in range(count)]


def _free_blocks() -> dict:
    """By size, from the interpreter's own statistics: `class size num-pools blocks-in-use avail-blocks`."""
    rows = [line.split() for line in _malloc_statistics().splitlines()]
    numbers = [[int(word) for word in row] for row in rows if len(row) == 5 and all(word.isdigit() for word in row)]
    return {size: free for _, size, _, _, free in numbers if free}


def _malloc_statistics() -> str:
    """The output of `sys._debugmallocstats` on stderr.

    Not read by a pipe: where a user has many, one holds little.
    """
    from cloche.linux.memory_file import open_unnamed_file  # the first process of a nursery has only this module

    saved = os.dup(2)
    with open(open_unnamed_file("statistics", os.MFD_CLOEXEC), "r+b") as file:
        try:
            os.dup2(file.fileno(), 2)
            sys._debugmallocstats()
        finally:
            os.dup2(saved, 2)
            os.close(saved)
        file.seek(0)
        return file.read().decode("ascii", "replace")
