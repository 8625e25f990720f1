"""Progress of a template build: one moving line on a terminal, plain lines elsewhere. Always on stderr."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import click

from cloche.templates import ReportProgress, TemplateProgress

BAR_CHARACTERS = 24
FRAMES_PER_SECOND = 20


@contextmanager
def show_progress(title: str) -> Iterator[ReportProgress]:
    """A Report that prints each progress. Silent until something is reported."""
    if not sys.stderr.isatty():
        yield _ProgressLines(title)
        return
    line = _ProgressBar(title)
    try:
        yield line
    finally:
        line.clear()


class _ProgressLines:
    """For logs and pipes: each step once, compilation only by its quarters."""

    def __init__(self, title: str):
        self._title = title
        self._quarter = 0

    def __call__(self, progress: TemplateProgress) -> None:
        if progress.phase == "compile" and not self._next_quarter(progress.fraction or 0.0):
            return
        click.echo(f"{self._title}: {_progress_text(progress)}", err=True)

    def _next_quarter(self, fraction: float) -> bool:
        quarter, self._quarter = self._quarter, int(fraction * 4)
        return self._quarter > quarter


class _ProgressBar:
    """For people: title, bar, current step."""

    def __init__(self, title: str):
        self._title = title
        self._shown_at = 0.0
        self._phase = ""

    def __call__(self, progress: TemplateProgress) -> None:
        now = time.monotonic()
        if progress.phase == self._phase and now - self._shown_at < 1 / FRAMES_PER_SECOND:
            return
        self._shown_at, self._phase = now, progress.phase
        text = f"{self._title} {_format_bar(progress.fraction)} {_progress_text(progress)}"
        click.echo("\r\x1b[K" + text[: shutil.get_terminal_size().columns - 1], err=True, nl=False)

    def clear(self) -> None:
        if self._phase:
            click.echo("\r\x1b[K", err=True, nl=False)


def _progress_text(progress: TemplateProgress) -> str:
    text = f"ready as {progress.detail}" if progress.phase == "done" else progress.detail
    return "".join(character for character in text if character.isprintable())


def _format_bar(fraction: float | None) -> str:
    full = round(BAR_CHARACTERS * (fraction or 0.0))
    return f"[{'#' * full}{'-' * (BAR_CHARACTERS - full)}] {fraction or 0.0:4.0%}"
