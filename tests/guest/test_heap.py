"""Gaps in memory are taken before forks are made, so that what these allocate lies together."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from cloche.guest.zygote import write_trial
from cloche.linux import memory_layout

GAPS = """
import ctypes
from cloche.guest.zygote import heap
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
pieces = [libc.malloc(3000) for _ in range(2000)]
for piece in pieces[::2]:
    libc.free(piece)  # each of them between two that are in use
inside = lambda: sum(min(pieces) <= libc.malloc(size) <= max(pieces) for size in (700, 1500, 2900) for _ in range(200))
BEFORE
print(inside())
"""


def taken_from_gaps(before: str) -> int:
    done = subprocess.run([sys.executable, "-c", GAPS.replace("BEFORE", before)], capture_output=True, text=True)
    return int(done.stdout or done.stderr)


def test_allocations_after_filling_the_gaps_lie_behind_them():
    assert taken_from_gaps("") > 500
    assert taken_from_gaps("heap.fill_heap()") == 0


def test_steps_that_fail_on_trial_are_no_failure():
    def fails() -> None:
        raise SystemExit(3)

    assert write_trial.areas_written(fails) == frozenset()


def test_trial_steps_that_leave_children_or_never_end_are_not_awaited(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(write_trial, "_SECONDS", 0.5)
    assert write_trial.areas_written(lambda: os.fork() or time.sleep(5)) is not None
    assert write_trial.areas_written(lambda: time.sleep(60)) == frozenset()


def test_steps_on_trial_tell_where_they_wrote_and_change_nothing():
    seen: list[int] = []
    assert write_trial.areas_written(lambda: seen.append(1)) <= frozenset(memory_layout._huge_areas())
    assert not seen
