"""What an execution showed: to the client as outputs of the code call, to the model as text and pictures."""

from __future__ import annotations

import base64
import io
import re
from collections import deque
from typing import Any

import msgspec

from cloche.events import AnyEvent, Cleared, Display, Ended, Output, Raised, Truncated, Wrote
from cloche.gateway.items import Item
from cloche.model import KIB, MIB, FileInfo, Struct

# Pictures that code has shown, and which of them a model may see.
#
# Models' servers refuse a request with a picture that is broken or too large, and a conversation has it for ever:
# what
# they would refuse is told in words instead.

IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp", "image/svg+xml")
MAX_OF_EXECUTION = 10
MAX_OF_TURN = 50
PICTURE_MAX_BYTES = 5 * MIB  # of one
MAX_BYTES_OF_TURN = 20 * MIB

_BEGINNINGS = {  # of what models can see
    "image/png": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "image/jpeg": re.compile(rb"\xff\xd8\xff"),
    "image/gif": re.compile(rb"GIF8[79]a"),
    "image/webp": re.compile(rb"RIFF.{4}WEBP", re.DOTALL),
}


class Picture(Struct):
    mime: str
    content: bytes

    @property
    def extension(self) -> str:
        return {"image/jpeg": "jpg", "image/svg+xml": "svg"}.get(self.mime, self.mime.partition("/")[2])

    @property
    def url(self) -> str:
        return f"data:{self.mime};base64,{base64.b64encode(self.content).decode()}"

    @property
    def url_bytes(self) -> int:
        return len(self.content) * 4 // 3 + len(self.mime) + 16

    @property
    def for_models(self) -> bool:
        """Whether it is of a kind that models can see."""
        return self.mime in _BEGINNINGS

    @property
    def is_what_it_says(self) -> bool:
        return self.for_models and _BEGINNINGS[self.mime].match(self.content) is not None


class SeenPictures:
    """Those that a model has been shown in one turn."""

    def __init__(self) -> None:
        self._left = MAX_OF_TURN
        self._bytes_left = MAX_BYTES_OF_TURN

    def refusal(self, picture: Picture) -> str | None:
        """Why the model is not shown it; None if it is, and then it counts."""
        size = len(picture.content)
        if not picture.is_what_it_says:
            return f"[image that cannot be shown to you: it is no {picture.mime}]\n"
        if size > PICTURE_MAX_BYTES:
            return f"[image too large to be shown to you: {size / 1e6:.1f} MB]\n"
        if self._left <= 0 or size > self._bytes_left:
            return "[image not shown to you: you have been shown as many as one answer can have]\n"
        self._left -= 1
        self._bytes_left -= size
        return None


# Text that a program prints, kept within limits: all of it, or its beginning and its end.


class Log:
    """Text that is printed in many pieces: it takes no more room than it has letters, however small they are."""

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
        self.size += size_of(text)

    @property
    def ends_line(self) -> bool:
        return self._last in ("", "\n")

    @property
    def whole(self) -> str:
        if self._whole is None:
            self._whole = self._text.getvalue()
        return self._whole


