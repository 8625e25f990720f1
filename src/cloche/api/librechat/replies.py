"""Replies and errors in the shapes of LibreChat's code API."""

from __future__ import annotations

import mimetypes
import posixpath
import re
import secrets
import string
from collections.abc import Iterable
from typing import Any

from cloche import errors
from cloche.api.dialect import Json, format_timestamp

CODE_ID_LENGTH = 21
RETRY_SECONDS = 5
_ID_LETTERS = string.ascii_letters + string.digits + "_-"


class LibreChatRefusal(errors.ClocheError):
    """An error reply. `error` is a word or a sentence that LibreChat's clients look for."""

    code = "refused"

    def __init__(
        self, status: int, error: str, message: str = "", headers: dict[str, str] | None = None, **fields: Any
    ):
        super().__init__(message or error)
        self.status = status
        self.body: Json = {"error": error, **({"message": message} if message else {}), **fields}
        self.headers = headers or {}


def too_many_programs(why: str) -> LibreChatRefusal:
    """503, for a request that can succeed soon."""
    headers = {"retry-after": str(RETRY_SECONDS)}
    return LibreChatRefusal(
        503, "too_many_programs", f"{why}; try again later", headers, retry_after_seconds=RETRY_SECONDS
    )


def new_code_id() -> str:
    """An id of a session, a file or an execution: LibreChat takes no others than 21 URL-safe characters."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(CODE_ID_LENGTH))


def is_code_id(id: object) -> bool:
    return isinstance(id, str) and len(id) == CODE_ID_LENGTH and all(letter in _ID_LETTERS for letter in id)


def iso_timestamp(seconds: float) -> str:
    """ISO 8601 to the millisecond, as JavaScript writes it."""
    return format_timestamp(seconds, "milliseconds")


# Names of files. A name is kept exactly as it came, or refused: clients look up the same name again.

MAX_NAME_CHARACTERS = 256
MAX_SEGMENTS = 10
MAX_SEGMENT_BYTES = 255  # of Linux
RESERVED_NAMES = frozenset({"_ptc_history.json"})  # clients know that LibreChat's own server takes it for itself
BYTES_TYPE = "application/octet-stream"

_CONTENT_TYPE = re.compile(r"[A-Za-z0-9!#$&^_.+-]{1,64}/[A-Za-z0-9!#$&^_.+-]{1,96}(; ?charset=[A-Za-z0-9_-]{1,32})?")
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # control characters, and halves of surrogates
_SUFFIX = re.compile(r"\.[A-Za-z0-9]{1,16}")


def check_name(name: str) -> str:
    """Returns the same name, a path below /mnt/data. Raises InvalidPath with the reason."""
    problem = _name_problem(name)
    if problem is not None:
        raise errors.InvalidPath(f"a file cannot be called {quote_ascii_name(name)}: {problem}")
    return name


def is_valid_name(name: str) -> bool:
    """Whether `check_name` takes it."""
    return _name_problem(name) is None


def quote_ascii_name(name: str) -> str:
    """A name as an error message repeats it: ASCII, and cut short."""
    return ascii(name if len(name) <= 100 else name[:100] + "...")


def content_type_of(name: str, given: str = "") -> str:
    """The client's content type if it is specific; otherwise the one that the name implies."""
    given = given.strip()
    if _CONTENT_TYPE.fullmatch(given) and given.lower() != BYTES_TYPE:
        return given
    return mimetypes.guess_type(posixpath.basename(name))[0] or BYTES_TYPE


def safe_suffix(name: str) -> str:
    """`.csv`, or empty if the name has no suffix that is safe in a URL."""
    ending = posixpath.splitext(name)[1]
    return ending if _SUFFIX.fullmatch(ending) else ""


def _name_problem(name: str) -> str | None:
    segments = name.split("/")
    if not name:
        return "it is empty"
    if len(name) > MAX_NAME_CHARACTERS:
        return f"it has {len(name)} characters, and {MAX_NAME_CHARACTERS} are possible"
    if _CONTROL_CHARACTERS.search(name):
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
    return "this name is reserved" if name in RESERVED_NAMES else None


# Notes for the model about a program's run, appended to the program's stderr.

NOTE_PREFIX = "[sandbox] "
MAX_NOTES = 50
MAX_NOTE_CHARACTERS = 1000
_QUOTED_CHARACTERS = 200


class ProgramNotes:
    """The notes of one execution. Notes over a limit are counted."""

    def __init__(self, notes: Iterable[str] = ()):
        self._notes: list[str] = []
        self._more = 0
        for note in notes:
            self.add(note)

    def add(self, note: str) -> None:
        """Adds one line. Names in it come from a client or a program."""
        line = " ".join(note.split())[:MAX_NOTE_CHARACTERS]
        if len(self._notes) < MAX_NOTES:
            self._notes.append(line)
        else:
            self._more += 1

    def after(self, stderr: str) -> str:
        """Returns `stderr` with the notes below it."""
        lines = [*self._notes, *([f"and {self._more} more notes like these"] if self._more else [])]
        if not lines:
            return stderr
        gap = "\n" if stderr and not stderr.endswith("\n") else ""
        return stderr + gap + "".join(f"{NOTE_PREFIX}{line}\n" for line in lines)


def quote_name(name: str) -> str:
    """A file's name as a note quotes it: always on one line."""
    return repr(name if len(name) <= _QUOTED_CHARACTERS else name[:_QUOTED_CHARACTERS] + "...")
