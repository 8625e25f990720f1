"""A Python program that the host starts in a fork of the fork server.

It runs as by `python3`, with everything imported. A program that a fork cannot reproduce runs in an
interpreter of its own: see `interpreter.other_modules`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from typing import NoReturn

from cloche.linux.memory_file import open_unnamed_file

# Our package is named by its place: without walls there is another of that name, which needs more than there is.
_FRESH = """
import sys
before = set(sys.modules)
del sys.path[0]
import types
sys.modules["cloche"] = types.ModuleType("cloche")
sys.modules["cloche"].__path__ = [sys.argv[2]]
from cloche.guest.python.run import run_afresh
run_afresh(int(sys.argv[1]), before, sys.argv[3:])
"""
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def run_script(order: dict, source: bytes) -> NoReturn:
    """In a fork in which everything is imported, and that is its user's already."""
    from cloche.guest.kernel import threads
    from cloche.guest.python import interpreter
    from cloche.guest.python import run as running

    others = interpreter.other_modules(running.working_directory())
    if others:
        exec_interpreter(order, source, others)
    interpreter.start_interpreter()
    threads.restore_for_source(source)
    running.run_source(order, source)


def exec_interpreter(order: dict, source: bytes, others: Iterable = ()) -> NoReturn:
    """In an interpreter of its own. `others`: modules that the program shall find elsewhere than we do."""
    order = {**order, "others": list(others)}
    fd = open_unnamed_file("program")
    with open(fd, "wb", closefd=False) as file:
        file.write(json.dumps(order).encode() + b"\n" + source)
    os.lseek(fd, 0, os.SEEK_SET)
    # Without walls, packages are where only we know them to be.
    paths = [path for path in sys.path if path.endswith("site-packages")] if sys.flags.no_site else []
    os.execv(sys.executable, [sys.executable, "-c", _FRESH, str(fd), _PACKAGE, *paths])
