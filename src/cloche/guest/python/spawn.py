"""The source file for processes started by `spawn`, which run the program's file again under another name.

The program itself has no file. So one is made for them, when the first is started. Its code seems to come
from the program's apparent path.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
from typing import Any

# The modules that tell a new process what to run, and words of programs that will import them.
_TELLING = ("multiprocessing.spawn", "joblib.externals.loky.backend.spawn")
_TELLTALE = (b"multiprocessing", b"ProcessPool")
_PROGRAM = """\
__file__ = {path!r}
exec((lambda text, path, linecache: (
    linecache.cache.update({{path: (len(text), None, text.splitlines(True), path)}}),
    compile(text, path, "exec", dont_inherit=True),
)[1])({text!r}, __file__, __import__("linecache")))
"""


def provide_source(source: bytes, path: str) -> None:
    """In a program that is about to run: provides its source to the processes that it will spawn."""
    if any(word in source for word in _TELLTALE):
        importlib.import_module(_TELLING[0])
    made: list = []
    for module in [sys.modules[name] for name in _TELLING if name in sys.modules]:
        _wrap_preparation(module, source, path, made)


def _wrap_preparation(module: Any, source: bytes, path: str, made: list) -> None:
    original = module.get_preparation_data

    def get_preparation_data(*args: Any, **options: Any) -> dict:
        data: dict = original(*args, **options)
        if data.get("init_main_from_path") == path:
            del data["init_main_from_path"]
            data.update(_main_path_data(source, path, made))
        return data

    module.get_preparation_data = get_preparation_data


def _main_path_data(source: bytes, path: str, made: list) -> dict:
    """The path for the new process; none for a program that awaits outside of functions.

    Such a program cannot run as a module.
    """
    try:
        compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return {}
    if not made:
        made.append(_write_main_file(source, path))
    return {"init_main_from_path": made[0]}


def _write_main_file(source: bytes, path: str) -> str:
    tempfile: Any = importlib.import_module("tempfile")
    fd, name = tempfile.mkstemp(".py", "main-")
    with open(fd, "w", encoding="utf-8") as file:
        file.write(_PROGRAM.format(path=path, text=source.decode("utf-8", "replace")))
    atexit.register(_remove_main_file, name, os.getpid())
    return str(name)


def _remove_main_file(name: str, pid: int) -> None:
    """Removes the file, only in the process that made it: forks of the program have this exit function, too."""
    if os.getpid() == pid and os.path.exists(name):
        os.unlink(name)