class Tail:
    """The end of a text of any length."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._pieces: deque[tuple[str, int]] = deque()
        self._held = 0
        self._came = 0

    def add(self, text: str) -> None:
        size = size_of(text)
        self._came += size
        text = last_of(text, size, self._max_bytes)
        self._pieces.append((text, size_of(text)))
        self._held += self._pieces[-1][1]
        while self._held - self._pieces[0][1] >= self._max_bytes:
            self._held -= self._pieces.popleft()[1]

    @property
    def whole(self) -> str:
        """What was kept, after a word about what was not."""
        text = last_of("".join(text for text, _ in self._pieces), self._held, self._max_bytes)
        note = f"\n[{self.dropped_bytes} bytes dropped: over the limit of one response's outputs]\n"
        return note + text if self.dropped_bytes else text

    @property
    def size(self) -> int:
        return min(self._held, self._max_bytes)

    @property
    def dropped_bytes(self) -> int:
        return self._came - self.size


def size_of(text: str) -> int:
    """How many bytes it takes where it is sent and stored: as JSON, which is up to six for one letter."""
    try:
        return len(msgspec.json.encode(text)) - 2
    except UnicodeEncodeError:  # halves of surrogates
        return 6 * len(text)


def first_of(text: str, size: int, max_bytes: int) -> str:
    """The beginning of a text of that size, of about so many bytes."""
    return text if size <= max_bytes else text[: max(max_bytes * len(text) // size, 0)]


def last_of(text: str, size: int, max_bytes: int) -> str:
    return text if size <= max_bytes else text[len(text) - max(max_bytes * len(text) // size, 0) :]


def abridged(text: str, max_bytes: int) -> str:
    """Head and tail of a text that is longer than that."""
    sample = text if len(text) <= 2 * max_bytes else text[:max_bytes] + text[-max_bytes:]
    size = len(sample.encode("utf-8", "replace"))
    if size <= max_bytes:
        return text
    kept = max(max_bytes * len(sample) // size, 2)
    head, tail = text[: kept // 2], text[len(text) - kept // 2 :]
    return f"{head}\n[truncated {len(text) - len(head) - len(tail)} characters]\n{tail}"


OUTPUT_MAX_BYTES = 32 * MIB
MAX_TAIL_BYTES = 64 * KIB
ENTRY_BYTES = 64  # that one output takes, whatever is in it
DROPPED_PICTURE = "[image dropped: over the limit of one response's outputs]\n"

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


class Sight:
    """Feed it the events of one execution, in order. It keeps so many bytes: of text, the beginning and the end."""

    def __init__(self, max_bytes: int = OUTPUT_MAX_BYTES) -> None:
        self.outcome = "died"
        self.files: dict[str, FileInfo] = {}
        self.seconds = 0.0
        self._tail_bytes = min(max_bytes // 2, MAX_TAIL_BYTES)
        self._room = self._left = max_bytes - self._tail_bytes
        self._shown: list[Log | Picture] = []
        self._tail: Tail | None = None  # of what had no room
        self._ids: dict[str, int] = {}
        self._clear_next = False

    def feed(self, event: AnyEvent) -> None:
        if self._clear_next and isinstance(event, (Output, Display)):
            self._clear()
        match event:
            case Output():
                self._log(event.text)
            case Display():
                self._display(event)
            case Raised():
                self._log(_line(without_colours(event.traceback) or f"{event.name}: {event.value}"))
            case Truncated():
                self._log(_dropped(event))
            case Wrote():
                self.files[event.file.path] = event.file
            case Cleared(wait=True):
                self._clear_next = True
            case Cleared():
                self._clear()
            case Ended():
                self._end(event)

    @property
    def kept_bytes(self) -> int:
        return self._room - self._left + (0 if self._tail is None else self._tail.size)

    @property
    def pictures(self) -> list[Picture]:
        return [each for each in self._shown if isinstance(each, Picture)]

    def outputs(self) -> list[Item]:
        """For the client, in the order of the execution."""
        return [
            {"type": "image", "url": each.url} if isinstance(each, Picture) else {"type": "logs", "logs": each}
            for each in self._entries()
        ]

    def text(self, max_bytes: int) -> str:
        """What was printed, head and tail if it is long, and which files are new."""
        parts = [f"[image {each.mime}]\n" if isinstance(each, Picture) else each for each in self._entries()]
        return self._text(parts, max_bytes)

    def result(self, max_bytes: int, pictures: SeenPictures | None) -> str | list[Item]:
        """The output of the call, as the transcript has it. `pictures` are what the model saw; None: it is blind."""
        seen: list[Item] = []
        parts = [self._picture(each, seen, pictures) if isinstance(each, Picture) else each for each in self._entries()]
        text = self._text(parts, max_bytes)
        return [{"type": "input_text", "text": text}, *seen] if seen else text

    def _picture(self, picture: Picture, seen: list[Item], pictures: SeenPictures | None) -> str:
        """What is said of a picture; it is added to those that are seen if it may be."""
        said = f"[image {picture.mime}]\n"
        if pictures is None or not picture.for_models:
            return said
        if len(seen) >= MAX_OF_EXECUTION:
            return f"[image not shown to you: only {MAX_OF_EXECUTION} of one execution are]\n"
        refusal = pictures.refusal(picture)
        if refusal is None:
            seen.append({"type": "input_image", "image_url": picture.url, "detail": "auto"})
        return refusal or said

    def _text(self, parts: list[str], max_bytes: int) -> str:
        text = abridged("".join(parts), max_bytes)
        if self.files:
            listed = ", ".join(f"{each.path} ({each.size_bytes} bytes)" for each in list(self.files.values())[:50])
            text = f"{_line(text)}Files: {listed}\n"
        return text or "(no output)"

    def _entries(self) -> list[str | Picture]:
        entries = [each if isinstance(each, Picture) else each.whole for each in self._shown]
        if self._tail is None:
            return entries
        *before, last = entries or [""]
        return [*before, last + self._tail.whole] if isinstance(last, str) else [*before, last, self._tail.whole]

    # -- what is shown

    def _display(self, event: Display) -> None:
        shown = _shown(event.data)
        if shown is None:
            return
        if event.update and event.id in self._ids:
            self._replace(self._ids[event.id], shown)
        elif (event.id or isinstance(shown, Picture)) and self._show(shown):
            if event.id:
                self._ids[event.id] = len(self._shown) - 1
        else:
            self._log(DROPPED_PICTURE if isinstance(shown, Picture) else shown)

    def _show(self, shown: str | Picture) -> bool:
        """Adds an output of its own. Whether there was room."""
        entry = _entry(shown)
        if self._tail is not None or _size(entry) > self._left:
            return False
        self._left -= _size(entry)
        self._shown.append(entry)
        return True

    def _replace(self, place: int, shown: str | Picture) -> None:
        left, entry = self._left + _size(self._shown[place]), _entry(shown)
        if _size(entry) > left:
            entry = _entry(DROPPED_PICTURE if isinstance(shown, Picture) else first_of(shown, size_of(shown), left))
        self._shown[place] = entry
        self._left = max(left - _size(entry), 0)

    def _log(self, text: str) -> None:
        """Adds text to the last output that is text, else as one more."""
        if not text:
            return
        if self._tail is not None:
            self._tail.add(text)
            return
        last = self._shown[-1] if self._shown else None
        if not isinstance(last, Log) or last.alone:
            last = Log()
            self._shown.append(last)
            self._left = max(self._left - ENTRY_BYTES, 0)
        size = size_of(text)
        head = first_of(text, size, self._left)
        last.add(head)
        self._left = max(self._left - size, 0)
        if len(head) < len(text):
            self._tail = Tail(self._tail_bytes)
            self._tail.add(text[len(head) :])

    def _clear(self) -> None:
        self._clear_next = False
        self._shown.clear()
        self._ids.clear()
        self._tail, self._left = None, self._room

    def _end(self, ended: Ended) -> None:
        self.outcome = ended.outcome
        self.seconds = ended.usage.wall_seconds
        said = _last_words(ended)
        last = self._shown[-1] if self._shown else None
        if said:
            begins_line = self._tail is None and (not isinstance(last, Log) or last.ends_line)
            self._log(f"{said}\n" if begins_line else f"\n{said}\n")


def said_by(event: AnyEvent) -> tuple[str, str] | None:
    """The text that an event adds, and its stream (stdout, stderr or result); None if it adds none. For who watches."""
    match event:
        case Output():
            return event.text, event.stream
        case Display(update=False):
            shown = _shown(event.data)
            return (shown, "result") if isinstance(shown, str) else None
        case Raised():
            return _line(without_colours(event.traceback) or f"{event.name}: {event.value}"), "stderr"
        case Truncated():
            return _dropped(event), "stderr"
        case Ended():
            said = _last_words(event)
            return (f"{said}\n", "stderr") if said else None
    return None


def _dropped(event: Truncated) -> str:
    return f"[{event.dropped_bytes} bytes of {event.stream} dropped: over the limit of one execution]\n"


def _shown(bundle: dict[str, Any]) -> str | Picture | None:
    for mime in IMAGES:
        value = bundle.get(mime)
        if isinstance(value, bytes):
            return Picture(mime=mime, content=value)
        if isinstance(value, str):
            return Picture(mime=mime, content=value.encode("utf-8", "replace"))
    text = bundle.get("text/plain") or bundle.get("text/markdown") or bundle.get("text/html")
    return _line(str(text)) if text else None


def _last_words(ended: Ended) -> str | None:
    return {
        "timed_out": f"Execution timed out after {ended.usage.wall_seconds:.0f} s",
        "out_of_memory": "Kernel restarted: out of memory; variables are lost",
        "interrupted": "Execution was interrupted",
        "died": f"Kernel restarted: {ended.reason or 'it died'}; variables are lost",
    }.get(ended.outcome)


def _line(text: str) -> str:
    return text if not text or text.endswith("\n") else text + "\n"


def without_colours(text: str) -> str:
    return _ANSI.sub("", text)


def _entry(shown: str | Picture) -> Log | Picture:
    return shown if isinstance(shown, Picture) else Log(shown, alone=True)


def _size(entry: Log | Picture) -> int:
    return ENTRY_BYTES + (entry.url_bytes if isinstance(entry, Picture) else entry.size)
