"""How much of a JSON text there is as objects: what is small as text can be large in memory."""

from __future__ import annotations

import re

_SIGNS = (b"[", b"{", b",")  # a value has one, at least
# Text without an end is text, too: else each quote in it would be tried as the beginning of another.
_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)


def count_values(content: bytes, most: int) -> int:
    """About how many values it has. Signs in texts count too, unless there seem to be more than `most`."""
    count = sum(map(content.count, _SIGNS))
    return count if count <= most else sum(map(_TEXT.sub(b"", content).count, _SIGNS))
