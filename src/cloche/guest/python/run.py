"""The run of a program in an interpreter that has started, or seems so: its `__main__`, code and end.

Nothing here depends on the nursery's preparations: it runs in forks and in interpreters of their own.
"""

from __future__ import annotations

import asyncio
import builtins
import importlib
import json
import linecache
import os
import sys
import types
from inspect import CO_COROUTINE
from typing import Any, NoReturn

from cloche.guest.kernel import shell
from cloche.guest.python import exit, spawn

_OURS = ("cloche", "cloche.")
_kept: list = []  # our own modules: taken out of sys.modules, they must not go
_own_names: list = []  # of them, where that was looked up before the fork


def run_afresh(fd: int, before: set, paths: list) -> NoReturn:
    """In a new interpreter: runs the program that `script` has written to that file.

    `paths` come last in its sys.path.

    Modules imported since `before` that the program shall find elsewhere are imported again.
    """
    with open(fd, "rb") as file:
        head, _, source = file.read().partition(b"\n")
    order = json.loads(head)
    for name in set(order["others"]) & sys.modules.keys() - before:
        _kept.append(sys.modules.pop(name))
    sys.path += paths
    run_source(order, source)


def run_source(order: dict, source: bytes) -> NoReturn:
    """As `python3 NAME` would if the source were in that file of the working directory. See `process_start`."""
    name, directory = order["name"], working_directory()
    path = os.path.join(directory or "/", name)
    sys.argv = [name, *order.get("argv", ())]
    sys.orig_argv = [sys.executable, *sys.argv]
    make_main_module(__file__=path, __cached__=None)
    if directory is not None:
        sys.path.insert(0, directory)
    spawn.provide_source(source, path)
    if order.get("awaits"):
        sys.set_coroutine_origin_tracking_depth(1)  # what was never awaited is told with the line that it is from
    _offer_tools(order.get("tools"))
    execute_program(source, path, awaits=bool(order.get("awaits")), from_memory=True)


def make_main_module(**facts: Any) -> None:
    """A fresh `__main__` with these variables, where pickle, inspect and multiprocessing look for it."""
    main: Any = types.ModuleType("__main__")
    main.__loader__ = sys.modules["_frozen_importlib"].BuiltinImporter
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    main.__builtins__ = builtins
    main.__dict__.update(facts)
    sys.modules.pop("__main__", None)
    sys.modules["__main__"] = main  # as the last: what the program imports comes after it, see `ending`


def record_own_modules() -> None:
    """In the zygote: records the names of our modules.

    A search in the fork would copy pages, as long as its start takes.
    """
    _own_names[:] = _own_module_names()


def hide_own_modules() -> None:
    """Hides our modules: a program can neither import nor see them."""
    for name in _own_names or _own_module_names():
        _kept.append(sys.modules.pop(name, None))


def _own_module_names() -> list:
    return [name for name in sys.modules if name == _OURS[0] or name.startswith(_OURS[1])]


def _offer_tools(tools: dict | None) -> None:
    if tools:
        functions = importlib.import_module("cloche.guest.kernel.tools").functions(tools)
        sys.modules["__main__"].__dict__.update({**shell.PRESET_NAMES, **functions})
    else:
        hide_own_modules()


def execute_program(source: bytes, path: str, *, awaits: bool = False, from_memory: bool = False) -> NoReturn:
    """Compiles and runs a program in `__main__`, and ends as it ends."""
    code: list = []
    if from_memory:
        _cache_lines(source, path)

    def run() -> None:
        code.append(_compile_program(source, path, awaits, from_memory))
        names = sys.modules["__main__"].__dict__
        if code[0].co_flags & CO_COROUTINE:
            asyncio.run(eval(code[0], names))
        elif awaits and shell.needs_event_loop(source.decode("utf-8", "replace")):
            asyncio.run(shell.run_in_loop(code[0], names))
        else:
            exec(code[0], names)

    exit.exit_process(exit.run_catching(run), code[0] if code else None, from_memory=from_memory)


def _compile_program(source: bytes, path: str, awaits: bool, from_memory: bool) -> Any:
    try:
        return shell.compile_program(source, path) if awaits else compile(source, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        if from_memory and error.text is None and error.filename == path and error.lineno:
            error.text = linecache.getline(path, error.lineno)  # some are raised when only a file could tell
        raise


def _cache_lines(source: bytes, path: str) -> None:
    """Caches the source lines for tracebacks and inspect.getsource."""
    text = source.decode("utf-8", "replace")
    linecache.cache[path] = (len(text), None, [line + "\n" for line in text.split("\n")], path)


def working_directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None
