"""`cloche shell`: Python, cell by cell, in one sandbox.

While the user types, the engine rests: one event loop serves one cell after the other. So the prompt can be Python's
own `input()` with readline, in the main thread, where Ctrl-C arrives.
"""

from __future__ import annotations

import ast
import asyncio
import codeop
import contextlib
import os
import re
import shutil
import signal
import termios
import tty
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from cloche import errors
from cloche.cli.notebook import save_notebook
from cloche.cli.session import ENDING_SIGNALS, INTERRUPTED, ending_by_signal, on_interrupt, watch
from cloche.cli.terminal import READ_BYTES, STDERR, STDOUT, Lines, Screen, readable, say, write
from cloche.config import Config
from cloche.engine.commands.program import Exited
from cloche.events import Output
from cloche.sdk.backend import Context, Process, Sandbox

# Lines of input become cells, by Python's grammar alone: nothing is ever executed here.

_CONTINUES = re.compile(r"(else|elif|except|finally)\b")
_MAGIC = re.compile(r"\s*[%!?]|.*\?\s*$")


class Cells:
    """Feed it lines; it says when a cell is complete. A block ends with an empty line, or where the next one begins."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._compile = codeop.CommandCompiler()
        self._compile.compiler.flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT

    @property
    def pending(self) -> bool:
        """Whether a cell has begun."""
        return bool(self._lines)

    def feed(self, line: str) -> list[str]:
        """The cells that are complete with this line: none, one, or two."""
        done = []
        if self._begins_anew(line):
            done += self.end()
        if not self._lines and not line.strip():
            return done
        self._lines.append(line)
        if self._complete():
            done += self.end()
        return done

    def end(self) -> list[str]:
        """The input is over: what there is is a cell."""
        lines, self._lines = self._lines, []
        return ["\n".join(lines)] if any(line.strip() for line in lines) else []

    def clear(self) -> None:
        self._lines = []

    def _begins_anew(self, line: str) -> bool:
        """Whether `line` is not part of the block before it: code that is piped or pasted has no empty line there."""
        if not self._lines or not line.strip() or line[0].isspace() or _CONTINUES.match(line):
            return False
        return not self._cell_magic() and not self._decorator() and self._parses(self._text() + "\n")

    def _complete(self) -> bool:
        if self._cell_magic():
            return not self._lines[-1].strip()
        if len(self._lines) == 1 and _MAGIC.match(self._lines[0]):
            return True
        return self._parses(self._text())

    def _cell_magic(self) -> bool:
        return self._lines[0].startswith("%%")

    def _decorator(self) -> bool:
        return self._lines[-1].startswith("@")

    def _text(self) -> str:
        return "\n".join(self._lines)

    def _parses(self, text: str) -> bool:
        """Whether it is whole. What is wrong counts as whole: the sandbox says what is wrong with it."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return self._compile(text, symbol="single") is not None
            except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
                return True


HISTORY_LINES = 2000
LEAVING = frozenset({"exit", "quit", "exit()", "quit()"})

Ask = Callable[[bool], str | None]
"""Gives the next line, None at the end; the argument says whether it continues a cell."""


def serve(
    config: Config, sandbox: contextlib.AbstractAsyncContextManager[Sandbox], notebook: Path | None = None
) -> int:
    """Prompts until the user leaves, and saves the notebook then. Gives the exit status: of `exit(n)`, else 0."""
    with asyncio.Runner() as runner:
        opening = contextlib.AsyncExitStack()

        async def open_() -> Sandbox:
            with ending_by_signal():
                return await opening.enter_async_context(sandbox)

        try:
            box = runner.run(open_())
            try:
                return _converse(runner, box, config)
            finally:
                if notebook is not None:
                    runner.run(save_notebook(box, notebook))
        finally:
            runner.run(opening.aclose())


def _converse(runner: asyncio.Runner, box: Sandbox, config: Config) -> int:
    lines = Lines()
    if not os.isatty(0):
        return _loop(runner, box, lines, lambda continues: runner.run(lines.next()))
    write(STDERR, f"Python in sandbox {box.id}. Ctrl-C interrupts, Ctrl-D leaves.\n")
    with history(Path(config.data_dir) / "shell_history"):
        return _loop(runner, box, lines, lambda continues: prompted("... " if continues else ">>> "))


def prompted(text: str) -> str | None:
    """What the user types after `text`; None at Ctrl-D. Raises KeyboardInterrupt, and SystemExit by a signal."""
    for each in ENDING_SIGNALS:
        signal.signal(each, leave)
    try:
        return input(text)
    except EOFError:
        write(STDOUT, "\n")
        return None


def leave(number: int, frame: FrameType | None) -> None:
    """Ends us by a signal, in order."""
    raise SystemExit(128 + number)


def _loop(runner: asyncio.Runner, box: Sandbox, lines: Lines, ask: Ask) -> int:
    cells, screen = Cells(), Screen()
    while True:
        try:
            line = ask(cells.pending)
        except KeyboardInterrupt:
            if not os.isatty(0):
                raise
            write(STDOUT, "\nKeyboardInterrupt\n")
            cells.clear()
            continue
        for cell in cells.end() if line is None else cells.feed(line):
            status = 0 if cell.strip() in LEAVING else runner.run(_cell(box, cell, screen, lines))
            if status is not None:
                return status
        if line is None:
            return 0


async def _cell(box: Sandbox, code: str, screen: Screen, lines: Lines) -> int | None:
    """Runs one cell. The exit status if it asked to leave."""
    context = box.context()
    execution = await context.execute(code, input=True)
    restarting: list[asyncio.Task[None]] = []
    presses: list[Callable[[], object]] = [
        execution.interrupt,
        execution.interrupt,
        lambda: restarting.append(asyncio.create_task(_restart(context))),
    ]
    with ending_by_signal():
        ended = await watch(execution, screen, lines, presses)
        if restarting:
            await asyncio.wait(restarting)
    if ended.reason:
        say(ended.reason)
    return ended.exit_code if ended.outcome == "raised" else None


async def _restart(context: Context) -> None:
    with contextlib.suppress(errors.Gone):  # the next cell says so
        await context.restart()


@contextlib.contextmanager
def history(path: Path) -> Iterator[None]:
    """Line editing, and what was typed in earlier sessions; without readline, plain lines."""
    try:
        import readline
    except ImportError:
        yield
        return
    readline.parse_and_bind("tab: self-insert")
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        readline.set_history_length(HISTORY_LINES)
        with contextlib.suppress(OSError):
            path.touch(mode=0o600)
            readline.write_history_file(path)


# `cloche shell --lang bash`: the user's terminal, joined to one inside a sandbox.

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
