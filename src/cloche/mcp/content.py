"""What a program did, as content that a model reads: text, pictures, tables, and where its files are.

All of it is the program's own words, so all of it is bounded, and all of it can be said in UTF-8.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from functools import partial
from mimetypes import guess_type
from typing import Any

from cloche.events import Result, Run
from cloche.mcp.tables import markdown_of
from cloche.mcp.uris import uri_of
from cloche.model import FileInfo, Outcome

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
    words = _words(result)
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


def _words(result: Result) -> str | None:
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
