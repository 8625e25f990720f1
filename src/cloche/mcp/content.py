"""What a program did, as content that a model reads: text, pictures, tables, and where its files are.

All of it is the program's own words, so all of it is bounded, and all of it can be said in UTF-8.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from html import unescape
from mimetypes import guess_type
from typing import Any

from cloche import errors
from cloche.events import Result, Run
from cloche.mcp.uris import uri_of
from cloche.model import FileInfo, Outcome
from cloche.sdk import backend

# A table as Jupyter shows it, in Markdown: what a model reads best.
#
# HTML of a program's own is hostile input, so nothing here takes longer than looking through it once.

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
        words = _cell_text(html[cell.end() : min(end, cell.end() + MOST_MARKUP_CHARS)])
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


def _cell_text(markup: str) -> str:
    return " ".join(unescape(_TAG.sub("", markup)).split())[:MOST_CELL_CHARS].replace("|", "\\|")


MOST_CHARS = 50_000  # of one text
MOST_WORDS = 200_000  # of all texts of an answer
LEAST_CHARS = 200  # of one text, however long those before it were
COST = 20  # bytes of an answer for each character: six where it is escaped, twice, and half of it is for pictures
MOST_BLOCKS = 40  # of one answer
MOST_LINKS = 20
MOST_EMBEDDED_CHARS = 200_000
MOST_PATH_CHARS = 1000  # of a file that is named
ESCAPED = 4  # bytes of a character of a document, at most, nearly always
PICTURES = {"png": "image/png", "jpeg": "image/jpeg"}
MORE_PICTURES = frozenset({"image/gif", "image/webp"})
DOCUMENTS = {"svg": "image/svg+xml", "html": "text/html"}

Content = dict[str, Any]  # a content block, as MCP writes it


def sayable(text: str) -> str:
    """The same as UTF-8 can say it: halves of surrogates become `\\udc80`."""
    if text.isascii():
        return text
    return text.encode("utf-8", "backslashreplace").decode()


def shortened(text: str, most: int = MOST_CHARS) -> str:
    """Its beginning and its end, where it is too long for a model to read."""
    if len(text) <= most:
        return sayable(text)
    head, tail = most * 2 // 3, most // 3
    gone = len(text) - head - tail
    return sayable(f"{text[:head]}\n[… {gone} characters are left out here …]\n{text[-tail:]}")


def text(words: str) -> Content:
    return {"type": "text", "text": shortened(words)}


def picture(data: bytes, mime: str) -> Content:
    return {"type": "image", "data": base64.b64encode(data).decode(), "mimeType": mime}


def link(file: FileInfo) -> Content:
    """A file of the sandbox that a client can read as a resource."""
    found: Content = {
        "type": "resource_link",
        "uri": uri_of(file.path),
        "name": sayable(file.name),
        "size": file.size_bytes,
    }
    mime = mime_of(file.path)
    return {**found, "mimeType": mime} if mime else found


def embedded(uri: str, mime: str | None, data: bytes | str) -> Content:
    return {"type": "resource", "resource": resource(uri, mime, data)}


def resource(uri: str, mime: str | None, data: bytes | str) -> dict[str, Any]:
    """What a resource holds: text where it is, else bytes."""
    found = {"uri": uri, "mimeType": mime or ("text/plain" if isinstance(data, str) else "application/octet-stream")}
    if isinstance(data, str):
        return {**found, "text": sayable(data)}
    return {**found, "blob": base64.b64encode(data).decode()}


def mime_of(path: str) -> str | None:
    return guess_type(path.rpartition("/")[2])[0]


class Words:
    """How many characters of texts still go into an answer of so many bytes."""

    def __init__(self, most_bytes: int):
        self.left = min(MOST_WORDS, most_bytes // COST)

    def take(self, words: str, most: int = MOST_CHARS) -> str:
        """As much of it as there is room for."""
        found = shortened(words, max(min(most, self.left), LEAST_CHARS))
        self.left -= len(found)
        return found


class Room(Words):
    """The same, and how many bytes of pictures and documents."""

    def __init__(self, most_bytes: int):
        super().__init__(most_bytes)
        self._left = most_bytes // 2

    def text(self, words: str) -> Content:
        return {"type": "text", "text": self.take(words)}

    def takes(self, size: int, what: str, make: Callable[[], Content]) -> Content:
        """What is made, or a word about it where there is no room."""
        cost = size * 4 // 3
        if cost > self._left:
            return self.text(f"[{what} of {size} bytes is left out here: save it to a file below /mnt/data instead]")
        self._left -= cost
        return make()


def blocks_of(run: Run, most_bytes: int, *, links: bool) -> list[Content]:
    """`links`: whether the client knows links to resources."""
    room, blocks = Room(most_bytes), []
    if run.stdout:
        blocks.append(room.text(run.stdout))
    for result in run.results:
        if len(blocks) >= MOST_BLOCKS:
            blocks.append(text(f"[{len(run.results)} results; those after these are left out]"))
            break
        blocks += _shown(result, room)
    if run.stderr:
        blocks.append(room.text(f"stderr:\n{run.stderr}"))
    if run.error is not None:
        blocks.append(room.text(str(run.error)))
    ending = ending_of(run.outcome, run.reason, raised=run.error is not None)
    if ending:
        blocks.append(text(ending))
    blocks += files_of(run.files, links=links)
    return blocks or [text("(it ran, and showed nothing)")]


def files_of(files: list[FileInfo], *, links: bool) -> list[Content]:
    files = [each for each in files if len(each.path) <= MOST_PATH_CHARS]
    if not files:
        return []
    if links and len(files) <= MOST_LINKS:
        return [link(each) for each in files]
    named = "\n".join(f"{each.path} ({each.size_bytes} bytes)" for each in files[:MOST_LINKS])
    more = f"\n… and {len(files) - MOST_LINKS} more" if len(files) > MOST_LINKS else ""
    return [text(f"files that were written:\n{named}{more}")]


def ending_of(outcome: Outcome, reason: str | None, *, raised: bool) -> str:
    """In words, where it was none that goes without saying."""
    if outcome == "ok" or (outcome == "raised" and raised):
        return ""
    return f"[{outcome.replace('_', ' ')}{f': {reason}' if reason else ''}]"


def _shown(result: Result, room: Room) -> Iterator[Content]:
    """One rich result: its picture if it has one, else its table, else its words."""
    pictures = [*_pictures(result, room)]
    yield from pictures
    words = _result_text(result)
    if words is not None and not (pictures and not result.is_main_result):  # a figure's words say nothing
        yield room.text(words)
    if not pictures:
        yield from _documents(result, room)


def _pictures(result: Result, room: Room) -> Iterator[Content]:
    for name, mime in PICTURES.items():
        data = getattr(result, name)
        if isinstance(data, bytes):
            yield room.takes(len(data), "a picture", partial(picture, data, mime))
            return
    for mime, data in result.extra.items():
        if mime in MORE_PICTURES and isinstance(data, bytes):
            yield room.takes(len(data), "a picture", partial(picture, data, mime))


def _result_text(result: Result) -> str | None:
    table = markdown_of(result.html) if result.html else None
    found = table or result.markdown or result.latex or result.text
    if found is None and result.json is not None:
        return json.dumps(result.json, ensure_ascii=False)
    return found


def _documents(result: Result, room: Room) -> Iterator[Content]:
    if isinstance(result.pdf, bytes):
        make = partial(embedded, "sandbox://result/document.pdf", "application/pdf", result.pdf)
        yield room.takes(len(result.pdf), "a PDF", make)
    for name, mime in DOCUMENTS.items():
        words = getattr(result, name)
        if isinstance(words, str) and "<table" not in words and len(words) <= MOST_EMBEDDED_CHARS:  # it was said
            make = partial(embedded, f"sandbox://result/shown.{name}", mime, words)
            yield room.takes(len(words) * ESCAPED, f"some {name}", make)


# A file of a sandbox as bytes in memory, within bounds: a sparse one may claim any size.

MOST_BYTES = 16 << 20


async def contents(files: backend.Files, path: str, most_bytes: int = MOST_BYTES) -> bytes:
    """Raises TooLarge as soon as it is clear, and what reading does."""
    chunks, size = [], 0
    async with contextlib.aclosing(await files.open_read(path)) as reading:
        async for chunk in reading:
            size += len(chunk)
            if size > most_bytes:
                raise errors.TooLarge(
                    f"{path} has more than the {most_bytes} bytes that one answer can carry: read a part of it with "
                    "run_code or run_command"
                )
            chunks.append(chunk)
    return b"".join(chunks)
