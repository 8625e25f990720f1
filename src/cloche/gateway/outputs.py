"""The outputs of an execution: for the client those of the code call, for the model text and pictures."""

from __future__ import annotations

import base64
import io
import re
from collections import deque
from typing import Any

import msgspec

from cloche.events import AnyEvent, Cleared, Display, Ended, Output, Raised, Truncated, Wrote
from cloche.gateway.items import Item
from cloche.mime_types import EXTENSIONS, IMAGE_MIMES, SIGNATURES
from cloche.model import KIB, MIB, FileInfo, Struct

# Pictures that code has shown, and the limits for showing them to a model.
#
# Models' servers refuse a request with a picture that is broken or too large, and a conversation keeps it for
# ever: a note replaces every picture that they would refuse.

MAX_EXECUTION_PICTURES = 10
MAX_TURN_PICTURES = 50
MAX_PICTURE_BYTES = 5 * MIB  # of one
MAX_TURN_PICTURE_BYTES = 20 * MIB

_SIGNATURES = {mime: re.compile(signature) for mime, signature in SIGNATURES.items()}  # that models accept


class Picture(Struct):
    mime: str
    content: bytes

    @property
    def file_extension(self) -> str:
        return EXTENSIONS.get(self.mime, self.mime.partition("/")[2])

    @property
    def url(self) -> str:
        return f"data:{self.mime};base64,{base64.b64encode(self.content).decode()}"

    @property
    def url_bytes(self) -> int:
        return len(self.content) * 4 // 3 + len(self.mime) + 16

    @property
    def is_model_viewable(self) -> bool:
        """Whether models can see this type of picture."""
        return self.mime in _SIGNATURES

    @property
    def has_valid_signature(self) -> bool:
        return self.is_model_viewable and _SIGNATURES[self.mime].match(self.content) is not None


class PictureLimit:
    """Counts the pictures that a model is shown in one turn."""

    def __init__(self) -> None:
        self._left = MAX_TURN_PICTURES
        self._bytes_left = MAX_TURN_PICTURE_BYTES

    def refusal(self, picture: Picture) -> str | None:
        """Returns the note to show instead of the picture; None if it is shown, and then it counts."""
        size = len(picture.content)
        if not picture.has_valid_signature:
            return f"[image that cannot be shown to you: it is no {picture.mime}]\n"
        if size > MAX_PICTURE_BYTES:
            return f"[image too large to be shown to you: {size / 1e6:.1f} MB]\n"
        if self._left <= 0 or size > self._bytes_left:
            return "[image not shown to you: you have been shown as many as one answer can have]\n"
        self._left -= 1
        self._bytes_left -= size
        return None


# Bounded program output: all of a text, or its beginning and its end.


class OutputText:
    """Text printed in many pieces, stored as one: it takes no more room than its characters."""

    def __init__(self, text: str = "", *, alone: bool = False):
        self._text = io.StringIO()
        self._whole: str | None = None
        self._last = ""
        self.alone = alone  # a display that may still be replaced: nothing else is added to it
        self.size = 0
        self.add(text)

    def add(self, text: str) -> None:
        self._text.write(text)
        self._whole = None
        self._last = text[-1:] or self._last
        self.size += json_size(text)

    @property
    def ends_line(self) -> bool:
        return self._last in ("", "\n")

    @property
    def whole(self) -> str:
        if self._whole is None:
            self._whole = self._text.getvalue()
        return self._whole


