"""The end of a Python program: its last exception, and the visible part of an interpreter's shutdown.

CPython takes itself apart when it ends. Here that would take longer than the program: every page imported
before the fork would be copied. So only the effects that a program can see are done.
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


def run_catching(program: Any) -> list:
    """Runs the program; returns a list of the exception that it raised, or an empty one.

    A program may be interrupted twice (`timeout` does that), and the second signal must not arrive between two
    steps here.
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


def exit_process(raised: list, code: Any, *, from_memory: bool) -> NoReturn:
    """Ends this process as an interpreter does after a program that raised `raised`, one exception or none.

    The exception is taken out of the list: no reference of ours may hold the program's objects. `code` is the
    program's code object. `from_memory`: the lines of the program are in no file.
    """
    status, interrupted = 0, False
    if raised and isinstance(raised[0], SystemExit):
        status = _exit_status(raised.pop())
    elif raised:
        interrupted, status = isinstance(raised[0], KeyboardInterrupt), 1
        _print_exception(raised.pop(), code, from_memory)
    status = _finalize_interpreter(status)
    if interrupted:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
        os.kill(os.getpid(), _signal.SIGINT)
    os._exit(status & 0xFF)


def _exit_status(error: SystemExit) -> int:
    _flush_stream(sys.stdout)
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


def _print_exception(error: BaseException, code: Any, from_memory: bool) -> None:
    """Prints the exception by the program's own hook, without the frames above the program on the stack."""
    begin = _program_traceback(error.__traceback__, code)
    if code is not None:
        _cut_off_chained_tools(error)
    error = error.with_traceback(begin)
    _flush_stream(sys.stdout)
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


def _program_traceback(begin: Any, code: Any) -> Any:
    """The part of a traceback that is the program's. A program that could not be compiled has none."""
    if code is None:
        return None
    found = _first_matching(begin, lambda one: one is code) or _first_matching(
        begin, lambda one: one.co_filename == code.co_filename
    )
    _cut_off_tools(found)
    return found


def _first_matching(begin: Any, suits: Any) -> Any:
    while begin is not None and not suits(begin.tb_frame.f_code):
        begin = begin.tb_next
    return begin


def _cut_off_tools(begin: Any) -> None:
    """Cuts the frames inside a tool's function (see `tools`) off, which tell the program's author nothing."""
    while begin is not None:
        following = begin.tb_next
        if following is not None and following.tb_frame.f_code.co_filename.startswith("<tool "):
            begin.tb_next = following = None
        begin = following


def _cut_off_chained_tools(error: BaseException) -> None:
    """In the exceptions that this one came from, or is made of. There may be more than calls can be nested."""
    seen, left = {id(error)}, [error]
    while left:
        one = left.pop()
        for other in (one.__cause__, one.__context__, *(getattr(one, "exceptions", None) or ())):
            if isinstance(other, BaseException) and id(other) not in seen:
                seen.add(id(other))
                left.append(other)
                _cut_off_tools(other.__traceback__)


def _finalize_interpreter(status: int) -> int:
    """Waits for threads, calls exit functions, flushes, releases the program's modules. Returns the status."""
    _run_guarded(threading._shutdown)  # type: ignore[attr-defined]
    _run_guarded(atexit._run_exitfuncs)
    if not all([_flush_stream(sys.stdout, told=True), _flush_stream(sys.stderr)]):
        status = _STREAM_LOST
    _release_modules()
    _flush_stream(sys.stdout)
    _flush_stream(sys.stderr)
    _libc.fflush(None)
    return status


def _run_guarded(step: Any) -> None:
    try:
        step()
    except BaseException as error:  # noqa: BLE001 - a program's threads and exit functions may raise anything
        print("Exception ignored in:", step, file=sys.stderr)
        traceback.print_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))


