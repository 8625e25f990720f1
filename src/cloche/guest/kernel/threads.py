"""Thread counts of numerical libraries.

The nursery imports them with one thread, since a process with threads cannot be forked safely. A kernel that
turns out to compute gets them back, between two cells; one that does not never pays for them. A program that
names such a library gets them when it starts: to start them takes a while, and is the same as in an
interpreter that imports it.
"""

from __future__ import annotations

import os
import re
import sys

BUSY_SECONDS = 0.25
_NUMERICAL = re.compile(rb"\b(?:numpy|scipy|sklearn|statsmodels|torch)\b")
_found: list = []  # what sets the number of threads of each library that the nursery has loaded


def find_libraries() -> None:
    """In the nursery, after its imports: to look for the libraries takes longer than to start their threads."""
    try:
        import threadpoolctl  # type: ignore[import-not-found]
    except ImportError:
        return
    _found[:] = threadpoolctl.ThreadpoolController().lib_controllers


def restore_threads() -> None:
    """As many threads as there are processors for us."""
    processors = len(os.sched_getaffinity(0))
    for library in _found:
        library.set_num_threads(processors)


def restore_for_source(source: bytes) -> None:
    if _NUMERICAL.search(source):
        restore_threads()


class NumericThreads:
    def __init__(self) -> None:
        self._restored = False

    def after_busy_cell(self) -> None:
        """The first cell that used BUSY_SECONDS of CPU brings the threads back."""
        if self._restored or "numpy" not in sys.modules:
            return
        self._restored = True
        if not _found:  # a kernel that was not forked has imported them itself, with their threads
            find_libraries()
        restore_threads()
