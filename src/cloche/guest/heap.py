"""Where forks allocate: on pages that hold nothing else.

Python keeps small objects in pools of blocks of one size. After the imports nearly every pool has some free blocks, all
over memory, and a fork that takes one writes to the page of the block and to that of the pool's head: two copies of
pages for an object of 32 bytes. Where no pool has a free block, the next one comes from a new pool, and the objects of
a fork lie together.
"""

from __future__ import annotations

import os
import sys
from typing import Any

_ALIGNMENT = 16
_BYTES_HEAD = sys.getsizeof(b"")
_fillers: list = []  # nobody reads them: they are there so that the blocks are taken


def fill_pools() -> int:
    """Takes every free block of the pools that are in use, for good; gives how many. Allocates nothing if it cannot."""
    for size, free in _free_blocks().items():
        _fillers.append(_blocks(size, free))
    return sum(map(len, _fillers))


def _blocks(size: int, count: int) -> list:
    """So many objects that take a block of that size each."""
    if size > _BYTES_HEAD:
        return [bytes(size - _BYTES_HEAD) for _ in range(count)]
    make: Any = object if size == _ALIGNMENT else float
    return [make() for _ in range(count)] if make is object else [float(number) for number in range(count)]


def _free_blocks() -> dict:
    """By size, from the interpreter's own statistics: `class size num-pools blocks-in-use avail-blocks`."""
    rows = [line.split() for line in _statistics().splitlines()]
    numbers = [[int(word) for word in row] for row in rows if len(row) == 5 and all(word.isdigit() for word in row)]
    return {size: free for _, size, _, _, free in numbers if free}


def _statistics() -> str:
    """What `sys._debugmallocstats` writes to stderr. Not into a pipe: where a user has many, one holds little."""
    saved = os.dup(2)
    with open(os.memfd_create("statistics"), "r+b") as file:
        try:
            os.dup2(file.fileno(), 2)
            sys._debugmallocstats()
        finally:
            os.dup2(saved, 2)
            os.close(saved)
        file.seek(0)
        return file.read().decode("ascii", "replace")
