"""`cloche shell`: a Python prompt, cell by cell, in one sandbox.

While the user types, the engine rests: one event loop serves one cell after the other. So the prompt can be
Python's own `input()` with readline, in the main thread, where Ctrl-C arrives.
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
from typing import TYPE_CHECKING

from cloche import errors
from cloche.cli.notebook import save_notebook
from cloche.cli.session import ENDING_SIGNALS, EXIT_INTERRUPTED, cancel_on_signal, on_interrupt, watch_execution
from cloche.cli.terminal import (
    READ_BYTES,
    STDERR,
    STDOUT,
    StdinLines,
    TerminalView,
    print_message,
    wait_readable,
    write_all,
)
from cloche.config import Config
from cloche.events import Exited, Output
from cloche.model import Completions
from cloche.sdk.backend import BackendContext, BackendProcess, BackendSandbox

if TYPE_CHECKING:
    from cloche.cli.shell import TerminalProgram

# Splits input lines into cells by Python's grammar alone: nothing is ever executed here.

_CONTINUING_KEYWORDS = re.compile(r"(else|elif|except|finally)\b")
_MAGIC = re.compile(r"\s*[%!?]|.*\?\s*$")


class CellSplitter:
    """Takes lines and returns complete cells. A block ends with an empty line, or where the next one begins."""

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
        if self._starts_new_cell(line):
            done += self.end()
        if not self._lines and not line.strip():
            return done
        self._lines.append(line)
        if self._is_complete():
            done += self.end()
        return done

    def end(self) -> list[str]:
        """Ends the input: the pending lines are a cell."""
        lines, self._lines = self._lines, []
        return ["\n".join(lines)] if any(line.strip() for line in lines) else []

    def clear(self) -> None:
        self._lines = []

    def _starts_new_cell(self, line: str) -> bool:
        """Whether `line` is not part of the block before it: code that is piped or pasted has no empty line there."""
        if not self._lines or not line.strip() or line[0].isspace() or _CONTINUING_KEYWORDS.match(line):
            return False
        return (
            not self._is_cell_magic()
            and not self._ends_with_decorator()
            and self._is_complete_source(self._joined_lines() + "\n")
        )

    def _is_complete(self) -> bool:
        if self._is_cell_magic():
            return not self._lines[-1].strip()
        if len(self._lines) == 1 and _MAGIC.match(self._lines[0]):
            return True
        return self._is_complete_source(self._joined_lines())

    def _is_cell_magic(self) -> bool:
        return self._lines[0].startswith("%%")

    def _ends_with_decorator(self) -> bool:
        return self._lines[-1].startswith("@")

    def _joined_lines(self) -> str:
        return "\n".join(self._lines)

    def _is_complete_source(self, text: str) -> bool:
        """Whether the text is complete. Invalid code counts as complete: the sandbox reports the error."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return self._compile(text, symbol="single") is not None
            except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
                return True


HISTORY_LINES = 2000
EXIT_WORDS = frozenset({"exit", "quit", "exit()", "quit()"})

ReadLine = Callable[[bool], str | None]
"""Gives the next line, None at the end; the argument says whether it continues a cell."""


def run_python_prompt(
    config: Config, sandbox: contextlib.AbstractAsyncContextManager[BackendSandbox], notebook: Path | None = None
) -> int:
    """Prompts until the user leaves, then saves the notebook. Returns the exit status: of `exit(n)`, else 0."""
    with asyncio.Runner() as runner:
        opening = contextlib.AsyncExitStack()

        async def open_() -> BackendSandbox:
            with cancel_on_signal():
                return await opening.enter_async_context(sandbox)

        try:
            box = runner.run(open_())
            try:
                return _run_prompt(runner, box, config)
            finally:
                if notebook is not None:
                    runner.run(save_notebook(box, notebook))
        finally:
            runner.run(opening.aclose())


def _run_prompt(runner: asyncio.Runner, box: BackendSandbox, config: Config) -> int:
    lines = StdinLines()
    if not os.isatty(0):
        return _cell_loop(runner, box, lines, lambda continues: runner.run(lines.next()))
    write_all(STDERR, f"Python in sandbox {box.id}. Ctrl-C interrupts, Ctrl-D leaves.\n")
    completer = LineCompleter(lambda code: runner.run(box.context().complete(code)))
    with readline_history(Path(config.data_dir) / "shell_history", completer):
        return _cell_loop(runner, box, lines, lambda continues: read_typed_line("... " if continues else ">>> "))


def read_typed_line(text: str) -> str | None:
    """Reads the line typed after `text`; None at Ctrl-D. Raises KeyboardInterrupt, and SystemExit by a signal."""
    for each in ENDING_SIGNALS:
        signal.signal(each, raise_system_exit)
    try:
        return input(text)
    except EOFError:
        write_all(STDOUT, "\n")
        return None


def raise_system_exit(number: int, frame: FrameType | None) -> None:
    """A signal handler: raises SystemExit, so that everything is closed in order."""
    raise SystemExit(128 + number)


def _cell_loop(runner: asyncio.Runner, box: BackendSandbox, lines: StdinLines, ask: ReadLine) -> int:
    cells, screen = CellSplitter(), TerminalView()
    while True:
        try:
            line = ask(cells.pending)
        except KeyboardInterrupt:
            if not os.isatty(0):
                raise
            write_all(STDOUT, "\nKeyboardInterrupt\n")
            cells.clear()
            continue
        for cell in cells.end() if line is None else cells.feed(line):
            status = 0 if cell.strip() in EXIT_WORDS else runner.run(_run_cell(box, cell, screen, lines))
            if status is not None:
                return status
        if line is None:
            return 0


