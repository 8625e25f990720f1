"""How a Python program ends: what its last exception means, and what an interpreter still does before it is gone.

CPython takes itself apart when it ends. Here that would take longer than the program: every page of what was imported
before the fork would be copied. So of this only what a program can see is done.
"""

from __future__ import annotations

import _io
import _signal  # type: ignore[import-not-found]  # typeshed knows only `signal`
import atexit
import ctypes
import gc
import io
import itertools
import os
import sys
import threading
import traceback
import weakref
from types import ModuleType
from typing import Any, NoReturn

_libc = ctypes.CDLL(None)
_STREAM_LOST = 120  # CPython's exit code where what was written cannot be delivered
# An interpreter that ends has no line of its own: warnings about what is then let go of are of line 1 of "sys".
_as_interpreter: Any = eval(compile("lambda step, *given: step(*given)", "sys", "eval", dont_inherit=True))


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
    if code is not None:
        _cut_off_tools_of_others(error)
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
    found = _first(begin, lambda one: one is code) or _first(begin, lambda one: one.co_filename == code.co_filename)
    _cut_off_tools(found)
    return found


def _first(begin: Any, suits: Any) -> Any:
    while begin is not None and not suits(begin.tb_frame.f_code):
        begin = begin.tb_next
    return begin


def _cut_off_tools(begin: Any) -> None:
    """What is inside a tool's function is ours (see `tools`), and says nothing to the program's author."""
    while begin is not None:
        following = begin.tb_next
        if following is not None and following.tb_frame.f_code.co_filename.startswith("<tool "):
            begin.tb_next = following = None
        begin = following


def _cut_off_tools_of_others(error: BaseException) -> None:
    """In the exceptions that this one came from, or is made of. There may be more than calls can be nested."""
    seen, left = {id(error)}, [error]
    while left:
        one = left.pop()
        for other in (one.__cause__, one.__context__, *(getattr(one, "exceptions", None) or ())):
            if isinstance(other, BaseException) and id(other) not in seen:
                seen.add(id(other))
                left.append(other)
                _cut_off_tools(other.__traceback__)


def _finish(status: int) -> int:
    """Waits for threads, calls what was registered, writes what is buffered, lets go of what is the program's."""
    _guarded(threading._shutdown)  # type: ignore[attr-defined]
    _guarded(atexit._run_exitfuncs)
    if not all([_flush(sys.stdout, told=True), _flush(sys.stderr)]):
        status = _STREAM_LOST
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
        if stream is not None and not _is_closed(stream):
            stream.flush()
    except Exception as error:  # noqa: BLE001 - the program may have put anything there
        if told:
            _tell_lost(stream, error)
        return False
    return True


def _is_closed(stream: Any) -> bool:
    """A stream of the program's own making needs no such attribute."""
    try:
        return bool(stream.closed)
    except Exception:  # noqa: BLE001 - nor one that works
        return False


def _tell_lost(stream: Any, error: Exception) -> None:
    new = sys.version_info >= (3, 13)
    what = "Exception ignored on flushing sys.stdout:" if new else f"Exception ignored in: {stream!r}"
    inner = error.__traceback__ and error.__traceback__.tb_next  # the first is ours
    try:
        sys.stderr.write("\n".join([what, "".join(traceback.format_exception(error.with_traceback(inner)))]))
    except (OSError, ValueError, AttributeError):
        pass


def _let_go() -> None:
    """Of the program's modules, as CPython does it, so that what they hold is finalized."""
    # With the modules still there: it puts what holds another before it, so that files write what they have buffered
    # before what is below them is closed.
    _as_interpreter(gc.collect)
    sys.modules["tracemalloc"] = None  # type: ignore[assignment]  # from here on, nobody can enable that any more
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            _as_interpreter(setattr, sys, name, None)
    for name in ("stdin", "stdout", "stderr"):
        _as_interpreter(setattr, sys, name, getattr(sys, f"__{name}__", None))
    modules = _without_modules()
    _as_interpreter(gc.collect)
    for module in reversed(modules):
        if (left := module()) is not None:
            _clear(left.__dict__)
    _close_files()


def _without_modules() -> list:
    """Takes the program's modules out. References to them, which are dead where nothing else holds them."""
    names = _new_modules()
    modules = [weakref.ref(sys.modules[name]) for name in names]
    for name in names:
        _as_interpreter(sys.modules.__delitem__, name)
    return modules


def _close_files() -> None:
    """What still hangs on a module that was there before the program: CPython would let go of that as well."""
    if threading.active_count() > 1:
        return  # a thread that nobody waits for may be writing to one, and would be waited for
    standard = {id(part) for name in ("stdin", "stdout", "stderr") for part in _parts(getattr(sys, name))}
    left = [each for each in gc.get_objects() if issubclass(type(each), _io._IOBase) and id(each) not in standard]
    for file in sorted(left, key=_depth):
        try:
            file.close()
        except Exception:  # noqa: BLE001 - a finalizer's are not told either
            pass


def _parts(stream: Any) -> list:
    """A stream, its buffer, and what is below that."""
    try:
        return [stream, stream.buffer, stream.buffer.raw]
    except (AttributeError, ValueError):  # ValueError: the program has detached it
        return [stream]


def _depth(file: Any) -> int:
    """Those that hold others are closed first: text, what compresses and the like, buffers."""
    if isinstance(file, io.TextIOBase):
        return 0
    return 1 if type(file).__module__ != "_io" else 3 - isinstance(file, io.BufferedIOBase)


def _new_modules() -> list:
    """The names of itself and what the program has imported, in this order. Some put other things than modules there.

    From the end on: what came before it is not even looked at, since that would copy its pages.
    """
    if "__main__" not in sys.modules:
        return []
    names = ["__main__", *reversed(list(itertools.takewhile(lambda name: name != "__main__", reversed(sys.modules))))]
    return [name for name in names if isinstance(sys.modules[name], ModuleType)]


def _clear(names: dict) -> None:
    """In CPython's order: names with an underscore first, then the others."""
    first = [name for name in names if isinstance(name, str) and name.startswith("_") and not name.startswith("__")]
    for name in (*first, *[name for name in names if name != "__builtins__" and name not in first]):
        _as_interpreter(names.__setitem__, name, None)
