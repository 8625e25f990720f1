"""Turns a fork of the fork server into an interpreter that seems just to have started.

A kernel was prepared in that fork. The template's imports stay imported: that is the point. All other state
that a program could see is reset.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # typeshed knows only `signal`
import asyncio
import atexit
import builtins
import ctypes
import gc
import getpass
import io
import itertools
import os
import sys
import threading
import warnings
from typing import Any

from cloche.guest.kernel import import_hooks, kernel, pil_images, plotly_figures
from cloche.guest.kernel.reseed import reseed_after_fork

# As they are before a kernel is made: this module is imported first.
_BUILTINS = {name: getattr(builtins, name, None) for name in ("input", "exit", "quit")}
_GETPASS = getpass.getpass
_FIRST_FLAG = tuple.__basicsize__  # where the items of a tuple lie
_POINTER_BYTES = ctypes.sizeof(ctypes.c_void_p)
_LIB = "/opt/cloche/lib"
_AS_STARTED = {"isolated": 0, "ignore_environment": 0, "no_user_site": 0, "safe_path": False}


def other_modules(directory: str | None) -> set:
    """The names of modules here that a program would find elsewhere: in its own directory, or where programs install
    to. If there are any, a new interpreter has to be started for it."""
    installed = kernel.prepared[0].installed
    return (
        installed.shadowed_modules()
        | installed.customize_modules()
        | (_shadowed_names(directory) if directory else set())
    )


def _shadowed_names(directory: str) -> set:
    """The names of imported modules that also lie in that directory."""
    try:
        with os.scandir(directory) as entries:
            named = [entry for entry in entries if entry.name.partition(".")[0] in sys.modules]
    except OSError:
        return set()
    return {entry.name.partition(".")[0] for entry in named if _is_module(entry)}


def _is_module(entry: Any) -> bool:
    """A directory counts only with an `__init__`: otherwise the imported module comes first all the same."""
    _, dot, suffix = entry.name.partition(".")
    if dot:
        return suffix == "py" or suffix.endswith(("pyc", "so"))
    return any(os.path.exists(os.path.join(entry.path, f"__init__.{kind}")) for kind in ("py", "pyc", "so"))


def start_interpreter(*, unbuffered: bool = False, dont_write_bytecode: bool = False) -> None:
    """In the fork, which is its user already, and has its environment and directory."""
    reseed_after_fork()
    gc.enable()
    _remove_notebook()
    _follow_installed(dont_write_bytecode)
    _restore_drawing()
    _set_flags({**_AS_STARTED, "dont_write_bytecode": int(dont_write_bytecode), "unbuffered": int(unbuffered)})
    _restore_signals()
    _open_streams(unbuffered)
    asyncio.events._event_loop_policy = None  # type: ignore[attr-defined]  # the notebook's loop was the main thread's
    threading._counter = itertools.count(1).__next__  # type: ignore[attr-defined]  # of threads without a name
    warnings._filters_mutated()  # type: ignore[attr-defined]  # warnings that the warm-up met come again


def _remove_notebook() -> None:
    """IPython is imported, and nothing else of it is left: no shell, no builtins, no prompt."""
    shell: Any = kernel.prepared[0].shell
    atexit.unregister(shell.atexit_operations)
    shell.builtin_trap.deactivate()
    type(shell).clear_instance()
    sys.displayhook, sys.excepthook = sys.__displayhook__, sys.__excepthook__
    sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
    for name in ("display", "__IPYTHON__", "get_ipython", "_"):
        builtins.__dict__.pop(name, None)
    for name in ("ps1", "ps2", "ps3", "last_type", "last_value", "last_traceback", "last_exc"):
        sys.__dict__.pop(name, None)
    builtins.__dict__.update({name: value for name, value in _BUILTINS.items() if value is not None})
    getpass.getpass = _GETPASS


def _follow_installed(dont_write_bytecode: bool) -> None:
    installed = kernel.prepared[0].installed
    if _LIB in sys.path:
        sys.path.remove(_LIB)
    usersite: Any = sys.modules.get("cloche_usersite")
    if usersite is not None and usersite.draws_to_files():
        sys.path.append(os.path.dirname(usersite.__file__))
    sys.dont_write_bytecode = dont_write_bytecode
    installed.follow()
    installed.begin()


def _restore_drawing() -> None:
    """Matplotlib's backend is that of the environment again, and pictures are shown as PIL and plotly do it."""
    import_hooks.remove_hooks()
    pil_images.unhook_pil()
    plotly_figures.unhook_plotly()
    matplotlib: Any = sys.modules.get("matplotlib")
    if matplotlib is None:
        return
    backend = os.environ.get("MPLBACKEND") or matplotlib.rcsetup._auto_backend_sentinel
    dict.__setitem__(matplotlib.rcParams, "backend", backend)
    dict.__setitem__(matplotlib.rcParamsOrig, "backend", backend)
    pyplot: Any = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot._backend_mod = None  # resolved when first needed
        pyplot._REPL_DISPLAYHOOK = pyplot._ReplDisplayHook.NONE


def _set_flags(wanted: dict) -> None:
    """The flags of the command line that a program sees. Init's are `-I`, and subprocesses would inherit them.

    Nothing in Python makes another sys.flags, so its items are replaced. They are small numbers, which live for ever.
    """
    names = list(type(sys.flags).__match_args__)
    for name, value in wanted.items():
        if name in names and getattr(sys.flags, name) != value:
            at = id(sys.flags) + _FIRST_FLAG + names.index(name) * _POINTER_BYTES
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
            ctypes.c_void_p.from_address(at).value = id(value)


def _restore_signals() -> None:
    """Sets the signals as an interpreter does at its start. Signals that its caller ignores stay ignored."""
    for number in (_signal.SIGPIPE, _signal.SIGXFSZ):
        _signal.signal(number, _signal.SIG_IGN)
    if _signal.getsignal(_signal.SIGINT) != _signal.SIG_IGN:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)


def _open_streams(unbuffered: bool) -> None:
    for fd, name, mode, errors in (
        (0, "stdin", "r", "surrogateescape"),
        (1, "stdout", "w", "surrogateescape"),
        (2, "stderr", "w", "backslashreplace"),
    ):
        stream = _open_stream(fd, f"<{name}>", mode, errors, unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _open_stream(fd: int, name: str, mode: str, errors: str, unbuffered: bool) -> Any:
    """As CPython's own `create_stdio` does it."""
    binary: Any = open(fd, f"{mode}b", 0 if unbuffered and mode == "w" else -1, closefd=False)  # noqa: SIM115
    raw = getattr(binary, "raw", binary)
    raw.name = name
    lines = not unbuffered and (raw.isatty() or fd == 2)
    stream: Any = io.TextIOWrapper(binary, "utf-8", errors, "\n", line_buffering=lines, write_through=unbuffered)
    stream.mode = mode
    return stream
