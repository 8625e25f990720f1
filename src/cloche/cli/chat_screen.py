"""What a chat shows: text, code and its output as they come, and images where the terminal can."""

from __future__ import annotations

import base64
import os
import re
from typing import Any, Literal, NamedTuple

from cloche import errors
from cloche.cli.chat_client import ENDS, Event
from cloche.cli.chat_files import SavedFiles
from cloche.cli.images import drawing
from cloche.cli.screen import STDERR, STDOUT, say, write

Manner = Literal["text", "dim", "output"]

_DATA_URL = re.compile(r"data:(image/[a-z+]{1,20});base64,", re.ASCII)
_DELTAS: dict[str, Manner] = {
    "response.output_text.delta": "text",
    "response.refusal.delta": "text",
    "response.code_interpreter_call_code.delta": "dim",
    "response.reasoning_summary_text.delta": "dim",
    "response.reasoning_text.delta": "dim",
    "response.code_interpreter_call_output.delta": "output",
}
# Control characters but tab and newline, and what turns the direction of text: they could show what is not there.
_HIDDEN = [*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_SAFE = {**dict.fromkeys(_HIDDEN, "\N{REPLACEMENT CHARACTER}"), 0x2028: "\n", 0x2029: "\n"}


class Citation(NamedTuple):
    """A file that an answer cites."""

    container: str
    file: str
    name: str


class ChatScreen:
    """Feed it the events of one answer. Its text goes to stdout, all else to stderr: an answer can be piped."""

    def __init__(self, files: SavedFiles):
        self._files = files
        self._draw = drawing(os.environ) if os.isatty(STDOUT) else None
        self._dims = os.isatty(STDERR)
        self._manner: Manner | None = None
        self._in_line = False
        self._citations: dict[Citation, None] = {}
        self.status: str | None = None  # how it ended

    @property
    def citations(self) -> list[Citation]:
        return list(self._citations)

    def show(self, event: Event) -> None:
        kind = str(event.get("type"))
        if kind in _DELTAS:
            self._write(_DELTAS[kind], str(event.get("delta", "")))
        elif kind == "response.output_text.annotation.added":
            self._note(event.get("annotation"))
        elif kind == "response.output_item.done":
            self._item(event.get("item"))
        elif kind in ENDS:
            self._end(ENDS[kind], event.get("response"))

    def end_line(self) -> None:
        """Whatever comes next begins a line."""
        if self._in_line:
            self._in_line = False
            write(STDOUT if self._manner == "text" else STDERR, "\n")

    def _write(self, manner: Manner, text: str) -> None:
        if manner != self._manner:
            self.end_line()
            self._manner = manner
        shown = safe(text)
        if not shown:
            return
        self._in_line = not shown.endswith("\n")
        if manner == "dim" and self._dims:
            shown = f"\x1b[2m{shown}\x1b[22m"
        write(STDOUT if manner == "text" else STDERR, shown)

    def _note(self, annotation: Any) -> None:
        if isinstance(annotation, dict) and annotation.get("type") == "container_file_citation":
            named = (str(annotation.get(name, "")) for name in ("container_id", "file_id", "filename"))
            self._citations[Citation(*named)] = None

    def _item(self, item: Any) -> None:
        if not isinstance(item, dict) or item.get("type") != "code_interpreter_call":
            return
        for output in item.get("outputs") or []:
            if output.get("type") == "image":
                self._image(str(output.get("url", "")))

    def _image(self, url: str) -> None:
        match = _DATA_URL.match(url)
        if match is None:
            return
        self.end_line()
        content = base64.b64decode(url[match.end() :])
        drawn = self._draw({match[1]: content}) if self._draw else None
        if drawn is not None:
            write(STDOUT, drawn)
        try:
            say(f"saved {self._files.image(match[1], content)}")
        except errors.InvalidRequest as error:
            say(str(error))

    def _end(self, status: str, response: Any) -> None:
        self.status = status
        self.end_line()
        response = response if isinstance(response, dict) else {}
        if status == "failed":
            say(f"the answer failed: {(response.get('error') or {}).get('message', 'no reason was given')}")
        elif status == "incomplete":
            say(f"the answer is incomplete: {(response.get('incomplete_details') or {}).get('reason', 'unknown')}")


def safe(text: str) -> str:
    """A model and its programs can say anything, and cannot steer the terminal."""
    return text.replace("\r\n", "\n").replace("\r", "\n").translate(_SAFE)
