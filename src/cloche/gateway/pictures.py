"""Pictures that code has shown, and which of them a model may see.

Models' servers refuse a request with a picture that is broken or too large, and a conversation has it for ever: what
they would refuse is told in words instead.
"""

from __future__ import annotations

import base64
import re

from cloche.model import MIB, Struct

IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp", "image/svg+xml")
MAX_OF_EXECUTION = 10
MAX_OF_TURN = 50
MAX_BYTES = 5 * MIB  # of one
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
        if size > MAX_BYTES:
            return f"[image too large to be shown to you: {size / 1e6:.1f} MB]\n"
        if self._left <= 0 or size > self._bytes_left:
            return "[image not shown to you: you have been shown as many as one answer can have]\n"
        self._left -= 1
        self._bytes_left -= size
        return None
