"""The table of MIME types of pictures and documents: the only list of them on the host.

A new one is a row here; `tools/generate_tables.py` then writes the copies of the two kernels that show values, and a
test compares them.
"""

from __future__ import annotations

from typing import NamedTuple


class MimeType(NamedTuple):
    """`binary`: its value in a bundle is `bytes`. `signature`: how its files begin, where models can see it."""

    name: str
    extension: str  # of a file, without a dot
    binary: bool = True
    signature: bytes | None = None  # a pattern of `re`

    @property
    def is_image(self) -> bool:
        return self.name.startswith("image/")


MIME_TYPES = (
    MimeType("image/png", "png", signature=rb"\x89PNG\r\n\x1a\n"),
    MimeType("image/jpeg", "jpg", signature=rb"\xff\xd8\xff"),
    MimeType("image/gif", "gif", signature=rb"GIF8[79]a"),
    MimeType("image/webp", "webp", signature=rb"(?s:RIFF.{4}WEBP)"),
    MimeType("image/svg+xml", "svg", binary=False),
    MimeType("application/pdf", "pdf"),
)
BINARY_MIMES = frozenset(each.name for each in MIME_TYPES if each.binary)
EXTENSIONS = {each.name: each.extension for each in MIME_TYPES}
IMAGE_MIMES = tuple(each.name for each in MIME_TYPES if each.is_image)
SIGNATURES = {each.name: each.signature for each in MIME_TYPES if each.signature is not None}
"""Of images that models can see."""
