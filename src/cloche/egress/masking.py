"""Secrets' values in what a server answers, covered with asterisks of the same length.

A server that echoes a request (many do, when they report an error) would hand a program the value that the proxy added
for it. It is recognised as it is, in base64 at any offset, percent-encoded, and escaped as in JSON. That is a net under
those who may hold the secret anyway, and not a wall: a server can always say it in another way.
"""

from __future__ import annotations

import base64
import binascii
import html
import json
import re
import urllib.parse
from collections.abc import Iterable, Iterator

MIN_PART = 4  # of a value: something shorter is in every text
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*[ \t]+(?P<rest>\S.*)")


class Mask:
    """What is looked for, for some secrets' values."""

    def __init__(self, values: Iterable[str]):
        forms = {form for value in values for part in _parts(value) for form in _forms(part)}
        self.forms = sorted(forms)

    def text(self, text: str) -> str:
        """A whole text, such as a header, with what is found in it covered."""
        return self.cover(text.encode("latin-1")).decode("latin-1")

    def cover(self, content: bytes) -> bytes:
        return bytes(self.covered(content, bytearray(content)))

    def covered(self, content: bytes, copy: bytearray) -> bytearray:
        """`copy`, a copy of `content`, with what is found there covered. Occurrences may overlap: all are covered."""
        for form in self.forms:
            at = content.find(form)
            while at >= 0:
                copy[at : at + len(form)] = b"*" * len(form)
                at = content.find(form, at + 1)
        return copy

    def begun(self, content: bytes) -> int:
        """How many bytes at the end of `content` could be the beginning of something that is looked for."""
        return max((_begun(form, content) for form in self.forms), default=0)


class MaskedStream:
    """A body, part by part. What could be the beginning of a value waits for the next part, and nothing else does."""

    def __init__(self, mask: Mask):
        self._mask = mask
        self._held = b""
        self._held_covered = bytearray()

    def feed(self, part: bytes) -> bytes:
        """What can be passed on by now."""
        content = self._held + part
        covered = self._mask.covered(content, self._held_covered + part)
        ready = len(content) - self._mask.begun(content)
        self._held, self._held_covered = content[ready:], covered[ready:]
        return bytes(covered[:ready])

    def end(self) -> bytes:
        """What is left."""
        return bytes(self._held_covered)


def _begun(form: bytes, content: bytes) -> int:
    at = content.find(form[:1], max(len(content) - len(form) + 1, 0))
    while at >= 0:
        if form.startswith(content[at:]):
            return len(content) - at
        at = content.find(form[:1], at + 1)
    return 0


def _parts(value: str) -> Iterator[str]:
    """The value, and what of it is secret by itself: `token` of `Bearer token`, the password of `Basic ...`."""
    yield value
    match = _SCHEME.fullmatch(value)
    rest = match["rest"] if match else value
    if len(rest) >= MIN_PART:
        yield rest
    decoded = basic_credentials(value)
    if decoded is not None:
        yield from (part for part in (decoded, decoded.partition(":")[2]) if len(part) >= MIN_PART)


def basic_credentials(value: str) -> str | None:
    """`user:password` of the value of a header for Basic authentication; None where it is none."""
    scheme, _, encoded = value.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        return base64.b64decode(encoded.strip(), validate=True).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        return None


def _forms(part: str) -> Iterator[bytes]:
    """All are ASCII, as values are; what is decoded of one may be not, and is UTF-8 then."""
    raw = part.encode()
    yield raw
    yield html.escape(part).encode()
    escaped = json.dumps(part)[1:-1]
    yield from (escaped.encode(), escaped.replace("/", "\\/").encode())
    yield re.sub("[<>&]", lambda match: f"\\u{ord(match[0]):04x}", escaped).encode()  # as Go's encoder has it
    for quote in (urllib.parse.quote, urllib.parse.quote_plus):
        for safe in ("", "/"):
            quoted = quote(part, safe=safe)
            yield quoted.encode()
            yield re.sub("%[0-9A-F]{2}", lambda match: match[0].lower(), quoted).encode()
    for offset in range(3):
        yield from _base64_forms(raw, offset)


def _base64_forms(raw: bytes, offset: int) -> Iterator[bytes]:
    """`raw` in base64 after `offset` bytes of something else: the characters that depend on nothing but `raw`.

    And the same where nothing comes after it, as for the password in Basic authentication.
    """
    encoded = base64.b64encode(bytes(offset) + raw)
    first = (offset * 8 + 5) // 6
    certain, to_the_end = encoded[first : (offset + len(raw)) * 8 // 6], encoded[first:].rstrip(b"=")
    for form in (certain, to_the_end):
        if len(form) >= MIN_PART:
            yield form
            yield form.replace(b"+", b"-").replace(b"/", b"_")
