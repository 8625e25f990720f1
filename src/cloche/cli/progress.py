"""Progress of a template build: a bar on a terminal, plain lines elsewhere. Always on stderr."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import click

from cloche.templates import ReportProgress, TemplateProgress

if TYPE_CHECKING:
    from click._termui_impl import ProgressBar

BAR_CHARACTERS = 12
STEPS = 1000


@contextmanager
def show_progress(title: str) -> Iterator[ReportProgress]:
    """A Report that prints each progress. Silent until something is reported."""
    with ExitStack() as stack:
        yield _BarReport(title, stack) if sys.stderr.isatty() else _LineReport(title)


class _LineReport:
    """For logs and pipes: each step once, compilation only by its quarters."""

    def __init__(self, title: str):
        self._title = title
        self._quarter = 0
        self._began_at = time.monotonic()

    def __call__(self, progress: TemplateProgress) -> None:
        if progress.phase == "compile" and not self._next_quarter(progress.fraction or 0.0):
            return
        text = _progress_text(progress, self._began_at)
        click.echo(f"{self._title}: {progress.fraction or 0.0:.0%} {text}", err=True)

    def _next_quarter(self, fraction: float) -> bool:
        quarter, self._quarter = self._quarter, int(fraction * 4)
        return self._quarter > quarter


class _BarReport:
    """For people: title, bar, percentage, time left and current step."""

    def __init__(self, title: str, stack: ExitStack):
        self._title = title
        self._stack = stack
        self._bar: ProgressBar[str] | None = None
        self._began_at = time.monotonic()

    def __call__(self, progress: TemplateProgress) -> None:
        bar = self._bar = self._bar or self._stack.enter_context(self._open_bar())
        bar.current_item = _progress_text(progress, self._began_at)
        steps = round(STEPS * (progress.fraction or 0.0)) - bar.pos
        if steps > 0:
            bar.update(steps, bar.current_item)
        else:
            bar.render_progress()  # an update by nothing would count for the time left

    def _open_bar(self) -> ProgressBar[str]:
        return click.progressbar(
            length=STEPS,
            label=self._title,
            bar_template="%(label)s [%(bar)s] %(info)s",
            item_show_func=self._fit,
            width=BAR_CHARACTERS,
            file=sys.stderr,
        )

    def _fit(self, text: str | None) -> str:
        """As much of the text as the terminal's line has room for."""
        has_eta = self._bar is not None and self._bar.eta_known and not self._bar.finished
        before = f"{self._title} [{'#' * BAR_CHARACTERS}] 100%  {'00:00:00  ' if has_eta else ''}"
        return (text or "")[: max(shutil.get_terminal_size().columns - len(before) - 1, 0)]


def _progress_text(progress: TemplateProgress, began_at: float) -> str:
    text = progress.detail
    if progress.phase == "done":
        text = f"ready as {text} after {time.monotonic() - began_at:.0f} s"
    return "".join(character for character in text if character.isprintable())
