"""`cloche shell`: Python, cell by cell, in one sandbox.

While the user types, the engine rests: one event loop serves one cell after the other. So the prompt can be Python's
own `input()` with readline, in the main thread, where Ctrl-C arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from cloche import errors
from cloche.cli.cells import Cells
from cloche.cli.lines import Lines
from cloche.cli.notebooks import save_notebook
from cloche.cli.screen import STDERR, STDOUT, Screen, say, write
from cloche.cli.session import ENDING_SIGNALS, ending_by_signal, watch
from cloche.config import Config
from cloche.sdk.backend import Context, Sandbox

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
