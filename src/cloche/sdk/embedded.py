"""One engine per process, on a thread of its own: started at first use, closed at exit."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import errno
import os
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, Generic, TypeVar

import uvloop

from cloche import errors
from cloche.config import Config, load
from cloche.engine.engine import Engine
from cloche.engine.sandbox import Sandbox as Core
from cloche.model import SandboxSpec
from cloche.sdk.assembly import assemble
from cloche.sdk.progress import Announcement
from cloche.sdk.transport import Work

T = TypeVar("T")

CLOSE_SECONDS = 15.0


class _Call(Generic[T]):
    """Work on its way to the engine's thread and back. A bare lock is the cheapest way to wait for another thread."""

    def __init__(self, work: Work[T]):
        self._work = work
        self._done = threading.Lock()
        self._done.acquire()
        self._task: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        self._value: T | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

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

    async def _run(self) -> None:
        try:
            self._value = await self._work()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            self._error = error
        finally:
            self._done.release()


class Embedded:
    """The engine's thread. Implements Transport."""

    def __init__(self, config: Config):
        self._config = config
        self._pid = os.getpid()
        self._loop = uvloop.new_event_loop()
        self._engine: Engine | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        # A daemon: a program that ends without closing anything must end. What it left is closed by `atexit`.
        self._thread = threading.Thread(target=self._serve, name="cloche-engine", daemon=True)
        self._thread.start()

    def open(self) -> None:
        """Raises Unavailable or IsolationUnavailable."""
        self.call(self._open)

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise errors.ShuttingDown("the embedded engine was closed")
        return self._engine

    @property
    def usable(self) -> bool:
        """Whether this process may use it: it was not inherited by a fork, and not closed."""
        return self._pid == os.getpid() and self._engine is not None

    def call(self, work: Work[T]) -> T:
        self._check()
        call = _Call(work)
        self._loop.call_soon_threadsafe(call.start)
        return call.result(self._loop)

    async def acall(self, work: Work[T]) -> T:
        self._check()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        inner: list[asyncio.Task[T]] = []

        def settle(task: asyncio.Task[T]) -> None:
            try:
                loop.call_soon_threadsafe(_settle, future, task)
            except RuntimeError:
                pass  # whoever asked has closed their loop meanwhile

        def start() -> None:
            inner.append(self._keep(work()))
            inner[0].add_done_callback(settle)

        self._loop.call_soon_threadsafe(start)
        try:
            return await future
        except asyncio.CancelledError:
            self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in inner])
            raise

    def spawn(self, work: Work[object]) -> None:
        if self.usable:
            self._loop.call_soon_threadsafe(lambda: self._keep(work()))

    async def create(self, spec: SandboxSpec) -> Core:
        try:
            return await self.engine.create(spec)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            whose = "this process has" if error.errno == errno.EMFILE else "this host has"
            raise errors.Unavailable(
                f"{whose} too many files open for one more sandbox: close some, or raise the limit (ulimit -n)"
            ) from error

    async def connect(self, id: str, owner: str) -> Core:
        return await self.engine.get(id, owner)

    def close(self) -> None:
        """Ends all sandboxes and the thread. Harmless when closed, and in a forked child."""
        if not self.usable:
            return
        self.call(self._close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise errors.UsedAfterFork(
                "this sandbox belongs to the process that made it, not to a forked child: make a new one here"
            )
        if not self._thread.is_alive():
            raise errors.ShuttingDown("the embedded engine was closed")

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _keep(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _open(self) -> None:
        self._engine = await assemble(self._config, Announcement()).__aenter__()

    async def _close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await asyncio.wait_for(engine.aclose(), CLOSE_SECONDS)


def _settle(future: asyncio.Future[T], task: asyncio.Task[T]) -> None:
    if future.done():
        if not task.cancelled():
            task.exception()  # nobody waits any more: not worth a warning
    elif task.cancelled():
        future.cancel()
    elif (error := task.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(task.result())


_lock = threading.Lock()
_embedded: Embedded | None = None


def embedded() -> Embedded:
    """This process's engine. The configuration is read when it starts: see `cloche.config`."""
    global _embedded
    with _lock:
        if _embedded is None or not _embedded.usable:
            started = Embedded(load())
            started.open()
            _embedded = started
        return _embedded


@contextlib.contextmanager
def using(chosen: Embedded) -> Iterator[None]:
    """While it lasts, this process's new sandboxes are made by that engine, in all threads."""
    global _embedded
    before, _embedded = _embedded, chosen
    try:
        yield
    finally:
        _embedded = before


def _after_fork_in_child() -> None:
    """The parent's engine stays the parent's; its lock must die with the parent, not with us."""
    global _lock
    _lock = threading.Lock()
    if _embedded is not None and _embedded._engine is not None:
        _embedded._engine.disown()


def _at_exit() -> None:
    if _embedded is not None:
        _embedded.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
