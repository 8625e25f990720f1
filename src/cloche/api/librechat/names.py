"""What files can be called. A name is kept exactly as it came, or refused: clients look for the same one again."""

from __future__ import annotations

import mimetypes
import posixpath
import re

from cloche import errors

MAX_CHARACTERS = 256
MAX_SEGMENTS = 10
MAX_SEGMENT_BYTES = 255  # of Linux
RESERVED = frozenset({"_ptc_history.json"})  # clients know that LibreChat's own server takes it for itself
BYTES_TYPE = "application/octet-stream"

_TYPE = re.compile(r"[A-Za-z0-9!#$&^_.+-]{1,64}/[A-Za-z0-9!#$&^_.+-]{1,96}(; ?charset=[A-Za-z0-9_-]{1,32})?")
_UNFIT = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # control characters, and halves of surrogates
_ENDING = re.compile(r"\.[A-Za-z0-9]{1,16}")


def check_name(name: str) -> str:
    """The same name: a path below /mnt/data. Raises InvalidPath, and says why."""
    problem = _problem(name)
    if problem is not None:
        raise errors.InvalidPath(f"a file cannot be called {shown(name)}: {problem}")
    return name


def is_name(name: str) -> bool:
    """Whether `check_name` takes it."""
    return _problem(name) is None


def shown(name: str) -> str:
    """A name as an error may repeat it."""
    return ascii(name if len(name) <= 100 else name[:100] + "...")


def content_type_of(name: str, given: str = "") -> str:
    """What a client said, if that is something, or else what the name says."""
    given = given.strip()
    if _TYPE.fullmatch(given) and given.lower() != BYTES_TYPE:
        return given
    return mimetypes.guess_type(posixpath.basename(name))[0] or BYTES_TYPE


def ending_of(name: str) -> str:
    """`.csv`, or nothing where there is none that can be in an address."""
    ending = posixpath.splitext(name)[1]
    return ending if _ENDING.fullmatch(ending) else ""


def _problem(name: str) -> str | None:
    segments = name.split("/")
    if not name:
        return "it is empty"
    if len(name) > MAX_CHARACTERS:
        return f"it has {len(name)} characters, and {MAX_CHARACTERS} are possible"
    if _UNFIT.search(name):
        return "it has control characters, or is not UTF-8"
    if "\\" in name:
        return "it has a backslash; directories are separated by /"
    if name.startswith("/"):
        return "it must be relative"
    if any(segment in ("", ".", "..") for segment in segments):
        return "it has an empty part, or one that is . or .."
    if len(segments) > MAX_SEGMENTS:
        return f"it has {len(segments)} parts, and {MAX_SEGMENTS} are possible"
    if any(len(segment.encode()) > MAX_SEGMENT_BYTES for segment in segments):
        return f"a part of it has more than {MAX_SEGMENT_BYTES} bytes"
    return "this name is reserved" if name in RESERVED else None
