"""Text that a program prints, kept within limits: all of it, or its beginning and its end."""

from __future__ import annotations

import io
from collections import deque

import msgspec


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
