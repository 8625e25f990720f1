"""Telling whoever uses the library, on stderr, that a template is being built: it takes a while, once."""

from __future__ import annotations

import sys

from cloche.templates import Progress

WIDTH = 100


class Announcement:
    """A Report: one line that moves on a terminal, a line per phase elsewhere. Silent where nothing is built."""

    def __init__(self) -> None:
        self._phase = ""

    def __call__(self, progress: Progress) -> None:
        if progress.phase == "done" and not self._phase:
            return
        changed, self._phase = progress.phase != self._phase, progress.phase
        if sys.stderr.isatty():
            end = "\n" if progress.phase == "done" else ""
            print(f"\r\x1b[K{_said(progress)}"[:WIDTH], end=end, file=sys.stderr, flush=True)
        elif changed:
            print(_said(progress), file=sys.stderr, flush=True)


def _said(progress: Progress) -> str:
    percent = "" if progress.fraction is None else f" {progress.fraction:.0%}"
    detail = "".join(character for character in progress.detail if character.isprintable())
    return f"cloche: first use, building the template:{percent} {detail}"
