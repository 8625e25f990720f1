"""What a process has mapped of shared libraries, in fewer pieces: a fork copies the kernel's record of each of them.

A library is five mappings, as a linker lays it out: its head, its code, its constants, what was relocated, its data. A
process with pandas has 700, which take a seventh of a fork's time and 200 KB in every process that is forked.
"""

from __future__ import annotations

import ctypes
from itertools import pairwise

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_READ, _WRITE, _EXEC = 1, 2, 4


class Mapping:
    """A line of /proc/self/maps."""

    def __init__(self, line: str):
        addresses, self.rights, offset, _, self.inode, *_ = line.split(maxsplit=5)
        self.start, self.end = (int(each, 16) for each in addresses.split("-"))
        self.offset = int(offset, 16)

    def goes_on_in(self, other: Mapping) -> bool:
        """Whether the other one is the next part of the same file, right behind this one."""
        is_next = self.end == other.start and self.offset + self.end - self.start == other.offset
        return is_next and self.inode == other.inode != "0"


def join_libraries() -> int:
    """Joins what this process has mapped of libraries, and gives how many mappings are gone.

    Constants become executable with the code between them, and what was relocated writable again, as the data behind it
    is. That hardens a program against its own input; in a sandbox the program itself is what is walled in.
    """
    before = _mappings()
    for run in _runs(before):
        relocated = [one for one, after in pairwise(run) if (one.rights, after.rights) == ("r--p", "rw-p")]
        for one in relocated:
            _protect(one, one, _READ | _WRITE)
        code = [one for one in run if one.rights in ("r--p", "r-xp") and one not in relocated]
        if len(code) > 1 and any(one.rights == "r-xp" for one in code) and _in_one_piece(code):
            _protect(code[0], code[-1], _READ | _EXEC)
    return len(before) - len(_mappings())


def _mappings() -> list:
    with open("/proc/self/maps") as file:
        return [Mapping(line) for line in file]


def _runs(mappings: list) -> list:
    """Those that follow each other without a gap, in memory and in their file."""
    runs: list = []
    for mapping in mappings:
        if runs and runs[-1][-1].goes_on_in(mapping):
            runs[-1].append(mapping)
        else:
            runs.append([mapping])
    return runs


def _in_one_piece(mappings: list) -> bool:
    return all(one.goes_on_in(after) for one, after in pairwise(mappings))


def _protect(first: Mapping, last: Mapping, rights: int) -> None:
    """Where the system refuses it, they stay as they are."""
    _libc.mprotect(first.start, last.end - first.start, rights)
