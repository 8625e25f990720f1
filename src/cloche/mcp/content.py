"""The result of a program as content blocks for a model: text, images, tables, and links to files.

All of it comes from the program, so all of it is bounded and valid UTF-8.
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
from cloche.mcp.uris import path_to_uri
from cloche.mime_types import SIGNATURES
from cloche.model import FileInfo, Outcome
from cloche.sdk import backend

# HTML tables as Jupyter shows them, in Markdown: the format that models read best.
#
# HTML of a program is hostile input, so nothing here takes longer than one pass over it.

MAX_ROWS = 60
MAX_COLUMNS = 40
MAX_CELL_CHARS = 200
MAX_MARKUP_CHARS = 2000  # of a cell
MAX_HTML_CHARS = 500_000

_PART = re.compile(r"<(/?)(table|tr|td|th)\b([^<>]{0,300})>", re.IGNORECASE)
_TAG = re.compile(r"<[^<>]*>")
_SPAN = re.compile(r"\b(rowspan|colspan)\s*=\s*[\"']?(\d{1,5})", re.IGNORECASE)


def html_table_to_markdown(html: str) -> str | None:
    """The first table as Markdown; None where there is none, or the HTML is too long."""
    if "<table" not in html or len(html) > MAX_HTML_CHARS:
        return None
    reading = _HtmlTableReader()
    rows = [row for row in reading.rows_of(html) if row]
    if not rows:
        return None
    width = max(map(len, rows))
    head, *body = [row + [""] * (width - len(row)) for row in rows]
    lines = [_table_line(head), _table_line(["---"] * width), *map(_table_line, body)]
    return "\n".join(lines + ["(more rows are left out)"] * reading.full)


def _table_line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


class _HtmlTableReader:
    """Collects cells. A cell that spans several rows or columns is written once, and blank after that."""

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
                if len(self._rows) >= MAX_ROWS:
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
        if len(self._rows[-1]) >= MAX_COLUMNS:
            return
        spans = {name.lower(): max(min(int(count), MAX_COLUMNS), 1) for name, count in _SPAN.findall(cell[3])}
        words = _cell_text(html[cell.end() : min(end, cell.end() + MAX_MARKUP_CHARS)])
        row = self._rows[-1]
        for at in range(spans.get("colspan", 1)):
            if len(row) < MAX_COLUMNS:
                self._spans[len(row)] = spans.get("rowspan", 1) - 1
                row.append("" if at else words)
        self._skip_taken()

    def _skip_taken(self) -> None:
        row = self._rows[-1]
        while self._spans.get(len(row), 0) > 0 and len(row) < MAX_COLUMNS:
            self._spans[len(row)] -= 1
            row.append("")


def _cell_text(markup: str) -> str:
    return " ".join(unescape(_TAG.sub("", markup)).split())[:MAX_CELL_CHARS].replace("|", "\\|")


MAX_TEXT_CHARS = 50_000  # of one text
MAX_ANSWER_CHARS = 200_000  # of all texts of an answer
MIN_TEXT_CHARS = 200  # of one text, however long those before it were
BYTES_PER_CHAR = (
    20  # bytes of an answer for each character: six where it is escaped, twice, and half of it is for pictures
)
MAX_BLOCKS = 40  # of one answer
MAX_LINKS = 20
MAX_EMBEDDED_CHARS = 200_000
MAX_PATH_CHARS = 1000  # of a file that is named
BYTES_PER_DOCUMENT_CHAR = 4  # bytes of a character of a document, at most, nearly always
IMAGE_FIELDS = {"png": "image/png", "jpeg": "image/jpeg"}
EXTRA_IMAGE_MIMES = SIGNATURES.keys() - IMAGE_FIELDS.values()
DOCUMENT_FIELDS = {"svg": "image/svg+xml", "html": "text/html"}

ContentBlock = dict[str, Any]  # a content block, as MCP writes it


def escape_surrogates(text: str) -> str:
    """The same as valid UTF-8: lone surrogates are escaped with backslashes."""
    if text.isascii():
        return text
    return text.encode("utf-8", "backslashreplace").decode()


def shorten_text(text: str, most: int = MAX_TEXT_CHARS) -> str:
    """The beginning and the end of a text that is too long for a model to read."""
    if len(text) <= most:
        return escape_surrogates(text)
    head, tail = most * 2 // 3, most // 3
    gone = len(text) - head - tail
    return escape_surrogates(f"{text[:head]}\n[… {gone} characters are left out here …]\n{text[-tail:]}")


def text_block(words: str) -> ContentBlock:
    return {"type": "text", "text": shorten_text(words)}


def image_block(data: bytes, mime: str) -> ContentBlock:
    return {"type": "image", "data": base64.b64encode(data).decode(), "mimeType": mime}


def link_block(file: FileInfo) -> ContentBlock:
    """A link to a file of the sandbox, which a client can read as a resource."""
    found: ContentBlock = {
        "type": "resource_link",
        "uri": path_to_uri(file.path),
        "name": escape_surrogates(file.name),
        "size": file.size_bytes,
    }
    mime = guess_mime(file.path)
    return {**found, "mimeType": mime} if mime else found


def embedded_block(uri: str, mime: str | None, data: bytes | str) -> ContentBlock:
    return {"type": "resource", "resource": resource_contents(uri, mime, data)}


def resource_contents(uri: str, mime: str | None, data: bytes | str) -> dict[str, Any]:
    """The contents of a resource: text where it is text, else bytes."""
    found = {"uri": uri, "mimeType": mime or ("text/plain" if isinstance(data, str) else "application/octet-stream")}
    if isinstance(data, str):
        return {**found, "text": escape_surrogates(data)}
    return {**found, "blob": base64.b64encode(data).decode()}


def guess_mime(path: str) -> str | None:
    return guess_type(path.rpartition("/")[2])[0]


class TextBudget:
    """The characters of text that still fit into a response of so many bytes."""

    def __init__(self, most_bytes: int):
        self.left = min(MAX_ANSWER_CHARS, most_bytes // BYTES_PER_CHAR)

    def take(self, words: str, most: int = MAX_TEXT_CHARS) -> str:
        """Returns as much of the text as there is room for, and deducts it."""
        found = shorten_text(words, max(min(most, self.left), MIN_TEXT_CHARS))
        self.left -= len(found)
        return found


class ContentBudget(TextBudget):
    """The same, and the bytes of images and documents."""

    def __init__(self, most_bytes: int):
        super().__init__(most_bytes)
        self._left = most_bytes // 2

    def text(self, words: str) -> ContentBlock:
        return {"type": "text", "text": self.take(words)}

    def takes(self, size: int, what: str, make: Callable[[], ContentBlock]) -> ContentBlock:
        """Returns the block that `make` gives, or a note about it where there is no room."""
        cost = size * 4 // 3
        if cost > self._left:
            return self.text(f"[{what} of {size} bytes is left out here: save it to a file below /mnt/data instead]")
        self._left -= cost
        return make()


def run_blocks(run: Run, most_bytes: int, *, links: bool) -> list[ContentBlock]:
    """The content blocks of a run. `links`: whether the client knows links to resources."""
    room, blocks = ContentBudget(most_bytes), []
    if run.stdout:
        blocks.append(room.text(run.stdout))
    for result in run.results:
        if len(blocks) >= MAX_BLOCKS:
            blocks.append(text_block(f"[{len(run.results)} results; those after these are left out]"))
            break
        blocks += _result_blocks(result, room)
    if run.stderr:
        blocks.append(room.text(f"stderr:\n{run.stderr}"))
    if run.error is not None:
        blocks.append(room.text(str(run.error)))
    ending = describe_ending(run.outcome, run.reason, raised=run.error is not None)
    if ending:
        blocks.append(text_block(ending))
    blocks += file_blocks(run.files, links=links)
    return blocks or [text_block("(it ran, and showed nothing)")]


def file_blocks(files: list[FileInfo], *, links: bool) -> list[ContentBlock]:
    files = [each for each in files if len(each.path) <= MAX_PATH_CHARS]
    if not files:
        return []
    if links and len(files) <= MAX_LINKS:
        return [link_block(each) for each in files]
    named = "\n".join(f"{each.path} ({each.size_bytes} bytes)" for each in files[:MAX_LINKS])
    more = f"\n… and {len(files) - MAX_LINKS} more" if len(files) > MAX_LINKS else ""
    return [text_block(f"files that were written:\n{named}{more}")]


def describe_ending(outcome: Outcome, reason: str | None, *, raised: bool) -> str:
    """The outcome in words; empty where it is obvious."""
    if outcome == "ok" or (outcome == "raised" and raised):
        return ""
    return f"[{outcome.replace('_', ' ')}{f': {reason}' if reason else ''}]"


def _result_blocks(result: Result, room: ContentBudget) -> Iterator[ContentBlock]:
    """The blocks of one rich result: its image if it has one, else its table, else its text."""
    pictures = [*_image_blocks(result, room)]
    yield from pictures
    words = _result_text(result)
    if words is not None and not (pictures and not result.is_main_result):  # a figure's words say nothing
        yield room.text(words)
    if not pictures:
        yield from _document_blocks(result, room)


def _image_blocks(result: Result, room: ContentBudget) -> Iterator[ContentBlock]:
    for name, mime in IMAGE_FIELDS.items():
        data = getattr(result, name)
        if isinstance(data, bytes):
            yield room.takes(len(data), "a picture", partial(image_block, data, mime))
            return
    for mime, data in result.extra.items():
        if mime in EXTRA_IMAGE_MIMES and isinstance(data, bytes):
            yield room.takes(len(data), "a picture", partial(image_block, data, mime))


def _result_text(result: Result) -> str | None:
    table = html_table_to_markdown(result.html) if result.html else None
    found = table or result.markdown or result.latex or result.text
    if found is None and result.json is not None:
        return json.dumps(result.json, ensure_ascii=False)
    return found


def _document_blocks(result: Result, room: ContentBudget) -> Iterator[ContentBlock]:
    if isinstance(result.pdf, bytes):
        make = partial(embedded_block, "sandbox://result/document.pdf", "application/pdf", result.pdf)
        yield room.takes(len(result.pdf), "a PDF", make)
    for name, mime in DOCUMENT_FIELDS.items():
        words = getattr(result, name)
        if isinstance(words, str) and "<table" not in words and len(words) <= MAX_EMBEDDED_CHARS:  # tables are text
            make = partial(embedded_block, f"sandbox://result/shown.{name}", mime, words)
            yield room.takes(len(words) * BYTES_PER_DOCUMENT_CHAR, f"some {name}", make)


# Reads a file of a sandbox into memory, within bounds: a sparse one may claim any size.

MAX_FILE_BYTES = 16 << 20


async def read_file_bytes(files: backend.BackendFiles, path: str, most_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Returns the bytes of the file. Raises TooLarge as soon as it is clear, and the errors of reading."""
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
