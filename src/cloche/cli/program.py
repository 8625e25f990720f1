"""What `cloche run` does once its command line is understood."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cloche import errors
from cloche.cli import OUR_FAILURE
from cloche.cli.lines import Lines
from cloche.cli.notebooks import save_notebook
from cloche.cli.outbox import Outbox
from cloche.cli.screen import EventLines, Save, Screen, View, WholeRun, say
from cloche.cli.session import INTERRUPTED, ending_by_signal, sandbox, watch
from cloche.config import Config
from cloche.events import Ended
from cloche.model import FileInfo, check_seconds
from cloche.sdk.backend import Sandbox

if TYPE_CHECKING:
    from cloche.cli.run import Ask

CHUNK_BYTES = 1 << 20
TIMED_OUT = 124
OUT_OF_MEMORY = 137


async def run(config: Config, ask: Ask) -> int:
    """Runs the program and gives the exit status. Raises what `session.sandbox` does, and BrokenPipeError."""
    check_seconds("--timeout", ask.timeout_seconds)
    outbox = Outbox(ask.out) if ask.out else None
    with ending_by_signal():
        async with sandbox(
            config, ask.template, env=ask.env, limits=ask.limits, network=ask.network, alone=ask.alone
        ) as box:
            uploaded = [await upload(box, path, place) for path, place in ask.uploads]
            view = view_of(ask.form, outbox.save_images if outbox else None)
            status = await _execute(box, ask, view)
            if ask.notebook is not None:
                await save_notebook(box, ask.notebook)
            if outbox is not None:
                await _collect(box, outbox, uploaded)
    if isinstance(view, Screen) and view.unseen:
        say(f"images that could not be shown here: {view.unseen}; --out DIR saves them")
    return status


def view_of(form: str, save: Save | None = None) -> View:
    kinds: dict[str, Callable[[Save | None], View]] = {"text": Screen, "events": EventLines, "json": WholeRun}
    return kinds[form](save)


async def upload(box: Sandbox, path: Path, place: str) -> FileInfo:
    try:
        return await box.files.write(place, _chunks(path))
    except (errors.ClocheError, OSError) as error:
        raise errors.InvalidRequest(f"--file {path}: {error}") from None


def _chunks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        yield from iter(functools.partial(file.read, CHUNK_BYTES), b"")


async def _execute(box: Sandbox, ask: Ask, view: View) -> int:
    execution = await box.context().execute(
        ask.code, timeout_seconds=ask.timeout_seconds, input=ask.reads_stdin, argv=ask.argv
    )
    killing: list[asyncio.Future[None]] = []
    presses: list[Callable[[], object]] = [
        execution.interrupt,
        lambda: killing.append(asyncio.ensure_future(box.kill())),
    ]
    ended = await watch(execution, view, Lines() if ask.reads_stdin else None, presses)
    if killing:
        await asyncio.wait(killing)
        return INTERRUPTED
    return last_word(ended)


def last_word(ended: Ended) -> int:
    """The exit status. Says why it ended, unless that is known."""
    if ended.reason and not _left_by_itself(ended):
        say(ended.reason.partition(";")[0])  # the rest speaks of a context that nobody will use again
    return _status(ended)


def _left_by_itself(ended: Ended) -> bool:
    """`os._exit(3)`: nothing to explain."""
    return ended.outcome == "died" and ended.exit_code is not None and ended.exit_code < 128


def _status(ended: Ended) -> int:
    fixed = {"ok": 0, "timed_out": TIMED_OUT, "out_of_memory": OUT_OF_MEMORY, "interrupted": INTERRUPTED}
    if ended.outcome in fixed:
        return fixed[ended.outcome]
    if ended.exit_code is not None:
        return ended.exit_code
    return 1 if ended.outcome == "raised" else OUR_FAILURE


async def _collect(box: Sandbox, outbox: Outbox, uploaded: list[FileInfo]) -> None:
    try:
        await outbox.save_files(box.files, uploaded, box.limits.space_bytes)
    except errors.Gone as error:
        say(f"files were not saved: {error}")
