"""A trial of a sandbox's first writes in a fork: huge pages are of use only under memory left alone.

A fork that writes to one page of a huge one has it taken apart: 11 microseconds, and a page of page tables.
The rest is one huge page that hundreds of processes have in pieces, of which the system looks at every piece
in each of them when it wants to know whether the page is used: a third of a core with 500 sandboxes, where
something asks twice a second.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # typeshed knows only `signal`
import os
import select
import time

from cloche.linux import memory_layout, syscalls

_SECONDS = 20  # for a template whose code never comes to an end here


def areas_written(first_steps) -> frozenset:
    """The areas, as `hugepages` counts them, that a fork writes to in these steps; none if it failed."""
    told, tell = os.pipe2(os.O_CLOEXEC)
    pid = syscalls.fork_bare()
    if pid == 0:
        _run_steps(first_steps, tell)
    os.close(tell)
    words = _read_words(told)
    os.close(told)
    os.kill(pid, _signal.SIGKILL)
    os.waitpid(pid, 0)
    return frozenset(map(int, words))


def _read_words(told: int) -> list:
    """Reads up to the first line's end, and no further.

    Other holders of the pipe, or a fork that never ends, are not awaited.
    """
    text, poll, ends_at = b"", select.poll(), time.monotonic() + _SECONDS
    poll.register(told, select.POLLIN)
    while not text.endswith(b"\n") and poll.poll(max(ends_at - time.monotonic(), 0) * 1000):
        piece = os.read(told, 65536)
        if not piece:
            break
        text += piece
    return text.split() if text.endswith(b"\n") else []


def _run_steps(first_steps, tell: int) -> None:
    """In the fork. Never returns."""
    try:
        first_steps()
        os.write(tell, b" ".join(b"%d" % area for area in memory_layout.own_areas()) + b"\n")
    finally:
        os._exit(0)
