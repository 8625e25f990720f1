"""Huge pages under memory that is already there: a fork then copies one entry where it would copy 512."""

from __future__ import annotations

import array
import ctypes
from collections.abc import Collection

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MADV_COLLAPSE = 25  # Linux 6.1
_HUGE = 2 << 20
_PAGE = 4096
_PRESENT, _OF_A_FILE, _OURS_ALONE = 1 << 63, 1 << 61, 1 << 56  # of an entry of /proc/self/pagemap


def collapse_anonymous(but: Collection[int] = ()) -> int:
    """Moves this process's private anonymous memory onto huge pages as far as it goes; gives the bytes moved.

    `but`: areas that stay in small pages. Only what is there is moved. Memory that is touched later comes in small
    pages as before, so forks stay small.
    """
    moved = 0
    for area in _areas():
        if area not in but:
            moved += _HUGE * (_libc.madvise(area * _HUGE, _HUGE, _MADV_COLLAPSE) == 0)
    return moved


def own_areas() -> list:
    """Areas of a huge page's size in which this process has memory that no other has: it has written there."""
    with open("/proc/self/pagemap", "rb") as pagemap:
        return [area for area in _areas() if _is_own(pagemap, area)]


def _is_own(pagemap, area: int) -> bool:
    pagemap.seek(area * _HUGE // _PAGE * 8)
    entries = array.array("Q", pagemap.read(_HUGE // _PAGE * 8))
    return any(entry & (_PRESENT | _OF_A_FILE | _OURS_ALONE) == _PRESENT | _OURS_ALONE for entry in entries)


def _areas() -> list:
    """Numbers of those that could be huge pages, counted from address 0."""
    return [area for start, end in _anonymous_ranges() for area in range(-(-start // _HUGE), end // _HUGE)]


def _anonymous_ranges() -> list:
    with open("/proc/self/maps") as file:
        rows = [line.split() for line in file]
    private = [row for row in rows if row[1] == "rw-p" and (len(row) < 6 or row[5] == "[heap]")]
    return [tuple(int(address, 16) for address in row[0].split("-")) for row in private]
