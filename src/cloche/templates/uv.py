"""Running uv, and turning its complaints into ours."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Timer

from uv import find_uv_bin

from cloche import errors
from cloche.templates import registry

LAST_LINES = 20
# What uv says, and what the reader can do about it. The first that occurs in its output is shown.
_UNREACHABLE = "check the network, a proxy, or point UV_DEFAULT_INDEX at your mirror."
_ADVICE = {
    "no usable wheels": "Cloche installs wheels only: change `python` or the package's version in template.toml.",
    "has no wheels": "Cloche installs wheels only: change `python` or the package's version in template.toml.",
    "error sending request": f"The package registry cannot be reached: {_UNREACHABLE}",
    "Failed to fetch": f"The package registry did not answer as it should: {_UNREACHABLE}",
    "No space left": "The disk is full: make room, or move CLOCHE_DATA_DIR or UV_CACHE_DIR.",
    "No solution found": "The packages do not fit together or do not exist: change them in template.toml.",
    "hash": "A downloaded file is not what the registry announced: try again, then ask who runs the registry.",
}


def run(arguments: Sequence[str], cwd: Path, on_line: Callable[[str], None], stdin: str = "") -> str:
    """Runs uv there and returns its stdout; each line of its stderr goes to `on_line`. Raises TemplateBuildFailed."""
    command = [find_uv_bin(), *arguments, "--color", "never", "--no-progress"]
    last: deque[str] = deque(maxlen=LAST_LINES)

    def note(line: str) -> None:
        last.append(line)
        on_line(line)

    source = cwd / ".stdin"  # a file rather than a pipe: nobody has to feed it
    source.write_text(stdin, "utf-8")
    target = cwd / ".stdout"
    with source.open("rb") as reading, target.open("wb") as writing:
        status = watch(command, note, cwd=cwd, stdin=reading.fileno(), stdout=writing.fileno(), read="stderr")
    if status != 0:
        raise errors.TemplateBuildFailed(_complaint(arguments, status, list(last)))
    return target.read_text("utf-8")


def watch(
    command: Sequence[str],
    on_line: Callable[[str], None],
    *,
    cwd: Path,
    stdin: int = subprocess.DEVNULL,
    stdout: int = subprocess.PIPE,
    read: str = "stdout",
    seconds: float = 3600,
) -> int:
    """Runs `command` to its end, line by line; its exit status. When we are stopped, or at the time limit, it dies."""
    process = subprocess.Popen(
        command,
        cwd=cwd,
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.PIPE if read == "stderr" else subprocess.DEVNULL,
        env=registry.environment(os.environ),
        encoding="utf-8",
        errors="replace",
        umask=0o022,
        process_group=0,  # so that its own children can be killed with it
    )
    timer = Timer(seconds, _kill, [process])
    timer.daemon = True
    timer.start()
    try:
        for line in getattr(process, read):
            on_line(line.rstrip("\n"))
        return process.wait()
    finally:
        timer.cancel()
        _kill(process)
        process.wait()
        getattr(process, read).close()


def _kill(process: subprocess.Popen[str]) -> None:
    if process.returncode is None:  # not yet waited for: the group's id is still its own
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _complaint(arguments: Sequence[str], status: int, lines: list[str]) -> str:
    said = "\n".join(lines)
    advice = next((advice for sign, advice in _ADVICE.items() if sign in said), "Its own words are above.")
    return f"uv {' '.join(arguments[:2])} failed (exit status {status}):\n{said}\n{advice}"
