"""JSON of upstreams that is nearly right: characters that were cut in half become U+FFFD, and the rest is kept."""

from __future__ import annotations

import re
from typing import Any

import msgspec

_ESCAPES = re.compile(
    rb"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)


def decoded(content: bytes) -> Any:
    """Raises msgspec.DecodeError, UnicodeDecodeError or RecursionError for what is no JSON at all."""
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return msgspec.json.decode(_mended(content))


def _mended(content: bytes) -> bytes:
    """The same with whole characters only: a model's server may cut its text between two bytes, or two halves."""
    text = content.decode("utf-8", "replace").encode()
    return _ESCAPES.sub(lambda escape: rb"\ufffd" if escape[1] else escape[0], text)
