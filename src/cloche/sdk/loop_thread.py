"""An event loop on a thread of its own, which runs work for other threads and loops."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor  # which registers its own end, so that ours is called first
from typing import Any, Generic, ParamSpec, TypeVar

import uvloop

from cloche import errors
from cloche.sdk.backend import Work
from cloche.tasks import TaskSet

# Work at the end of the program, and threads that still start then.
#
# `atexit` is too late to close an engine: concurrent.futures has closed its executors by then, so
# `asyncio.to_thread` fails, and later versions of Python start no thread any more. A callback of
# `threading._register_atexit` runs earlier, but before the program's own threads have ended, and they may be
# using sandboxes. So that callback starts a thread that waits for all others.

P = ParamSpec("P")
T = TypeVar("T")

_ending = threading.Event()


class ExitSafeThreads(ThreadPoolExecutor):
    """An event loop's thread pool, usable until the very end of the process."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        if not _ending.is_set():
            return super().submit(fn, *args, **kwargs)
        future: Future[T] = Future()
        work = functools.partial(fn, *args, **kwargs)
        threading.Thread(target=_run_future, args=(future, work), daemon=True).start()
        return future


def _run_future(future: Future[Any], work: Callable[[], Any]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            future.set_exception(error)


def run_at_exit(work: Callable[[], None]) -> None:
    """Runs `work` after all other threads of the program have ended and before `atexit`, where Python can."""
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        with contextlib.suppress(RuntimeError):  # the program is ending already
            register(_on_ending, work)


def _on_ending(work: Callable[[], None]) -> None:
    _ending.set()
    with contextlib.suppress(RuntimeError):  # Python 3.12.0 starts none here
        threading.Thread(target=_run_after_threads, args=(work,), name="cloche-exit").start()


def _run_after_threads(work: Callable[[], None]) -> None:
    apart = {threading.main_thread(), threading.current_thread()}
    while others := [each for each in threading.enumerate() if not each.daemon and each not in apart]:
        others[0].join()
    work()


CLOSE_SECONDS = 15.0


class _LoopCall(Generic[T]):
    """Work on its way to the loop's thread and back. A bare lock is the cheapest way to wait for another thread."""

    def __init__(self, work: Work[T]):
        self._work = work
        self._done = threading.Lock()
        self._done.acquire()
        self._task: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        self._value: T | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run_work())

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def result(self, loop: asyncio.AbstractEventLoop) -> T:
        try:
            self._done.acquire()
        except BaseException:  # KeyboardInterrupt: the work ends too, in its own time
            loop.call_soon_threadsafe(self.cancel)
            raise
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    async def _run_work(self) -> None:
        try:
            self._value = await self._work()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            self._error = error
        finally:
            self._done.release()


class LoopThread:
    """Safe from any thread. In a forked child everything raises UsedAfterFork; when it is closed, ShuttingDown."""

    def __init__(self, name: str, closed: str):
        self._closed = closed
        self._pid = os.getpid()
        self._loop = uvloop.new_event_loop()
        self._loop.set_default_executor(ExitSafeThreads(thread_name_prefix=name))
        self._tasks = TaskSet()
        # A daemon: a program that ends without closing anything must end. See `cloche.sdk.loop_thread`.
        self._thread = threading.Thread(target=self._run_loop, name=name, daemon=True)
        self._thread.start()

    @property
    def usable(self) -> bool:
        """Whether this process may use it: it was not inherited by a fork, and not closed."""
        return self._pid == os.getpid() and self._thread.is_alive()

    def call(self, work: Work[T]) -> T:
        self._check_usable()
        call = _LoopCall(work)
        self._loop.call_soon_threadsafe(call.start)
        return call.result(self._loop)

    async def acall(self, work: Work[T]) -> T:
        self._check_usable()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        inner: list[asyncio.Task[T]] = []

        def settle(task: asyncio.Task[T]) -> None:
            try:
                loop.call_soon_threadsafe(_settle_future, future, task)
            except RuntimeError:
                pass  # the caller has closed its loop meanwhile

        def start() -> None:
            inner.append(self._tasks.start(work()))
            inner[0].add_done_callback(settle)

        self._loop.call_soon_threadsafe(start)
        try:
            return await future
        except asyncio.CancelledError:
            self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in inner])
            raise

    def spawn(self, work: Work[object]) -> None:
        if self.usable:
            self._loop.call_soon_threadsafe(lambda: self._tasks.start(work()))

    def stop(self) -> None:
        """Ends the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)

    def _check_usable(self) -> None:
        if self._pid != os.getpid():
            raise errors.UsedAfterFork(
                "this sandbox belongs to the process that made it, not to a forked child: make a new one here"
            )
        if not self._thread.is_alive():
            raise errors.ShuttingDown(self._closed)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()


def _settle_future(future: asyncio.Future[T], task: asyncio.Task[T]) -> None:
    if future.done():
        if not task.cancelled():
            task.exception()  # no caller waits any more: not worth a warning
    elif task.cancelled():
        future.cancel()
    elif (error := task.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(task.result())