async def _run_cell(box: BackendSandbox, code: str, screen: TerminalView, lines: StdinLines) -> int | None:
    """Runs one cell. Returns the exit status if it asked to leave."""
    context = box.context()
    execution = await context.execute(code, input=True)
    restarting: list[asyncio.Task[None]] = []
    presses: list[Callable[[], object]] = [
        execution.interrupt,
        execution.interrupt,
        lambda: restarting.append(asyncio.create_task(_restart_context(context))),
    ]
    with cancel_on_signal():
        ended = await watch_execution(execution, screen, lines, presses)
        if restarting:
            await asyncio.wait(restarting)
    if ended.reason:
        print_message(ended.reason)
    return ended.exit_code if ended.outcome == "raised" else None


async def _restart_context(context: BackendContext) -> None:
    with contextlib.suppress(errors.Gone):  # the next cell reports it
        await context.restart()


class LineCompleter:
    """Completes the line that is typed, for readline, which asks for one match after another."""

    def __init__(self, complete: Callable[[str], Completions]):
        self._complete = complete
        self._matches: list[str] = []

    def __call__(self, text: str, number: int) -> str | None:
        """The match of that number; None behind the last. `text` is the word before the cursor."""
        if number == 0:
            self._matches = self._find_matches(text)
        return self._matches[number] if number < len(self._matches) else None

    def _find_matches(self, text: str) -> list[str]:
        import readline

        line, end = readline.get_line_buffer(), readline.get_endidx()
        if not line[:end].strip():
            return ["    "]  # Tab indents at the beginning of a line
        try:
            found = self._complete(line[:end])
        except errors.ClocheError:  # the next cell reports it
            return []
        return words_for_readline(line, readline.get_begidx(), found)


def words_for_readline(line: str, begin: int, found: Completions) -> list[str]:
    """Matches as replacements of what readline takes for the word, which begins at `begin`.

    Text that a terminal cannot show is left out.
    """
    before = line[begin : found.start] if found.start >= begin else ""
    cut = max(begin - found.start, 0)
    words = (before + match[cut:] for match in found.matches)
    return [word for word in words if word and word.isprintable()]


@contextlib.contextmanager
def readline_history(path: Path, completer: LineCompleter | None = None) -> Iterator[None]:
    """Line editing with the history of earlier sessions, and completion; without readline, plain lines."""
    try:
        import readline
    except ImportError:
        yield
        return
    if completer is None:
        readline.parse_and_bind("tab: self-insert")
    else:
        readline.set_completer_delims(" \t\n()[]{},;:=+-*/%&|^<>@!~'\"")
        readline.set_completer(completer)
        readline.parse_and_bind("tab: complete")
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        readline.set_completer(None)
        readline.set_history_length(HISTORY_LINES)
        with contextlib.suppress(OSError):
            path.touch(mode=0o600)
            readline.write_history_file(path)


# `cloche shell --lang bash|r|java`: joins the user's terminal to one inside a sandbox.

STDIN = 0


async def run_terminal_program(
    sandbox: contextlib.AbstractAsyncContextManager[BackendSandbox], program: TerminalProgram
) -> int:
    """Runs a program in the sandbox and returns its exit status. Without a terminal, stdin is its script."""
    with cancel_on_signal():
        async with sandbox as box:
            if os.isatty(STDIN) and os.isatty(STDOUT):
                return await _run_in_terminal(box, program)
            return await _run_script(box, program)


async def _run_in_terminal(box: BackendSandbox, program: TerminalProgram) -> int:
    size = shutil.get_terminal_size()
    env = {"TERM": os.environ.get("TERM", "xterm-256color")}
    process = await box.commands.start(list(program.interactive), env=env, pty=(size.lines, size.columns))
    async with process:
        with _raw_mode(STDIN), _forward_resizes(process):
            return await _relay_until_exit(process)


async def _run_script(box: BackendSandbox, program: TerminalProgram) -> int:
    """Runs stdin as a script. Ctrl-C interrupts the running command; the second ends the shell."""
    process = await box.commands.start(list(program.script), stdin=True)
    presses: list[Callable[[], object]] = [lambda: process.kill(signal.SIGINT), process.kill]
    async with process:
        with on_interrupt(presses):
            return await _relay_until_exit(process)


async def _relay_until_exit(process: BackendProcess) -> int:
    """Copies bytes both ways until the shell ends. Returns its exit status."""
    feeding = asyncio.create_task(_feed_stdin(process))
    try:
        async for event in process:
            if isinstance(event, Output):
                write_all(STDOUT if event.stream == "stdout" else STDERR, event.text)
    finally:
        feeding.cancel()
        await asyncio.wait([feeding])
    return _exit_status(process.exited)


async def _feed_stdin(process: BackendProcess) -> None:
    with contextlib.suppress(errors.InvalidRequest, OSError):  # the shell reads no more, or our terminal is gone
        while True:
            await wait_readable(STDIN)
            data = os.read(STDIN, READ_BYTES)
            if not data:
                break
            await process.send_stdin(data)
    process.close_stdin()


def _exit_status(exited: Exited | None) -> int:
    if exited is None:
        return EXIT_INTERRUPTED
    if exited.reason:
        print_message(exited.reason)
    return exited.exit_code


@contextlib.contextmanager
def _raw_mode(fd: int) -> Iterator[None]:
    """Every key goes to the sandbox's terminal, Ctrl-C too."""
    before = termios.tcgetattr(fd)
    tty.setraw(fd)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _forward_resizes(process: BackendProcess) -> Iterator[None]:
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
