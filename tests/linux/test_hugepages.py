"""Huge pages where they are wanted, and knowing where a fork has written."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator

import pytest

from cloche.linux import memory_layout

HUGE = 2 << 20
AREAS = 8


@pytest.fixture
def memory() -> Iterator[tuple[mmap.mmap, int]]:
    """So many areas of private memory, written to, and the number of the first."""
    before = set(memory_layout._huge_areas())
    with mmap.mmap(-1, (AREAS + 1) * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as found:
        for at in range(0, len(found), mmap.PAGESIZE):
            found[at] = 1
        first = min(set(memory_layout._huge_areas()) - before)
        yield found, first


def written_by_a_fork(memory: mmap.mmap, places: list[int]) -> set[int]:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            for at in places:
                memory[at] = 2
            os.write(write, repr(memory_layout.own_areas()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as file:
        told = file.read()
    os.waitpid(pid, 0)
    return {int(word) for word in told.strip("[]").split(",")}


def place_of(memory: mmap.mmap, first: int, area: int) -> int:
    """Where in it an area begins: the mapping need not begin at one."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return (first + area) * HUGE - start


def test_a_fork_tells_where_it_has_written(memory: tuple[mmap.mmap, int]):
    content, first = memory
    written = {2, 5}
    places = [place_of(content, first, area) + 12345 for area in written]
    told = {area - first for area in written_by_a_fork(content, places)}
    assert told & set(range(AREAS)) == written


def test_areas_that_are_named_stay_in_small_pages(memory: tuple[mmap.mmap, int]):
    content, first = memory
    every = set(memory_layout._huge_areas())
    moved = memory_layout.collapse_anonymous(but=every - {first + 1, first + 3})
    if not moved:
        pytest.skip("this kernel moves nothing onto huge pages when asked")
    assert moved == 2 * HUGE
    assert content[place_of(content, first, 3)] == 1
