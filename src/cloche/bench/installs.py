"""How long installers take in a sandbox whose host has nothing of the package yet, and in the next one of that host."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import msgspec

from cloche.bench.lab import Counts
from cloche.bench.samples import Book, expect
from cloche.config import Config, Pool
from cloche.config.sections import Packages
from cloche.sdk.embedded import Embedded, using
from cloche.sdk.sandbox import Sandbox

COMMANDS = {
    "uv": "uv pip install rich",
    "pip": "pip install rich",
    "npm": "npm install is-odd",
}
SECOND = 3  # installations from the cache for each first one
SETTLE_SECONDS = 0.3  # until the sandbox before is gone, and the next one waits in the pool


class InstallLab:
    """Engines that have package indexes, each with a cache of its own that is empty. Use with `with`."""

    def __init__(self, config: Config, counts: Counts, *, peer: bool = True):
        self.counts = counts
        self.book = Book()
        self.peer = False
        self._templates = Path(config.data_dir).absolute() / "templates"
        packages = msgspec.structs.replace(config.packages or Packages(), enabled=True)
        self._config = msgspec.structs.replace(config, packages=packages, pool=Pool(ready=1))
        self._place = tempfile.TemporaryDirectory(prefix="cloche-bench-")

    def __enter__(self) -> InstallLab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._place.cleanup()

    def engine(self) -> Embedded:
        """One that never fetched a package."""
        data_dir = Path(tempfile.mkdtemp(dir=self._place.name))
        (data_dir / "templates").symlink_to(self._templates)
        return Embedded(msgspec.structs.replace(self._config, data_dir=str(data_dir)))


def installs(lab: InstallLab, names: Iterable[str] = COMMANDS) -> None:
    for _ in range(lab.counts.installs):
        for name in names:
            with lab.book.attempt(f"{name}_first", f"{name}_second"):
                _install(lab, name, COMMANDS[name])


def _install(lab: InstallLab, name: str, command: str) -> None:
    engine = lab.engine()
    engine.open()
    try:
        with using(engine):
            lab.book.add(f"{name}_first", _seconds(command))
            for _ in range(SECOND):
                lab.book.add(f"{name}_second", _seconds(command))
    finally:
        engine.close()


def _seconds(command: str) -> float:
    with Sandbox() as box:
        expect(box.run("1+1").text == "2", command)
        time.sleep(SETTLE_SECONDS)
        began = time.perf_counter()
        done = box.commands.run(command)
        seconds = time.perf_counter() - began
        expect(done.exit_code == 0, done)
    return seconds
