"""Huge pages under existing memory: a fork then copies one entry instead of 512."""

from __future__ import annotations

import array
import ctypes
from collections.abc import Collection
from itertools import pairwise

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MADV_COLLAPSE = 25  # Linux 6.1
_HUGE = 2 << 20
_PAGE = 4096
_PRESENT, _OF_A_FILE, _OURS_ALONE = 1 << 63, 1 << 61, 1 << 56  # of an entry of /proc/self/pagemap


def collapse_anonymous(but: Collection[int] = ()) -> int:
    """Moves this process's private anonymous memory onto huge pages as far as it goes; returns the bytes moved.

    `but`: areas that stay in small pages. Only present memory is moved. Memory that is touched later comes in
    small pages as before, so forks stay small.
    """
    moved = 0
    for area in _huge_areas():
        if area not in but:
            moved += _HUGE * (_libc.madvise(area * _HUGE, _HUGE, _MADV_COLLAPSE) == 0)
    return moved


def own_areas() -> list:
    """Areas of a huge page's size in which this process has memory that no other has: it has written there."""
    with open("/proc/self/pagemap", "rb") as pagemap:
        return [area for area in _huge_areas() if _is_own_area(pagemap, area)]


def _is_own_area(pagemap, area: int) -> bool:
    pagemap.seek(area * _HUGE // _PAGE * 8)
    entries = array.array("Q", pagemap.read(_HUGE // _PAGE * 8))
    return any(entry & (_PRESENT | _OF_A_FILE | _OURS_ALONE) == _PRESENT | _OURS_ALONE for entry in entries)


def _huge_areas() -> list:
    """Numbers of the areas that could be huge pages, counted from address 0."""
    return [area for start, end in _anonymous_ranges() for area in range(-(-start // _HUGE), end // _HUGE)]


def _anonymous_ranges() -> list:
    with open("/proc/self/maps") as file:
        rows = [line.split() for line in file]
    private = [row for row in rows if row[1] == "rw-p" and (len(row) < 6 or row[5] == "[heap]")]
    return [tuple(int(address, 16) for address in row[0].split("-")) for row in private]


# Mappings of shared libraries, joined to fewer pieces: a fork copies the kernel's record of each of them.
#
# A library is five mappings, as a linker lays it out: its head, its code, its constants, its relocated part,
# its data. A process with pandas has 700, which take a seventh of a fork's time and 200 KB in every process
# that is forked.

_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_READ, _WRITE, _EXEC = 1, 2, 4


class MemoryMapping:
    """A line of /proc/self/maps."""

    def __init__(self, line: str):
        addresses, self.rights, offset, _, self.inode, *_ = line.split(maxsplit=5)
        self.start, self.end = (int(each, 16) for each in addresses.split("-"))
        self.offset = int(offset, 16)

    def continues_in(self, other: MemoryMapping) -> bool:
        """Whether the other one is the next part of the same file, right behind this one."""
        is_next = self.end == other.start and self.offset + self.end - self.start == other.offset
        return is_next and self.inode == other.inode != "0"


def join_libraries() -> int:
    """Joins this process's mappings of libraries, and returns how many mappings are gone.

    Constants become executable with the code between them, and relocated parts writable again, as the data behind
    them is. The separation hardens a program against its own input; in a sandbox the program itself is walled in.
    """
    before = _read_mappings()
    for run in _contiguous_runs(before):
        relocated = [one for one, after in pairwise(run) if (one.rights, after.rights) == ("r--p", "rw-p")]
        for one in relocated:
            _set_protection(one, one, _READ | _WRITE)
        code = [one for one in run if one.rights in ("r--p", "r-xp") and one not in relocated]
        if len(code) > 1 and any(one.rights == "r-xp" for one in code) and _in_one_piece(code):
            _set_protection(code[0], code[-1], _READ | _EXEC)
    return len(before) - len(_read_mappings())


def _read_mappings() -> list:
    with open("/proc/self/maps") as file:
        return [MemoryMapping(line) for line in file]


def _contiguous_runs(mappings: list) -> list:
    """Groups of mappings that follow each other without a gap, in memory and in their file."""
    runs: list = []
    for mapping in mappings:
        if runs and runs[-1][-1].continues_in(mapping):
            runs[-1].append(mapping)
        else:
            runs.append([mapping])
    return runs


def _in_one_piece(mappings: list) -> bool:
    return all(one.continues_in(after) for one, after in pairwise(mappings))


def _set_protection(first: MemoryMapping, last: MemoryMapping, rights: int) -> None:
    """Sets the rights. Where the system refuses it, they stay as they are."""
    _libc.mprotect(first.start, last.end - first.start, rights)
