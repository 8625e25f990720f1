"""A table as Jupyter shows it, in Markdown: what a model reads best. HTML of a program's own is hostile input."""

from __future__ import annotations

from html.parser import HTMLParser

MOST_ROWS = 60
MOST_COLUMNS = 40
MOST_CELL_CHARS = 200
MOST_HTML_CHARS = 500_000


def markdown_of(html: str) -> str | None:
    """The first table of it; None where there is none, or it is too long to look at."""
    if "<table" not in html or len(html) > MOST_HTML_CHARS:
        return None
    reading = _Reading()
    reading.feed(html)
    rows = [row for row in reading.rows if row]
    if not rows:
        return None
    width = max(map(len, rows))
    head, *body = [row + [""] * (width - len(row)) for row in rows]
    lines = [_line(head), _line(["---"] * width), *map(_line, body)]
    return "\n".join(lines + ["(more rows are left out)"] * reading.full)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


class _Reading(HTMLParser):
    """Collects cells. One that spans several rows or columns is said once, and blank after that."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.full = False  # whether there was more than is taken
        self._texts: list[str] | None = None  # of the cell that is open
        self._spans: dict[int, int] = {}  # by column: for how many more rows it is taken
        self._columns = 1  # that the cell takes
        self._down = 1  # rows
        self._done = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._done:
            return
        if tag == "tr":
            self._open_row()
        elif tag in ("td", "th") and self.rows and not self.full:
            self._close_cell()
            given = dict(attrs)
            self._columns, self._down = _span(given.get("colspan")), _span(given.get("rowspan"))
            self._texts = []

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th", "tr"):
            self._close_cell()
        elif tag == "table":
            self._close_cell()
            self._done = True

    def handle_data(self, data: str) -> None:
        if self._texts is not None:
            self._texts.append(data)

    def _open_row(self) -> None:
        self._close_cell()
        if len(self.rows) >= MOST_ROWS:
            self.full = True
        else:
            self.rows.append([])
            self._skip_taken()

    def _close_cell(self) -> None:
        if self._texts is None:
            return
        text = " ".join("".join(self._texts).split()).replace("|", "\\|")
        self._texts, row = None, self.rows[-1]
        for at in range(self._columns):
            if len(row) < MOST_COLUMNS:
                self._spans[len(row)] = self._down - 1
                row.append("" if at else text[:MOST_CELL_CHARS])
        self._skip_taken()

    def _skip_taken(self) -> None:
        row = self.rows[-1]
        while self._spans.get(len(row), 0) > 0 and len(row) < MOST_COLUMNS:
            self._spans[len(row)] -= 1
            row.append("")


def _span(text: str | None) -> int:
    return min(int(text), MOST_COLUMNS) or 1 if text and text.isascii() and text.isdigit() and len(text) < 6 else 1
