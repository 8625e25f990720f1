"""Where sandboxes write first, tried in a fork: huge pages are of use only under what forks leave alone.

A fork that writes to one page of a huge one has it taken apart: 11 microseconds, and a page of page tables. What is
left is one huge page that hundreds of processes have in pieces, of which the system looks at every piece in each of
them when it wants to know whether the page is used: a third of a core with 500 sandboxes, where something asks twice a
second.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # typeshed knows only `signal`
import os

from cloche.linux import hugepages, syscalls

_SECONDS = 20  # for a template whose code never comes to an end here


def areas_written(first_steps) -> frozenset:
    """The areas, as `hugepages` counts them, to which a fork has written that took these steps; none if it failed."""
    told, tell = os.pipe2(os.O_CLOEXEC)
    pid = syscalls.fork_bare()
    if pid == 0:
        _take(first_steps, tell)
    os.close(tell)
    with open(told, "rb") as file:
        words = file.read().split()
    os.waitpid(pid, 0)
    return frozenset(map(int, words))


def _take(first_steps, tell: int) -> None:
    """In the fork. Never returns."""
    try:
        _signal.alarm(_SECONDS)
        first_steps()
        os.write(tell, b" ".join(b"%d" % area for area in hugepages.own_areas()))
    finally:
        os._exit(0)