class OutputTail:
    """The end of a text of any length."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._pieces: deque[tuple[str, int]] = deque()
        self._held = 0
        self._came = 0

    def add(self, text: str) -> None:
        size = json_size(text)
        self._came += size
        text = take_last(text, size, self._max_bytes)
        self._pieces.append((text, json_size(text)))
        self._held += self._pieces[-1][1]
        while self._held - self._pieces[0][1] >= self._max_bytes:
            self._held -= self._pieces.popleft()[1]

    @property
    def whole(self) -> str:
        """The kept end, after a note about the dropped bytes."""
        text = take_last("".join(text for text, _ in self._pieces), self._held, self._max_bytes)
        note = f"\n[{self.dropped_bytes} bytes dropped: over the limit of one response's outputs]\n"
        return note + text if self.dropped_bytes else text

    @property
    def size(self) -> int:
        return min(self._held, self._max_bytes)

    @property
    def dropped_bytes(self) -> int:
        return self._came - self.size


def json_size(text: str) -> int:
    """Returns its size in bytes as JSON, as it is sent and stored: up to six for one character."""
    try:
        return len(msgspec.json.encode(text)) - 2
    except UnicodeEncodeError:  # halves of surrogates
        return 6 * len(text)


def take_first(text: str, size: int, max_bytes: int) -> str:
    """Returns about the first `max_bytes` of a text of that size."""
    return text if size <= max_bytes else text[: max(max_bytes * len(text) // size, 0)]


def take_last(text: str, size: int, max_bytes: int) -> str:
    return text if size <= max_bytes else text[len(text) - max(max_bytes * len(text) // size, 0) :]


def abridge_text(text: str, max_bytes: int) -> str:
    """Returns the text, or head and tail of it if it is longer."""
    sample = text if len(text) <= 2 * max_bytes else text[:max_bytes] + text[-max_bytes:]
    size = len(sample.encode("utf-8", "replace"))
    if size <= max_bytes:
        return text
    kept = max(max_bytes * len(sample) // size, 2)
    head, tail = text[: kept // 2], text[len(text) - kept // 2 :]
    return f"{head}\n[truncated {len(text) - len(head) - len(tail)} characters]\n{tail}"


MAX_OUTPUTS_BYTES = 32 * MIB
MAX_TAIL_BYTES = 64 * KIB
ENTRY_BYTES = 64  # fixed cost of one output
DROPPED_PICTURE = "[image dropped: over the limit of one response's outputs]\n"

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


class ExecutionOutputs:
    """Collects the events of one execution, in order. It keeps `max_bytes`: of text, the beginning and the end."""

    def __init__(self, max_bytes: int = MAX_OUTPUTS_BYTES) -> None:
        self.outcome = "died"
        self.files: dict[str, FileInfo] = {}
        self.seconds = 0.0
        self._tail_bytes = min(max_bytes // 2, MAX_TAIL_BYTES)
        self._room = self._left = max_bytes - self._tail_bytes
        self._shown: list[OutputText | Picture] = []
        self._tail: OutputTail | None = None  # of output over the limit
        self._ids: dict[str, int] = {}
        self._clear_next = False

    def feed(self, event: AnyEvent) -> None:
        if self._clear_next and isinstance(event, (Output, Display)):
            self._clear_outputs()
        match event:
            case Output():
                self._add_text(event.text)
            case Display():
                self._add_display(event)
            case Raised():
                self._add_text(_end_line(strip_colours(event.traceback) or f"{event.name}: {event.value}"))
            case Truncated():
                self._add_text(_dropped_note(event))
            case Wrote():
                self.files[event.file.path] = event.file
            case Cleared(wait=True):
                self._clear_next = True
            case Cleared():
                self._clear_outputs()
            case Ended():
                self._end_execution(event)

    @property
    def kept_bytes(self) -> int:
        return self._room - self._left + (0 if self._tail is None else self._tail.size)

    @property
    def pictures(self) -> list[Picture]:
        return [each for each in self._shown if isinstance(each, Picture)]

    def outputs(self) -> list[Item]:
        """Returns the outputs for the client, in the order of the execution."""
        return [
            {"type": "image", "url": each.url} if isinstance(each, Picture) else {"type": "logs", "logs": each}
            for each in self._list_entries()
        ]

    def text(self, max_bytes: int) -> str:
        """Returns the printed text, head and tail if it is long, and the list of new files."""
        parts = [f"[image {each.mime}]\n" if isinstance(each, Picture) else each for each in self._list_entries()]
        return self._compose_text(parts, max_bytes)

    def result(self, max_bytes: int, pictures: PictureLimit | None) -> str | list[Item]:
        """Returns the call's output for the transcript.

        `pictures` counts pictures shown to the model; None: no vision.
        """
        seen: list[Item] = []
        parts = [
            self._show_picture(each, seen, pictures) if isinstance(each, Picture) else each
            for each in self._list_entries()
        ]
        text = self._compose_text(parts, max_bytes)
        return [{"type": "input_text", "text": text}, *seen] if seen else text

    def _show_picture(self, picture: Picture, seen: list[Item], pictures: PictureLimit | None) -> str:
        """Returns the note for a picture; adds it to `seen` if the model may see it."""
        said = f"[image {picture.mime}]\n"
        if pictures is None or not picture.is_model_viewable:
            return said
        if len(seen) >= MAX_EXECUTION_PICTURES:
            return f"[image not shown to you: only {MAX_EXECUTION_PICTURES} of one execution are]\n"
        refusal = pictures.refusal(picture)
        if refusal is None:
            seen.append({"type": "input_image", "image_url": picture.url, "detail": "auto"})
        return refusal or said

    def _compose_text(self, parts: list[str], max_bytes: int) -> str:
        text = abridge_text("".join(parts), max_bytes)
        if self.files:
            listed = ", ".join(f"{each.path} ({each.size_bytes} bytes)" for each in list(self.files.values())[:50])
            text = f"{_end_line(text)}Files: {listed}\n"
        return text or "(no output)"

    def _list_entries(self) -> list[str | Picture]:
        entries = [each if isinstance(each, Picture) else each.whole for each in self._shown]
        if self._tail is None:
            return entries
        *before, last = entries or [""]
        return [*before, last + self._tail.whole] if isinstance(last, str) else [*before, last, self._tail.whole]

    # -- displays

    def _add_display(self, event: Display) -> None:
        shown = _pick_display(event.data)
        if shown is None:
            return
        if event.update and event.id in self._ids:
            self._replace_entry(self._ids[event.id], shown)
        elif (event.id or isinstance(shown, Picture)) and self._add_entry(shown):
            if event.id:
                self._ids[event.id] = len(self._shown) - 1
        else:
            self._add_text(DROPPED_PICTURE if isinstance(shown, Picture) else shown)

    def _add_entry(self, shown: str | Picture) -> bool:
        """Adds an output of its own. Whether there was room."""
        entry = _to_entry(shown)
        if self._tail is not None or _entry_size(entry) > self._left:
            return False
        self._left -= _entry_size(entry)
        self._shown.append(entry)
        return True

    def _replace_entry(self, place: int, shown: str | Picture) -> None:
        left, entry = self._left + _entry_size(self._shown[place]), _to_entry(shown)
        if _entry_size(entry) > left:
            entry = _to_entry(
                DROPPED_PICTURE if isinstance(shown, Picture) else take_first(shown, json_size(shown), left)
            )
        self._shown[place] = entry
        self._left = max(left - _entry_size(entry), 0)

    def _add_text(self, text: str) -> None:
        """Adds text to the last output that is text, else as one more."""
        if not text:
            return
        if self._tail is not None:
            self._tail.add(text)
            return
        last = self._shown[-1] if self._shown else None
        if not isinstance(last, OutputText) or last.alone:
            last = OutputText()
            self._shown.append(last)
            self._left = max(self._left - ENTRY_BYTES, 0)
        size = json_size(text)
        head = take_first(text, size, self._left)
        last.add(head)
        self._left = max(self._left - size, 0)
        if len(head) < len(text):
            self._tail = OutputTail(self._tail_bytes)
            self._tail.add(text[len(head) :])

    def _clear_outputs(self) -> None:
        self._clear_next = False
        self._shown.clear()
        self._ids.clear()
        self._tail, self._left = None, self._room

    def _end_execution(self, ended: Ended) -> None:
        self.outcome = ended.outcome
        self.seconds = ended.usage.wall_seconds
        said = _end_note(ended)
        last = self._shown[-1] if self._shown else None
        if said:
            begins_line = self._tail is None and (not isinstance(last, OutputText) or last.ends_line)
            self._add_text(f"{said}\n" if begins_line else f"\n{said}\n")


def event_text(event: AnyEvent) -> tuple[str, str] | None:
    """Returns the text that an event adds, and its stream (stdout, stderr or result); None if it adds none."""
    match event:
        case Output():
            return event.text, event.stream
        case Display(update=False):
            shown = _pick_display(event.data)
            return (shown, "result") if isinstance(shown, str) else None
        case Raised():
            return _end_line(strip_colours(event.traceback) or f"{event.name}: {event.value}"), "stderr"
        case Truncated():
            return _dropped_note(event), "stderr"
        case Ended():
            said = _end_note(event)
            return (f"{said}\n", "stderr") if said else None
    return None


def _dropped_note(event: Truncated) -> str:
    return f"[{event.dropped_bytes} bytes of {event.stream} dropped: over the limit of one execution]\n"


def _pick_display(bundle: dict[str, Any]) -> str | Picture | None:
    for mime in IMAGE_MIMES:
        value = bundle.get(mime)
        if isinstance(value, bytes):
            return Picture(mime=mime, content=value)
        if isinstance(value, str):
            return Picture(mime=mime, content=value.encode("utf-8", "replace"))
    text = bundle.get("text/plain") or bundle.get("text/markdown") or bundle.get("text/html")
    return _end_line(str(text)) if text else None


def _end_note(ended: Ended) -> str | None:
    return {
        "timed_out": f"Execution timed out after {ended.usage.wall_seconds:.0f} s",
        "out_of_memory": "Kernel restarted: out of memory; variables are lost",
        "interrupted": "Execution was interrupted",
        "died": f"Kernel restarted: {ended.reason or 'it died'}; variables are lost",
    }.get(ended.outcome)


def _end_line(text: str) -> str:
    return text if not text or text.endswith("\n") else text + "\n"


def strip_colours(text: str) -> str:
    return _ANSI.sub("", text)


def _to_entry(shown: str | Picture) -> OutputText | Picture:
    return shown if isinstance(shown, Picture) else OutputText(shown, alone=True)


def _entry_size(entry: OutputText | Picture) -> int:
    return ENTRY_BYTES + (entry.url_bytes if isinstance(entry, Picture) else entry.size)
