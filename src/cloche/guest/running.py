"""A program's way through an interpreter that has just started, or seems so: its `__main__`, its code, its end.

Nothing here needs what the nursery has prepared: it runs in forks and in interpreters of their own.
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

from cloche.guest import awaiting, ending

_OURS = ("cloche", "cloche.")
_kept: list = []  # our own modules: taken out of sys.modules, they must not go


def run_afresh(fd: int, before: set, paths: list) -> NoReturn:
    """In a new interpreter, with what `script` has written to that file. `paths` come last in its sys.path.

    What was imported since `before`, and the program shall find elsewhere, is imported again.
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
    new_main(__file__=path, __cached__=None)
    if directory is not None:
        sys.path.insert(0, directory)
    _offer(order.get("tools"))
    execute(source, path, awaits=bool(order.get("awaits")), from_memory=True)


def new_main(**facts: Any) -> None:
    """A fresh `__main__` with these variables, where pickle, inspect and multiprocessing look for it."""
    main: Any = types.ModuleType("__main__")
    main.__loader__ = sys.modules["_frozen_importlib"].BuiltinImporter
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    main.__builtins__ = builtins
    main.__dict__.update(facts)
    ending.imported.update(sys.modules.keys() - {"__main__"})
    sys.modules["__main__"] = main


def hide_ourselves() -> None:
    """A program cannot import what is ours, nor does it see it."""
    for name in [name for name in sys.modules if name == _OURS[0] or name.startswith(_OURS[1])]:
        _kept.append(sys.modules.pop(name))


def _offer(tools: dict | None) -> None:
    if tools:
        functions = importlib.import_module("cloche.guest.tools").functions(tools)
        sys.modules["__main__"].__dict__.update({**awaiting.KNOWN, **functions})
    else:
        hide_ourselves()


def execute(source: bytes, path: str, *, awaits: bool = False, from_memory: bool = False) -> NoReturn:
    """Compiles and runs a program in `__main__`, and ends as it ends."""
    code: list = []
    if from_memory:
        _remember(source, path)

    def run() -> None:
        code.append(awaiting.compiled(source, path) if awaits else compile(source, path, "exec", dont_inherit=True))
        _evaluate(code[0], sys.modules["__main__"].__dict__)

    ending.end(ending.raised_by(run), code[0] if code else None, from_memory=from_memory)


def _evaluate(code: Any, names: dict) -> None:
    if code.co_flags & CO_COROUTINE:
        asyncio.run(eval(code, names))
    else:
        exec(code, names)


def _remember(source: bytes, path: str) -> None:
    """For the lines of tracebacks, and inspect.getsource."""
    text = source.decode("utf-8", "replace")
    linecache.cache[path] = (len(text), None, [line + "\n" for line in text.split("\n")], path)


def working_directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None
