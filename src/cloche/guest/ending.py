"""How a Python program ends: what its last exception means, and what an interpreter still does before it is gone.

CPython takes itself apart when it ends. Here that would take longer than the program: every page of what was imported
before the fork would be copied. So of this only what a program can see is done.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # typeshed knows only `signal`
import atexit
import ctypes
import gc
import os
import sys
import threading
import traceback
import weakref
from types import ModuleType
from typing import Any, NoReturn

_libc = ctypes.CDLL(None)
imported: set = set()  # the names of modules that were there before the program
_STREAM_LOST = 120  # CPython's exit code where what was written cannot be delivered


def raised_by(program: Any) -> list:
    """Runs it. What it raised, if it did.

    Who interrupts a program may do it twice (`timeout` does), and the second time must not find us between two steps.
    """
    raised: list = []
    try:
        try:
            program()
        except BaseException as error:  # noqa: BLE001 - the program may raise anything
            if isinstance(error, KeyboardInterrupt):
                _ignore_interrupts()
            raised.append(error)
    except KeyboardInterrupt as error:
        _ignore_interrupts()
        raised[:] = raised or [error]
    return raised


def _ignore_interrupts() -> None:
    """The program ends by one already."""
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, lambda *_: None)


def end(raised: list, code: Any, *, from_memory: bool) -> NoReturn:
    """Ends this process as an interpreter ends whose program has raised that, one exception or none.

    It is taken out of the list: nothing of ours may hold what is the program's. `code` is what it ran. `from_memory`:
    the lines of the program are in no file.
    """
    status, interrupted = 0, False
    if raised and isinstance(raised[0], SystemExit):
        status = _exit_status(raised.pop())
    elif raised:
        interrupted, status = isinstance(raised[0], KeyboardInterrupt), 1
        _print(raised.pop(), code, from_memory)
    status = _finish(status)
    if interrupted:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
        os.kill(os.getpid(), _signal.SIGINT)
    os._exit(status & 0xFF)


def _exit_status(error: SystemExit) -> int:
    _flush(sys.stdout)
    code = error.code
    if code is None:
        return 0
    if isinstance(code, int):
        return code if -(1 << 63) <= code < 1 << 63 else -1
    try:
        print(code, file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):
        pass
    return 1


def _print(error: BaseException, code: Any, from_memory: bool) -> None:
    """By the program's own hook, without what is above the program on the stack."""
    begin = _first_of(error.__traceback__, code)
    error = error.with_traceback(begin)
    _flush(sys.stdout)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, begin
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    hook = sys.excepthook
    if from_memory and hook is sys.__excepthook__:
        hook = traceback.print_exception  # the interpreter's own looks for lines in files only
    try:
        hook(type(error), error, begin)
    except SystemExit as exiting:
        os._exit(_exit_status(exiting) & 0xFF)
    except BaseException as failure:  # noqa: BLE001 - the program's hook may raise anything
        sys.stderr.write("Error in sys.excepthook:\n")
        traceback.print_exception(failure.with_traceback(failure.__traceback__ and failure.__traceback__.tb_next))
        sys.stderr.write("\nOriginal exception was:\n")
        traceback.print_exception(error)


def _first_of(begin: Any, code: Any) -> Any:
    """The part of a traceback that is the program's. A program that could not be compiled has none."""
    if code is None:
        return None
    found = begin
    while found is not None and found.tb_frame.f_code is not code:
        found = found.tb_next
    _cut_off_tools(found)
    return found


def _cut_off_tools(begin: Any) -> None:
    """What is inside a tool's function is ours (see `tools`), and says nothing to the program's author."""
    while begin is not None:
        following = begin.tb_next
        if following is not None and following.tb_frame.f_code.co_filename.startswith("<tool "):
            begin.tb_next = following = None
        begin = following


def _finish(status: int) -> int:
    """Waits for threads, calls what was registered, writes what is buffered, lets go of what is the program's."""
    _guarded(threading._shutdown)  # type: ignore[attr-defined]
    _guarded(atexit._run_exitfuncs)
    if not _flush(sys.stdout, told=True):
        status = _STREAM_LOST
    _flush(sys.stderr)
    _let_go()
    _flush(sys.stdout)
    _flush(sys.stderr)
    _libc.fflush(None)
    return status


def _guarded(step: Any) -> None:
    try:
        step()
    except BaseException as error:  # noqa: BLE001 - a program's threads and exit functions may raise anything
        print("Exception ignored in:", step, file=sys.stderr)
        traceback.print_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))


def _flush(stream: Any, told: bool = False) -> bool:
    try:
        if stream is not None and not stream.closed:
            stream.flush()
    except Exception as error:  # noqa: BLE001 - the program may have put anything there
        if told:
            _tell_lost(stream, error)
        return False
    return True


def _tell_lost(stream: Any, error: Exception) -> None:
    new = sys.version_info >= (3, 13)
    what = "Exception ignored on flushing sys.stdout:" if new else f"Exception ignored in: {stream!r}"
    try:
        sys.stderr.write(f"{what}\n{type(error).__name__}: {error}\n")
    except (OSError, ValueError, AttributeError):
        pass


def _let_go() -> None:
    """Of the program's modules, as CPython does it, so that what they hold is finalized."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            setattr(sys, name, None)
    modules = [weakref.ref(sys.modules.pop(name)) for name in _new_modules()]
    gc.collect()
    for module in reversed(modules):
        if (left := module()) is not None:
            _clear(left.__dict__)


def _new_modules() -> list:
    """The names of what the program has imported itself, and of itself. Some put other things than modules there."""
    return [name for name, module in sys.modules.items() if name not in imported and isinstance(module, ModuleType)]


def _clear(names: dict) -> None:
    """In CPython's order: names with an underscore first, then the others."""
    first = [name for name in names if isinstance(name, str) and name.startswith("_") and not name.startswith("__")]
    for name in (*first, *[name for name in names if name != "__builtins__" and name not in first]):
        names[name] = None
