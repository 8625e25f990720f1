"""Names of files in a container: plain ones, as a model can type them."""

from __future__ import annotations

import posixpath
import unicodedata
from collections.abc import Container as Names

MAX_NAME_BYTES = 200
NAMELESS = "file"


def plain_name(name: str) -> str:
    """What a file is called in /mnt/data: never a path, never hidden, never longer than a file system takes."""
    last = name.replace("\\", "/").rpartition("/")[2]
    # Cc: control characters, NUL among them; Cf: what turns text around; Cs: halves of surrogates
    visible = "".join(each for each in last if unicodedata.category(each) not in ("Cc", "Cf", "Cs", "Zl", "Zp"))
    return _shortened(visible.strip().lstrip(".").strip() or NAMELESS)


def free_name(name: str, taken: Names[str]) -> str:
    """That name, or `name-2.ext`, `name-3.ext`, .. if it is taken."""
    stem, extension = posixpath.splitext(name)
    number = 1
    while name in taken:
        number += 1
        name = f"{stem}-{number}{extension}"
    return name


def _shortened(name: str) -> str:
    stem, extension = posixpath.splitext(name)
    extension = extension if len(extension.encode()) <= 20 else ""
    room = MAX_NAME_BYTES - len(extension.encode())
    stem = name[: len(name) - len(extension)]
    return stem.encode()[:room].decode(errors="ignore") + extension
