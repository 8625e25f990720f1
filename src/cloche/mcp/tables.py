"""A table as Jupyter shows it, in Markdown: what a model reads best.

HTML of a program's own is hostile input, so nothing here takes longer than looking through it once.
"""

from __future__ import annotations

import re
from html import unescape

MOST_ROWS = 60
MOST_COLUMNS = 40
MOST_CELL_CHARS = 200
MOST_MARKUP_CHARS = 2000  # of a cell
MOST_HTML_CHARS = 500_000

_PART = re.compile(r"<(/?)(table|tr|td|th)\b([^<>]{0,300})>", re.IGNORECASE)
_TAG = re.compile(r"<[^<>]*>")
_SPAN = re.compile(r"\b(rowspan|colspan)\s*=\s*[\"']?(\d{1,5})", re.IGNORECASE)


def markdown_of(html: str) -> str | None:
    """The first table of it; None where there is none, or it is too long to look at."""
    if "<table" not in html or len(html) > MOST_HTML_CHARS:
        return None
    reading = _Reading()
    rows = [row for row in reading.rows_of(html) if row]
    if not rows:
        return None
    width = max(map(len, rows))
    head, *body = [row + [""] * (width - len(row)) for row in rows]
    lines = [_line(head), _line(["---"] * width), *map(_line, body)]
    return "\n".join(lines + ["(more rows are left out)"] * reading.full)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


class _Reading:
    """Collects cells. One that spans several rows or columns is said once, and blank after that."""

    def __init__(self) -> None:
        self.full = False  # whether there were more rows than are taken
        self._rows: list[list[str]] = []
        self._spans: dict[int, int] = {}  # by column: for how many more rows it is taken
        self._cell: re.Match[str] | None = None  # that is open

    def rows_of(self, html: str) -> list[list[str]]:
        for part in _PART.finditer(html, html.index("<table")):
            end, name = part[1], part[2].lower()
            self._close_cell(html, part.start())
            if name == "table" and (end or self._rows):
                break  # it ends, or there is another one in it
            if name == "tr" and not end:
                if len(self._rows) >= MOST_ROWS:
                    self.full = True
                    break
                self._rows.append([])
                self._skip_taken()
            elif name in ("td", "th") and not end and self._rows:
                self._cell = part
        else:
            self._close_cell(html, len(html))
        return self._rows

    def _close_cell(self, html: str, end: int) -> None:
        if self._cell is None:
            return
        cell, self._cell = self._cell, None
        if len(self._rows[-1]) >= MOST_COLUMNS:
            return
        spans = {name.lower(): max(min(int(count), MOST_COLUMNS), 1) for name, count in _SPAN.findall(cell[3])}
        words = _words(html[cell.end() : min(end, cell.end() + MOST_MARKUP_CHARS)])
        row = self._rows[-1]
        for at in range(spans.get("colspan", 1)):
            if len(row) < MOST_COLUMNS:
                self._spans[len(row)] = spans.get("rowspan", 1) - 1
                row.append("" if at else words)
        self._skip_taken()

    def _skip_taken(self) -> None:
        row = self._rows[-1]
        while self._spans.get(len(row), 0) > 0 and len(row) < MOST_COLUMNS:
            self._spans[len(row)] -= 1
            row.append("")


def _words(markup: str) -> str:
    return " ".join(unescape(_TAG.sub("", markup)).split())[:MOST_CELL_CHARS].replace("|", "\\|")
