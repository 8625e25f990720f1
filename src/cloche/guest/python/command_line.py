"""A Python command line (a file, `-c`, `-m`, stdin) run in a fork of the fork server: see `warm_python`."""

from __future__ import annotations

import importlib.machinery
import os
import runpy
import sys
from typing import Any, NoReturn

from cloche.guest.init.service_sockets import RequestRefused
from cloche.guest.kernel import threads
from cloche.guest.python import exit, interpreter
from cloche.guest.python import run as running
from cloche.guest.python.client import REAL_PYTHON
from cloche.linux.memory_file import open_unnamed_file

# Words of programs that look at the stack, on which we are below them; that do what the leader of a session may not;
# and that set what is heeded by an import.
_UNFORKABLE_WORDS = (
    *(b"import pdb", b"set_trace(", b"breakpoint(", b"faulthandler", b"print_stack", b"format_stack", b"extract_stack"),
    *(b"inspect.stack", b"stack_info", b"setsid()", b"setpgrp()", b"setpgid("),
    *(b"sys.path.insert", b"MPLBACKEND", b"MPLCONFIGDIR", b"MATPLOTLIBRC", b"_NUM_THREADS"),
)


def check_request(order: Any) -> None:
    """Raises RequestRefused where a new interpreter would find other modules or settings.

    This process is the user already.
    """
    directory = _first_directory(order)
    if directory is None:
        raise RequestRefused("its directory is gone, which an interpreter notices in places that a fork has passed")
    directory = directory or "."
    if interpreter.other_modules(directory) or _has_matplotlibrc():
        raise RequestRefused("it would find other modules, or settings, than are imported here")
    if order.kind == "module" and not {order.argument, f"{order.argument}.__main__"}.isdisjoint(sys.modules):
        raise RequestRefused("this module is imported already")
    if order.kind != "stdin":
        order.source = _read_source(order)
        if not _can_run(order.source):
            raise RequestRefused("this program would be able to tell")


def run_program(order: Any) -> NoReturn:
    """Runs the program. The descriptors are in place. Never returns."""
    source = _read_source(order) if order.kind == "stdin" else order.source
    if not _can_run(source):
        _exec_interpreter(order.words, source)
    interpreter.start_interpreter(**order.flags)
    threads.restore_for_source(source)
    sys.argv = list(order.argv) or [""]
    sys.orig_argv = [sys.executable, *order.words]
    first = _first_directory(order)
    if first is not None:
        sys.path.insert(0, first)
    running.make_main_module(**_main_facts(order))
    running.hide_own_modules()
    if order.kind == "module":
        _run_module(order.argument)
    if order.kind == "file":
        running.execute_program(source, _absolute_path(order.argument))
    name, in_memory = ("<string>", sys.version_info >= (3, 13)) if order.kind == "command" else ("<stdin>", False)
    running.execute_program(source, name, from_memory=in_memory)


def _main_facts(order: Any) -> dict:
    """The variables that `__main__` has about itself."""
    if order.kind == "stdin":
        return {"__file__": "<stdin>", "__cached__": None}
    if order.kind != "file":
        return {}
    path = _absolute_path(order.argument)
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    return {"__file__": path, "__cached__": None, "__loader__": loader}


def _first_directory(order: Any) -> str | None:
    """The first entry of sys.path; None if the working directory is gone."""
    if order.kind == "file":
        return os.path.dirname(os.path.realpath(order.argument))
    if order.kind != "module":
        return ""
    try:
        return os.getcwd()
    except OSError:
        return None


def _absolute_path(path: str) -> str:
    """The path joined to the working directory, not normalized."""
    try:
        return os.path.join(os.getcwd(), path)
    except OSError:
        return path


def _read_source(order: Any) -> bytes:
    if order.kind == "command":
        return os.fsencode(order.argument) + b"\n"
    if order.kind == "module":
        return b""
    with open(order.file if order.kind == "file" else 0, "rb", closefd=order.kind == "file") as file:
        return file.read()


def _has_matplotlibrc() -> bool:
    """Of matplotlib's, which it reads when it is imported."""
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return os.path.exists("matplotlibrc") or os.path.exists(os.path.join(home, "matplotlib", "matplotlibrc"))


def _can_run(source: bytes) -> bool:
    """Whether it runs here as in an interpreter of its own. Messages about text that cannot be read differ."""
    try:
        source.decode()
    except UnicodeDecodeError:
        return False
    if any(b"coding" in line and b"utf" not in line.lower() for line in source.split(b"\n", 2)[:2]):
        return False
    return b"\0" not in source and not any(word in source for word in _UNFORKABLE_WORDS)


def _exec_interpreter(words: list, source: bytes) -> NoReturn:
    """With a program that was on stdin, from where it has been read."""
    fd = open_unnamed_file("stdin")
    with open(fd, "wb", closefd=False) as file:
        file.write(source)
    os.lseek(fd, 0, os.SEEK_SET)
    os.dup2(fd, 0)
    os.close(fd)
    os.execv(REAL_PYTHON, [REAL_PYTHON, *words])


def _run_module(name: str) -> NoReturn:
    """By the function that an interpreter itself calls for `-m`."""
    as_main: Any = runpy._run_module_as_main  # type: ignore[attr-defined]
    exit.exit_process(exit.run_catching(lambda: as_main(name, True)), as_main.__code__, from_memory=False)