def _flush_stream(stream: Any, told: bool = False) -> bool:
    try:
        if stream is not None and not _is_closed(stream):
            stream.flush()
    except Exception as error:  # noqa: BLE001 - the program may have put anything there
        if told:
            _report_lost(stream, error)
        return False
    return True


def _is_closed(stream: Any) -> bool:
    """A stream of the program's own making needs no such attribute."""
    try:
        return bool(stream.closed)
    except Exception:  # noqa: BLE001 - nor one that works
        return False


def _report_lost(stream: Any, error: Exception) -> None:
    new = sys.version_info >= (3, 13)
    what = "Exception ignored on flushing sys.stdout:" if new else f"Exception ignored in: {stream!r}"
    inner = error.__traceback__ and error.__traceback__.tb_next  # the first is ours
    try:
        sys.stderr.write("\n".join([what, "".join(traceback.format_exception(error.with_traceback(inner)))]))
    except (OSError, ValueError, AttributeError):
        pass


def _release_modules() -> None:
    """Releases the program's modules as CPython does, so that their objects are finalized."""
    # With the modules still there: it puts what holds another before it, so that files write what they have buffered
    # before what is below them is closed.
    _as_interpreter(gc.collect)
    sys.modules["tracemalloc"] = None  # type: ignore[assignment]  # from here on, nobody can enable that any more
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            _as_interpreter(setattr, sys, name, None)
    for name in ("stdin", "stdout", "stderr"):
        _as_interpreter(setattr, sys, name, getattr(sys, f"__{name}__", None))
    modules = _remove_modules()
    _as_interpreter(gc.collect)
    for module in reversed(modules):
        if (left := module()) is not None:
            _clear_names(left.__dict__)
    _close_files()


def _remove_modules() -> list:
    """Removes the program's modules; returns weak references to them, dead where nothing else holds them."""
    names = _new_modules()
    modules = [weakref.ref(sys.modules[name]) for name in names]
    for name in names:
        _as_interpreter(sys.modules.__delitem__, name)
    return modules


def _close_files() -> None:
    """Closes files still referenced by modules from before the program: CPython would release those as well."""
    if threading.active_count() > 1:
        return  # a thread that nobody waits for may be writing to one, and would be waited for
    standard = {id(part) for name in ("stdin", "stdout", "stderr") for part in _stream_parts(getattr(sys, name))}
    left = [each for each in gc.get_objects() if issubclass(type(each), _io._IOBase) and id(each) not in standard]
    for file in sorted(left, key=_closing_order):
        try:
            file.close()
        except Exception:  # noqa: BLE001 - a finalizer's are not told either
            pass


def _stream_parts(stream: Any) -> list:
    """A stream, its buffer, and the raw file below that."""
    try:
        return [stream, stream.buffer, stream.buffer.raw]
    except (AttributeError, ValueError):  # ValueError: the program has detached it
        return [stream]


def _closing_order(file: Any) -> int:
    """The order of closing. Files that hold others come first: text, compression and the like, buffers."""
    if isinstance(file, io.TextIOBase):
        return 0
    return 1 if type(file).__module__ != "_io" else 3 - isinstance(file, io.BufferedIOBase)


def _new_modules() -> list:
    """The names of `__main__` and of the modules that the program imported, in this order; only real modules.

    Read from the end: earlier entries are not even looked at, since that would copy their pages.
    """
    if "__main__" not in sys.modules:
        return []
    names = ["__main__", *reversed(list(itertools.takewhile(lambda name: name != "__main__", reversed(sys.modules))))]
    return [name for name in names if isinstance(sys.modules[name], ModuleType)]


def _clear_names(names: dict) -> None:
    """Clears a module's names in CPython's order: names with an underscore first, then the others."""
    first = [name for name in names if isinstance(name, str) and name.startswith("_") and not name.startswith("__")]
    for name in (*first, *[name for name in names if name != "__builtins__" and name not in first]):
        _as_interpreter(names.__setitem__, name, None)
