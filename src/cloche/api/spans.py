"""Parts of files: the `Range` header, and how a file is named to whoever saves it."""

from __future__ import annotations

import re
from email.utils import formatdate
from typing import NamedTuple
from urllib.parse import quote

_ONE_RANGE = re.compile(r"bytes\s*=\s*(\d{0,18})\s*-\s*(\d{0,18})")
_LAST_SECONDS = 253402300799  # of the year 9999
_TOKEN = re.compile(r"[A-Za-z0-9!#$&+.^_`|~-]+")


class Span(NamedTuple):
    """From `start` up to `end`, of `size` bytes."""

    start: int
    end: int
    size: int

    @property
    def content_range(self) -> str:
        return f"bytes {self.start}-{self.end - 1}/{self.size}"


class Unsatisfiable(Exception):
    """The range lies behind the end of the file."""


def asked_span(header: str | None, size: int) -> Span | None:
    """What a range asks for; None for none, several, or nonsense: then all is sent. Raises Unsatisfiable."""
    match = _ONE_RANGE.fullmatch(header.strip()) if header else None
    if match is None or not (match[1] or match[2]):
        return None
    if not match[1]:
        start, end = max(size - int(match[2]), 0), size
    else:
        start, end = int(match[1]), min(int(match[2]) + 1, size) if match[2] else size
        if match[2] and int(match[2]) < start:
            return None
    if start >= size or start >= end:
        raise Unsatisfiable
    return Span(start, end, size)


def last_modified(seconds: float) -> str:
    """For the header: a moment before 1970 or after the year 9999, which a file may have, is the nearest of those."""
    return formatdate(min(max(0, seconds), _LAST_SECONDS), usegmt=True)


def disposition(name: str) -> str:
    """`Content-Disposition` for a file that is shown where possible."""
    if _TOKEN.fullmatch(name):
        return f"inline; filename={name}"
    if name.isascii() and name.isprintable():
        escaped = name.replace("\\", "\\\\").replace('"', '\\"')
        return f'inline; filename="{escaped}"'
    return f"inline; filename*=utf-8''{quote(name, safe='')}"
