"""A Python program in a session with lasting variables: a cell of its context, reported as a script.

The value of a last expression is not shown. A figure becomes a file, since it would not be visible otherwise.
"""

from __future__ import annotations

import re

from cloche import errors
from cloche.api.librechat.outcome import ProgramOutcome
from cloche.api.librechat.program_sandbox import ProgramSandbox
from cloche.api.librechat.request import DATA_DIRECTORY, ExecRequest
from cloche.api.programs import ProgramLimits
from cloche.engine.commands.jobs import HeadAndTail
from cloche.events import AnyEvent, Display, Ended, Exited, Output, Raised

SCRIPT_NAME = "main.py"
FIGURE_NAME = "figure-{}.png"
MAX_FIGURES = 100
MAX_FIGURE_NUMBER = 1000  # to which free names are looked for
_ANSI_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_IS_STATUS = re.compile(r"-?[0-9]*|None|True|False")  # other values of SystemExit are messages
# Advice about other ways to answer input() is of no use here.
_ANSWER_HINT = re.compile(r"\s*\(the library takes answers as [^)]*\)")
_SIGKILL = 9
_LOST_VARIABLES_NOTE = (
    "the interpreter has ended, so that variables and functions of this session are gone; its files are there"
)


class CellTranscript:
    """The output of a cell, as a script would have written it."""

    def __init__(self, keep_bytes: int):
        self.stdout, self.stderr = HeadAndTail(keep_bytes), HeadAndTail(keep_bytes)
        self.figures: list[bytes] = []
        self.ended = Ended(outcome="died", reason="unknown cause")

    def add(self, event: AnyEvent) -> None:
        match event:
            case Output(stream="stdout", text=text):
                self.stdout.add(_encode_text(text))
            case Output(text=text):
                self.stderr.add(_encode_text(text))
            case Raised(name="SystemExit", value=value):
                self.stderr.add(b"" if _IS_STATUS.fullmatch(value) else _encode_text(value + "\n"))
            case Raised(traceback=traceback):
                self.stderr.add(
                    _encode_text(_ANSWER_HINT.sub("", _ANSI_COLOURS.sub("", traceback)).rstrip("\n") + "\n")
                )
            case Display(main=False):
                self._add_display(event)
            case Ended():
                self.ended = event

    def _add_display(self, shown: Display) -> None:
        picture, text = shown.data.get("image/png"), shown.data.get("text/plain")
        if isinstance(picture, bytes) and len(self.figures) < MAX_FIGURES:
            self.figures.append(picture)
        elif isinstance(text, str):
            self.stdout.add(_encode_text(text + "\n"))

    def outcome(self) -> ProgramOutcome:
        return ProgramOutcome(
            exited=script_exit(self.ended),
            stdout=self.stdout.kept(),
            stderr=self.stderr.kept(),
            usage=self.ended.usage,
            notes=(_LOST_VARIABLES_NOTE,) if _has_lost_variables(self.ended) else (),
        )


async def run_cell(place: ProgramSandbox, request: ExecRequest, bounds: ProgramLimits) -> ProgramOutcome:
    """Runs the cell to its end. Raises Gone, InvalidRequest."""
    transcript = CellTranscript(bounds.output_bytes)
    context = place.sandbox.context()
    cell = context.execute(request.code, timeout_seconds=bounds.seconds, argv=[SCRIPT_NAME, *request.args])
    async with cell:
        while events := await cell.next_events():
            for event in events:
                transcript.add(event)
    await _save_figures(place, transcript.figures)
    return transcript.outcome()


def script_exit(ended: Ended) -> Exited:
    """The exit of a script that ended like this cell."""
    if ended.outcome == "died" and ended.exit_code is not None and ended.exit_code > 128:
        number = ended.exit_code - 128
        return Exited(exit_code=ended.exit_code, outcome="died", reason=f"killed by signal {number}", signal=number)
    if ended.exit_code is not None:
        return Exited(exit_code=ended.exit_code)
    if ended.outcome in ("timed_out", "out_of_memory", "died"):
        return Exited(exit_code=128 + _SIGKILL, outcome=ended.outcome, reason=ended.reason, signal=_SIGKILL)
    return Exited(exit_code=0 if ended.outcome == "ok" else 1)


def _has_lost_variables(ended: Ended) -> bool:
    """Whether the kernel is gone. One that stops at its time limit keeps its variables; a killed one does not."""
    return ended.outcome in ("died", "out_of_memory") or (ended.reason or "").endswith("state is lost")


async def _save_figures(place: ProgramSandbox, figures: list[bytes]) -> None:
    number = 0
    for figure in figures:
        number += 1
        try:
            while number < MAX_FIGURE_NUMBER and await place.sandbox.files.exists(
                DATA_DIRECTORY + FIGURE_NAME.format(number)
            ):
                number += 1
            await place.sandbox.files.write(DATA_DIRECTORY + FIGURE_NAME.format(number), figure)
        except (errors.FileError, errors.Gone) as error:
            place.notes.add(f"a figure was not kept: {error}")


def _encode_text(text: str) -> bytes:
    return text.encode("utf-8", "replace")
