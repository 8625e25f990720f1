"""A Python program in a session whose variables last: a cell of the sandbox's own context, told as if it were a script.

The value of a last expression is not shown. A figure becomes a file, as nobody would see it otherwise.
"""

from __future__ import annotations

import re

from cloche import errors
from cloche.api.librechat.outcome import Outcome
from cloche.api.librechat.places import Place
from cloche.api.librechat.programs import Bounds
from cloche.api.librechat.request import DATA, Asked
from cloche.engine.commands.jobs import HeadAndTail
from cloche.engine.commands.program import Exited
from cloche.events import AnyEvent, Display, Ended, Output, Raised

SCRIPT = "main.py"
FIGURE = "figure-{}.png"
MAX_FIGURES = 100
MAX_NUMBER = 1000  # to which free names are looked for
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_IS_STATUS = re.compile(r"-?[0-9]*|None|True|False")  # other values of SystemExit are messages
# What code is told of who else could answer is of no use here.
_ELSEWHERE = re.compile(r"\s*\(the library takes answers as [^)]*\)")
_SIGKILL = 9
_LOST = "the interpreter has ended, so that variables and functions of this session are gone; its files are there"


class Transcript:
    """What a cell said, as a script would have said it."""

    def __init__(self, keep_bytes: int):
        self.stdout, self.stderr = HeadAndTail(keep_bytes), HeadAndTail(keep_bytes)
        self.figures: list[bytes] = []
        self.ended = Ended(outcome="died", reason="nobody knows why")

    def add(self, event: AnyEvent) -> None:
        match event:
            case Output(stream="stdout", text=text):
                self.stdout.add(_bytes(text))
            case Output(text=text):
                self.stderr.add(_bytes(text))
            case Raised(name="SystemExit", value=value):
                self.stderr.add(b"" if _IS_STATUS.fullmatch(value) else _bytes(value + "\n"))
            case Raised(traceback=traceback):
                self.stderr.add(_bytes(_ELSEWHERE.sub("", _COLOURS.sub("", traceback)).rstrip("\n") + "\n"))
            case Display(main=False):
                self._show(event)
            case Ended():
                self.ended = event

    def _show(self, shown: Display) -> None:
        picture, text = shown.data.get("image/png"), shown.data.get("text/plain")
        if isinstance(picture, bytes) and len(self.figures) < MAX_FIGURES:
            self.figures.append(picture)
        elif isinstance(text, str):
            self.stdout.add(_bytes(text + "\n"))

    def outcome(self) -> Outcome:
        return Outcome(
            exited=exited_of(self.ended),
            stdout=self.stdout.kept(),
            stderr=self.stderr.kept(),
            usage=self.ended.usage,
            notes=(_LOST,) if _has_lost_variables(self.ended) else (),
        )


async def run(place: Place, asked: Asked, bounds: Bounds) -> Outcome:
    """To its end. Raises Gone, InvalidRequest."""
    transcript = Transcript(bounds.output_bytes)
    context = place.sandbox.context()
    cell = context.execute(asked.code, timeout_seconds=bounds.seconds, argv=[SCRIPT, *asked.args])
    async with cell:
        while events := await cell.next_events():
            for event in events:
                transcript.add(event)
    await _save(place, transcript.figures)
    return transcript.outcome()


def exited_of(ended: Ended) -> Exited:
    """How a script would have ended."""
    if ended.outcome == "died" and ended.exit_code is not None and ended.exit_code > 128:
        number = ended.exit_code - 128
        return Exited(exit_code=ended.exit_code, outcome="died", reason=f"killed by signal {number}", signal=number)
    if ended.exit_code is not None:
        return Exited(exit_code=ended.exit_code)
    if ended.outcome in ("timed_out", "out_of_memory", "died"):
        return Exited(exit_code=128 + _SIGKILL, outcome=ended.outcome, reason=ended.reason, signal=_SIGKILL)
    return Exited(exit_code=0 if ended.outcome == "ok" else 1)


def _has_lost_variables(ended: Ended) -> bool:
    """A program that stops at its time limit leaves them; one that had to be killed does not."""
    return ended.outcome in ("died", "out_of_memory") or (ended.reason or "").endswith("state is lost")


async def _save(place: Place, figures: list[bytes]) -> None:
    number = 0
    for figure in figures:
        number += 1
        try:
            while number < MAX_NUMBER and await place.sandbox.files.exists(DATA + FIGURE.format(number)):
                number += 1
            await place.sandbox.files.write(DATA + FIGURE.format(number), figure)
        except (errors.FileError, errors.Gone) as error:
            place.notes.add(f"a figure was not kept: {error}")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")
