"""When the program ends: what is done last, and threads for it.

`atexit` is too late to close an engine: concurrent.futures has closed its executors by then, so `asyncio.to_thread`
fails, and later versions of Python start no thread any more. What `threading._register_atexit` is given is called
earlier, but before the program's own threads have ended, and they may be using sandboxes. So it starts a thread that
waits for all others.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor  # which registers its own end, so that ours is called first
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_ending = threading.Event()


class Threads(ThreadPoolExecutor):
    """An event loop's threads, which are there until the very end."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        if not _ending.is_set():
            return super().submit(fn, *args, **kwargs)
        future: Future[T] = Future()
        work = functools.partial(fn, *args, **kwargs)
        threading.Thread(target=_carry_out, args=(future, work), daemon=True).start()
        return future


def _carry_out(future: Future[Any], work: Callable[[], Any]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            future.set_exception(error)


def do_last(work: Callable[[], None]) -> None:
    """Has it done when all other threads of the program have ended, and before `atexit`, where Python can."""
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        with contextlib.suppress(RuntimeError):  # the program is ending already
            register(_on_ending, work)


def _on_ending(work: Callable[[], None]) -> None:
    _ending.set()
    with contextlib.suppress(RuntimeError):  # Python 3.12.0 starts none here
        threading.Thread(target=_after_the_others, args=(work,), name="cloche-exit").start()


def _after_the_others(work: Callable[[], None]) -> None:
    apart = {threading.main_thread(), threading.current_thread()}
    while others := [each for each in threading.enumerate() if not each.daemon and each not in apart]:
        others[0].join()
    work()
