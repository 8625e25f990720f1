"""`cloche shell --lang bash`: the user's terminal, joined to one inside a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import termios
import tty
from collections.abc import Callable, Iterator

from cloche import errors
from cloche.cli.lines import READ_BYTES, readable
from cloche.cli.screen import STDERR, STDOUT, say, write
from cloche.cli.session import INTERRUPTED, ending_by_signal, on_interrupt
from cloche.engine.commands.program import Exited
from cloche.events import Output
from cloche.sdk.backend import Process, Sandbox

STDIN = 0
SHELL = "bash"


async def bash(sandbox: contextlib.AbstractAsyncContextManager[Sandbox]) -> int:
    """A shell in it; gives its exit status. Without a terminal, stdin is its script."""
    with ending_by_signal():
        async with sandbox as box:
            if os.isatty(STDIN) and os.isatty(STDOUT):
                return await _terminal(box)
            return await _script(box)


async def _terminal(box: Sandbox) -> int:
    size = shutil.get_terminal_size()
    env = {"TERM": os.environ.get("TERM", "xterm-256color")}
    process = await box.commands.start([SHELL, "-i"], env=env, pty=(size.lines, size.columns))
    async with process:
        with _raw(STDIN), _resizing(process):
            return await _join(process)


async def _script(box: Sandbox) -> int:
    """Ctrl-C interrupts what runs; the second ends it all."""
    process = await box.commands.start([SHELL, "-s"], stdin=True)
    presses: list[Callable[[], object]] = [lambda: process.kill(signal.SIGINT), process.kill]
    async with process:
        with on_interrupt(presses):
            return await _join(process)


async def _join(process: Process) -> int:
    """Carries bytes both ways until the shell ends."""
    feeding = asyncio.create_task(_feed(process))
    try:
        async for event in process:
            if isinstance(event, Output):
                write(STDOUT if event.stream == "stdout" else STDERR, event.text)
    finally:
        feeding.cancel()
        await asyncio.wait([feeding])
    return _status(process.exited)


async def _feed(process: Process) -> None:
    with contextlib.suppress(errors.InvalidRequest, OSError):  # the shell reads no more, or our terminal is gone
        while True:
            await readable(STDIN)
            data = os.read(STDIN, READ_BYTES)
            if not data:
                break
            await process.send_stdin(data)
    process.close_stdin()


def _status(exited: Exited | None) -> int:
    if exited is None:
        return INTERRUPTED
    if exited.reason:
        say(exited.reason)
    return exited.exit_code


@contextlib.contextmanager
def _raw(fd: int) -> Iterator[None]:
    """Every key goes to the sandbox's terminal, Ctrl-C too."""
    before = termios.tcgetattr(fd)
    tty.setraw(fd)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _resizing(process: Process) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def resize() -> None:
        size = os.get_terminal_size(STDIN)
        with contextlib.suppress(errors.InvalidRequest):  # it has just ended, or the window has no size
            process.resize(size.lines, size.columns)

    loop.add_signal_handler(signal.SIGWINCH, resize)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
