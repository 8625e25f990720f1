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
from cloche.config import Config, for_embedded_use, load_config
from cloche.engine.engine import Engine
from cloche.model import SandboxInfo, SandboxSpec
from cloche.sdk import backend
from cloche.sdk.arguments import LOCAL_OWNER
from cloche.sdk.assembly import assemble_engine
from cloche.sdk.local import LocalRuns, LocalSandbox, LocalSnapshots, LocalVolumes, resume_for
from cloche.sdk.loop_thread import CLOSE_SECONDS, LoopThread, run_at_exit
from cloche.templates import TemplateProgress

# A notice on stderr that a template is being built: it takes a while, once.

LINE_WIDTH = 100


class BuildAnnouncer:
    """A Report: one line that moves on a terminal, a line per phase elsewhere. Silent where nothing is built."""

    def __init__(self) -> None:
        self._phase = ""

    def __call__(self, progress: TemplateProgress) -> None:
        if progress.phase == "done" and not self._phase:
            return
        changed, self._phase = progress.phase != self._phase, progress.phase
        if sys.stderr.isatty():
            end = "\n" if progress.phase == "done" else ""
            print(f"\r\x1b[K{_progress_line(progress)}"[:LINE_WIDTH], end=end, file=sys.stderr, flush=True)
        elif changed:
            print(_progress_line(progress), file=sys.stderr, flush=True)


def _progress_line(progress: TemplateProgress) -> str:
    percent = "" if progress.fraction is None else f" {progress.fraction:.0%}"
    detail = "".join(character for character in progress.detail if character.isprintable())
    return f"cloche: first use, building the template:{percent} {detail}"


class EmbeddedEngine(LoopThread):
    """The engine's thread. Implements Transport."""

    def __init__(self, config: Config):
        self._config = config
        self._engine: Engine | None = None
        super().__init__("cloche-engine", "the embedded engine was closed")

    def open(self) -> None:
        """Raises Unavailable or IsolationUnavailable."""
        self.call(self._open_engine)

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise errors.ShuttingDown("the embedded engine was closed")
        return self._engine

    @property
    def usable(self) -> bool:
        return super().usable and self._engine is not None

    async def create(self, spec: SandboxSpec) -> LocalSandbox:
        return LocalSandbox(self.engine, await self.engine.create(spec))

    async def connect(self, id: str, timeout_seconds: float | None = None) -> LocalSandbox:
        return LocalSandbox(self.engine, await resume_for(await self.engine.handle(id, LOCAL_OWNER), timeout_seconds))

    async def list(self) -> list[SandboxInfo]:
        return self.engine.list(LOCAL_OWNER)

    @property
    def runs(self) -> LocalRuns:
        return LocalRuns(self.engine)

    @property
    def snapshots(self) -> LocalSnapshots:
        return LocalSnapshots(self.engine)

    @property
    def volumes(self) -> LocalVolumes:
        return LocalVolumes(self.engine)

    def close(self) -> None:
        """Ends all sandboxes and the thread. Harmless when closed, and in a forked child."""
        if self.usable:
            self.call(self._close_engine)
            self.stop()

    async def _open_engine(self) -> None:
        self._engine = await assemble_engine(for_embedded_use(self._config), BuildAnnouncer()).__aenter__()

    async def _close_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await asyncio.wait_for(engine.aclose(), CLOSE_SECONDS)


_lock = threading.Lock()
_embedded: EmbeddedEngine | None = None


def embedded_engine() -> EmbeddedEngine:
    """This process's engine. The configuration is read when it starts: see `cloche.config`."""
    global _embedded
    with _lock:
        if _embedded is None or not _embedded.usable:
            started = EmbeddedEngine(load_config())
            started.open()
            _embedded = started
        return _embedded


@contextlib.contextmanager
def use_engine(chosen: EmbeddedEngine) -> Iterator[None]:
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
        if isinstance(each, EmbeddedEngine) and each._engine is not None:
            each._engine.disown()


def _at_exit() -> None:
    if _embedded is not None:
        _embedded.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
run_at_exit(_at_exit)
atexit.register(_at_exit)  # where that was not to be had, or was interrupted: harmless otherwise
