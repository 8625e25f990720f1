"""Answers in the shapes of LibreChat's code API, and what goes wrong in them."""

from __future__ import annotations

import mimetypes
import posixpath
import re
import secrets
import string
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.responses import Response

from cloche import errors

ID_LENGTH = 21
RETRY_SECONDS = 5
_ID_LETTERS = string.ascii_letters + string.digits + "_-"

Json = dict[str, Any]


class Refusal(errors.ClocheError):
    """An answer that is not 200, as LibreChat's clients know it: `error` is a word or a sentence they look for."""

    code = "refused"

    def __init__(
        self, status: int, error: str, message: str = "", headers: dict[str, str] | None = None, **fields: Any
    ):
        super().__init__(message or error)
        self.status = status
        self.body: Json = {"error": error, **({"message": message} if message else {}), **fields}
        self.headers = headers or {}


def too_many_programs(why: str) -> Refusal:
    """503, for what is possible soon."""
    headers = {"retry-after": str(RETRY_SECONDS)}
    return Refusal(503, "too_many_programs", f"{why}; try again later", headers, retry_after_seconds=RETRY_SECONDS)


def new_code_id() -> str:
    """An id of a session, a file or an execution: LibreChat takes no others than 21 URL-safe characters."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(ID_LENGTH))


def is_code_id(id: object) -> bool:
    return isinstance(id, str) and len(id) == ID_LENGTH and all(letter in _ID_LETTERS for letter in id)


def json_reply(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers=headers, media_type="application/json")


def timestamp(seconds: float) -> str:
    """ISO 8601 to the millisecond, as JavaScript writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


# What files can be called. A name is kept exactly as it came, or refused: clients look for the same one again.

NAME_MAX_CHARACTERS = 256
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
    if len(name) > NAME_MAX_CHARACTERS:
        return f"it has {len(name)} characters, and {NAME_MAX_CHARACTERS} are possible"
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


# What a model should know beside what its program wrote: lines of the program's stderr.

MARK = "[sandbox] "
MAX_NOTES = 50
NOTE_MAX_CHARACTERS = 1000
_SHOWN = 200


class Notes:
    """Of one execution. Those over a limit are counted."""

    def __init__(self, notes: Iterable[str] = ()):
        self._notes: list[str] = []
        self._more = 0
        for note in notes:
            self.add(note)

    def add(self, note: str) -> None:
        """One line. What it names was said by a client or a program."""
        line = " ".join(note.split())[:NOTE_MAX_CHARACTERS]
        if len(self._notes) < MAX_NOTES:
            self._notes.append(line)
        else:
            self._more += 1

    def after(self, stderr: str) -> str:
        """`stderr`, and these below it."""
        lines = [*self._notes, *([f"and {self._more} more notes like these"] if self._more else [])]
        if not lines:
            return stderr
        gap = "\n" if stderr and not stderr.endswith("\n") else ""
        return stderr + gap + "".join(f"{MARK}{line}\n" for line in lines)


def named(name: str) -> str:
    """A file's name as a note says it: whatever is in it, it stays on one line."""
    return repr(name if len(name) <= _SHOWN else name[:_SHOWN] + "...")
