"""Measurement: installers in a sandbox, first without anything in the host's cache, then with it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import msgspec

from cloche.bench.lab import SampleCounts
from cloche.bench.samples import SampleBook, expect_answer
from cloche.config import Config, PoolConfig
from cloche.config.sections import PackagesConfig
from cloche.sdk.embedded import EmbeddedEngine, use_engine
from cloche.sdk.sandbox import Sandbox

INSTALL_COMMANDS = {
    "uv": "uv pip install rich",
    "pip": "pip install rich",
    "npm": "npm install is-odd",
}
CACHED_INSTALLS = 3  # installations from the cache for each first one
INSTALL_SETTLE_SECONDS = 0.3  # until the sandbox before is gone, and the next one waits in the pool


class InstallLab:
    """Engines with package indexes, each with an empty cache of its own. Use with `with`."""

    def __init__(self, config: Config, counts: SampleCounts, *, peer: bool = True):
        self.counts = counts
        self.book = SampleBook()
        self.peer = False
        self._templates = Path(config.data_dir).absolute() / "templates"
        packages = msgspec.structs.replace(config.packages or PackagesConfig(), enabled=True)
        self._config = msgspec.structs.replace(config, packages=packages, pool=PoolConfig(ready=1))
        self._place = tempfile.TemporaryDirectory(prefix="cloche-bench-")

    def __enter__(self) -> InstallLab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._place.cleanup()

    def engine(self) -> EmbeddedEngine:
        """A new engine that never fetched a package."""
        data_dir = Path(tempfile.mkdtemp(dir=self._place.name))
        (data_dir / "templates").symlink_to(self._templates)
        return EmbeddedEngine(msgspec.structs.replace(self._config, data_dir=str(data_dir)))


def measure_installs(lab: InstallLab, names: Iterable[str] = INSTALL_COMMANDS) -> None:
    for _ in range(lab.counts.installs):
        for name in names:
            with lab.book.attempt(f"{name}_first", f"{name}_second"):
                _measure_install(lab, name, INSTALL_COMMANDS[name])


def _measure_install(lab: InstallLab, name: str, command: str) -> None:
    engine = lab.engine()
    engine.open()
    try:
        with use_engine(engine):
            lab.book.add(f"{name}_first", _install_seconds(command))
            for _ in range(CACHED_INSTALLS):
                lab.book.add(f"{name}_second", _install_seconds(command))
    finally:
        engine.close()


def _install_seconds(command: str) -> float:
    with Sandbox() as box:
        expect_answer(box.run("1+1").text == "2", command)
        time.sleep(INSTALL_SETTLE_SECONDS)
        began = time.perf_counter()
        done = box.commands.run(command)
        seconds = time.perf_counter() - began
        expect_answer(done.exit_code == 0, done)
    return seconds
