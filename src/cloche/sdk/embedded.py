"""One engine per process, on a thread of its own: started at first use, closed at exit."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Iterator

from cloche import errors
from cloche.config import Config, for_oneself, load
from cloche.engine.engine import Engine
from cloche.model import SandboxInfo, SandboxSpec
from cloche.sdk import backend
from cloche.sdk.arguments import OWNER
from cloche.sdk.assembly import assemble
from cloche.sdk.local import NearRuns, NearSandbox, NearSnapshots, NearVolumes, resumed
from cloche.sdk.loop_thread import CLOSE_SECONDS, LoopThread, do_last
from cloche.templates import Progress

# Telling whoever uses the library, on stderr, that a template is being built: it takes a while, once.

WIDTH = 100


class Announcement:
    """A Report: one line that moves on a terminal, a line per phase elsewhere. Silent where nothing is built."""

    def __init__(self) -> None:
        self._phase = ""

    def __call__(self, progress: Progress) -> None:
        if progress.phase == "done" and not self._phase:
            return
        changed, self._phase = progress.phase != self._phase, progress.phase
        if sys.stderr.isatty():
            end = "\n" if progress.phase == "done" else ""
            print(f"\r\x1b[K{_said(progress)}"[:WIDTH], end=end, file=sys.stderr, flush=True)
        elif changed:
            print(_said(progress), file=sys.stderr, flush=True)


def _said(progress: Progress) -> str:
    percent = "" if progress.fraction is None else f" {progress.fraction:.0%}"
    detail = "".join(character for character in progress.detail if character.isprintable())
    return f"cloche: first use, building the template:{percent} {detail}"


class Embedded(LoopThread):
    """The engine's thread. Implements Transport."""

    def __init__(self, config: Config):
        self._config = config
        self._engine: Engine | None = None
        super().__init__("cloche-engine", "the embedded engine was closed")

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
        return super().usable and self._engine is not None

    async def create(self, spec: SandboxSpec) -> NearSandbox:
        return NearSandbox(self.engine, await self.engine.create(spec))

    async def connect(self, id: str, timeout_seconds: float | None = None) -> NearSandbox:
        return NearSandbox(self.engine, await resumed(self.engine, id, OWNER, timeout_seconds))

    async def list(self) -> list[SandboxInfo]:
        return self.engine.list(OWNER)

    @property
    def runs(self) -> NearRuns:
        return NearRuns(self.engine)

    @property
    def snapshots(self) -> NearSnapshots:
        return NearSnapshots(self.engine)

    @property
    def volumes(self) -> NearVolumes:
        return NearVolumes(self.engine)

    def close(self) -> None:
        """Ends all sandboxes and the thread. Harmless when closed, and in a forked child."""
        if self.usable:
            self.call(self._close)
            self.stop()

    async def _open(self) -> None:
        self._engine = await assemble(for_oneself(self._config), Announcement()).__aenter__()

    async def _close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await asyncio.wait_for(engine.aclose(), CLOSE_SECONDS)


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
    """While it lasts, this process's new sandboxes are made by that engine, in all threads, unless they name a url."""
    before, backend.chosen = backend.chosen, chosen
    try:
        yield
    finally:
        backend.chosen = before


def _after_fork_in_child() -> None:
    """The parent's engine stays the parent's; its lock must die with the parent, not with us."""
    global _lock
    _lock = threading.Lock()
    for each in (_embedded, backend.chosen):
        if isinstance(each, Embedded) and each._engine is not None:
            each._engine.disown()


def _at_exit() -> None:
    if _embedded is not None:
        _embedded.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
do_last(_at_exit)
atexit.register(_at_exit)  # where that was not to be had, or was interrupted: harmless otherwise
