"""What a run shows: its events as text and images for people, or as JSON for programs."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from cloche.cli.images import Draw, drawing
from cloche.events import (
    AnyEvent,
    Cleared,
    Display,
    Ended,
    Folding,
    Input,
    Output,
    Raised,
    Run,
)

STDOUT, STDERR = 1, 2
IMAGE_MIMES = ("image/png", "image/jpeg", "image/svg+xml", "application/pdf", "image/gif", "image/webp")
_FALLBACKS = ("text/plain", "text/markdown", "text/latex", "text/html", "image/svg+xml")

Save = Callable[[Display], bool]
"""Saves a display's images. False if it has none."""


class View(Protocol):
    def show(self, event: AnyEvent) -> None: ...


def write(fd: int, text: str | bytes) -> None:
    """Writes all of it at once, unbuffered, to what may be a slow or non-blocking descriptor."""
    rest = memoryview(text.encode("utf-8", "backslashreplace") if isinstance(text, str) else text)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:
            select.select([], [fd], [])


def say(text: str) -> None:
    """A line of ours, on stderr. Names that come from a sandbox cannot steer the terminal through it."""
    write(
        STDERR,
        "cloche: " + "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text) + "\n",
    )


class Screen:
    """For people: output as it comes, the last expression's value, images where the terminal can, tracebacks."""

    def __init__(self, save: Save | None = None):
        self._save = save
        self._terminal = os.isatty(STDOUT)
        self._draw: Draw | None = drawing(os.environ) if self._terminal else None
        self._raised: Raised | None = None
        self.unseen = 0  # images that were neither shown nor saved

    def show(self, event: AnyEvent) -> None:
        match event:
            case Output():
                write(STDOUT if event.stream == "stdout" else STDERR, event.text)
            case Display():
                self._display(event)
            case Input():
                write(STDOUT, event.prompt)
            case Cleared() if self._terminal:
                write(STDOUT, "\r\x1b[2K")
            case Raised():
                self._raised = event
            case Ended():
                self._end(event)

    def _display(self, event: Display) -> None:
        saved = self._save is not None and self._save(event)
        drawn = self._draw(event.data) if self._draw else None
        if drawn is not None:
            write(STDOUT, drawn)
            return
        if not saved and has_image(event.data):
            self.unseen += 1
        if event.main or not saved:
            write(STDOUT, plain(event.data) + "\n")

    def _end(self, event: Ended) -> None:
        raised, self._raised = self._raised, None
        if raised is not None:
            write(STDERR, _last_words(raised, event.exit_code))


class EventLines:
    """For programs: each event as a line of JSON, when it comes."""

    def __init__(self, save: Save | None = None):
        self._save = save

    def show(self, event: AnyEvent) -> None:
        if self._save is not None and isinstance(event, Display):
            self._save(event)
        write(STDOUT, encoded(event) + b"\n")


class WholeRun:
    """For programs: the Run as one JSON object, at its end."""

    def __init__(self, save: Save | None = None):
        self._save = save
        self._folding = Folding()

    def show(self, event: AnyEvent) -> None:
        if self._save is not None and isinstance(event, Display):
            self._save(event)
        self._folding.feed(event)
        if isinstance(event, Ended):
            write(STDOUT, encoded(_fields(self._folding.run())) + b"\n")


def has_image(bundle: Mapping[str, Any]) -> bool:
    return any(mime in bundle for mime in IMAGE_MIMES)


def plain(bundle: Mapping[str, Any]) -> str:
    """A bundle as text: its plain text, else the nearest thing to it."""
    for mime in _FALLBACKS:
        if isinstance(bundle.get(mime), str):
            return str(bundle[mime])
    return f"<{', '.join(bundle) or 'nothing'}>"


def encoded(value: object) -> bytes:
    """JSON; bytes become base64. A program's lone surrogates pass as JSON escapes."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(value), separators=(",", ":")).encode()


def _fields(run: Run) -> dict[str, object]:
    """A Run with its `text`, and results without the formats that they do not have."""
    results = [
        {name: value for name, value in msgspec.structs.asdict(each).items() if value is not None and value != {}}
        for each in run.results
    ]
    return {"text": run.text, **msgspec.structs.asdict(run), "results": results}


def _last_words(raised: Raised, exit_code: int | None) -> str:
    """A traceback; of `sys.exit("message")` the message, of `sys.exit(3)` nothing, as Python does."""
    if exit_code is None:
        return raised.traceback if raised.traceback.endswith("\n") else raised.traceback + "\n"
    number = raised.value.removeprefix("-").isdigit() or raised.value in ("", "None", "True", "False")
    return "" if number else raised.value + "\n"
