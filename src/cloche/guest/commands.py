"""`!cmd` in a cell."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

SHELL = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"


def run(command: str) -> int:
    """Runs a shell command with the cell's output; its exit status, negative for a signal. An interrupt ends it."""
    direct = all(_is_our_stream(stream, fd) for stream, fd in ((sys.stdout, 1), (sys.stderr, 2)))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if direct:
        process = subprocess.Popen([SHELL, "-c", command], stdin=subprocess.DEVNULL)
        return _wait(process, process.wait)
    process = subprocess.Popen(
        [SHELL, "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return _wait(process, lambda: _copy(process))


def _is_our_stream(stream: Any, fd: int) -> bool:
    """False where the program has redirected it: `%%capture`, `redirect_stdout`."""
    try:
        return stream.fileno() == fd
    except (AttributeError, OSError, ValueError):
        return False


def _copy(process: Any) -> int:
    for line in process.stdout:
        sys.stdout.write(line.decode("utf-8", "replace"))
    process.stdout.close()
    return process.wait()


def _wait(process: Any, wait: Any) -> int:
    try:
        return wait()
    except BaseException:
        _end(process)
        raise


def _end(process: Any) -> None:
    """As a terminal would: interrupt, then insist."""
    for number, seconds in ((signal.SIGINT, 0.25), (signal.SIGTERM, 0.25), (signal.SIGKILL, None)):
        process.send_signal(number)
        try:
            process.wait(seconds)
            return
        except subprocess.TimeoutExpired:
            continue
