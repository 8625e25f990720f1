"""What is asked of POST /exec, in the words of all generations of clients. Pure.

Only what cannot be understood at all is refused. Everything else that makes no sense becomes a note, which the model
reads in the program's stderr: an error would hide from it what it could do better.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from cloche import errors
from cloche.api.librechat.names import shown
from cloche.api.librechat.replies import Refusal, is_code_id
from cloche.event_json import count_values
from cloche.model import MIB, Struct

DATA = "/mnt/data/"
MAX_ARGS = 1000
MAX_REFS = 2000  # that are looked at; a program can have fewer, by [librechat] max_files
MAX_NOTES = 20
MAX_CODE_BYTES = 10_000_000
MAX_VALUES = 2_000_000  # of a body that is decoded whole
MAX_HALVES = 100_000  # of letters; a body with more is no JSON
MAX_NAME_CHARACTERS = 5000  # that are looked at: no name is as long
MAX_WORD_CHARACTERS = 200
REF_BYTES = 2000  # that a reference takes in memory, about
_MOST_MILLISECONDS = 1e15  # as good as for ever; a JSON number can be more than a float
_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
# A half of a letter without its other one. What is before and behind is looked at in steps of one length, so that it
# takes no time twice, whatever a body is made of.
_HALVES = re.compile(rb"%s(?!%s)|(?<!%s)%s" % (_HIGH, _LOW, _HIGH, _LOW))
_BACKSLASH, _STAND_IN = rb"\\", b"\0\0"  # NUL is in no JSON
_HINT = re.compile(r"[A-Za-z0-9._:-]{1,128}")

T = TypeVar("T")


class FileRef(Struct):
    """A file of the store that the program shall find below /mnt/data."""

    session: str
    id: str
    name: str  # where; empty: under the name that it has in the store
    space: dict[str, Any]  # whose it is, in the client's words: kind, resource_id, version


class Asked(Struct):
    """What to run. Keys, and ids of users and sessions, that clients put into bodies are not looked at."""

    code: str
    lang: str
    args: tuple[str, ...] = ()
    files: tuple[FileRef, ...] = ()
    hint: str | None = None  # of the session that it belongs to
    timeout_seconds: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """What it takes in memory, about: one letter may make all others take four bytes each."""
        return sum(map(sys.getsizeof, (self.code, *self.args))) + len(self.files) * REF_BYTES


class _Sent(msgspec.Struct):
    """What is looked at of a body. Of the rest nothing is made: small values take far more memory than they have bytes.

    For the same reason, each of these has a limit of its own.
    """

    lang: msgspec.Raw = msgspec.Raw(b"null")
    code: msgspec.Raw = msgspec.Raw(b"null")
    args: msgspec.Raw = msgspec.Raw(b"null")
    files: msgspec.Raw = msgspec.Raw(b"null")
    timeout: msgspec.Raw = msgspec.Raw(b"null")
    runtime_session_hint: msgspec.Raw = msgspec.Raw(b"null")


_MOST_BYTES = {
    "args": 4 * MIB,
    "files": 4 * MIB,
    "timeout": 1000,
    "runtime_session_hint": 1000,
}


def decode(body: bytes) -> Asked:
    """Raises InvalidRequest for what is no JSON object, or has no program in it, and Refusal (413)."""
    return _read(body, _asked)


def _asked(body: bytes) -> Asked:
    sent = msgspec.json.decode(body, type=_Sent)
    code, lang = _text("code", sent.code), _text("lang", sent.lang)
    given = {name: memoryview(getattr(sent, name)) for name in _MOST_BYTES}
    fields = {name: msgspec.json.decode(raw) for name, raw in given.items() if len(raw) <= _MOST_BYTES[name]}
    check_size(code)
    return decode_fields({"code": code, **fields}, lang, [_too_long(name) for name in given if name not in fields])


def _text(name: str, sent: msgspec.Raw) -> str:
    if bytes(memoryview(sent)[:1]) != b'"':
        raise errors.InvalidRequest(f"`{name}` must be there, and be a string")
    return msgspec.json.decode(sent, type=str)


def _too_long(name: str) -> str:
    return f"`{name}` was ignored: it has more than {_MOST_BYTES[name]} bytes"


def check_size(code: str) -> None:
    """Raises Refusal (413)."""
    size = len(code.encode("utf-8", "replace"))
    if size > MAX_CODE_BYTES:
        raise Refusal(413, f"Request too large: code has {size} bytes, {MAX_CODE_BYTES} are possible")


def decode_object(body: bytes) -> dict[str, Any]:
    """Raises InvalidRequest, and Refusal (413) for what would be much larger in memory than it is."""
    if count_values(body, MAX_VALUES) > MAX_VALUES:
        raise Refusal(413, f"Request too large: it has more than {MAX_VALUES} values; put what is long into a text")
    given = _read(body, msgspec.json.decode)
    if not isinstance(given, dict):
        raise errors.InvalidRequest("the body must be a JSON object")
    return given


def _read(body: bytes, read: Callable[[bytes], T]) -> T:
    """Raises InvalidRequest. What a decoder says could quote the body, so nobody is told that."""
    try:
        try:
            return read(body)
        except msgspec.DecodeError:
            if (whole := whole_letters(body)) == body:
                raise
            return read(whole)
    except msgspec.ValidationError:
        raise errors.InvalidRequest(
            "the body must be a JSON object, with no numbers that are beyond all bounds"
        ) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise errors.InvalidRequest("the body is no JSON") from None


def whole_letters(body: bytes) -> bytes:
    """With U+FFFD for each half of a letter, which JSON can have: of a text that was cut within an emoji, say."""
    if (b"\\ud" not in body and b"\\uD" not in body) or b"\0" in body:
        return body
    single = body.replace(_BACKSLASH, _STAND_IN)  # from here on a backslash begins something
    return _HALVES.sub(rb"\\ufffd", single, MAX_HALVES).replace(_STAND_IN, _BACKSLASH)


def decode_fields(given: Mapping[str, Any], lang: str, noted: Sequence[str] = ()) -> Asked:
    """The program in an object that has one. `noted` is what its author should know already."""
    notes = list(noted)
    return Asked(
        code=given["code"],
        lang=lang[:MAX_WORD_CHARACTERS],
        args=_args(given.get("args"), notes),
        files=_files(given.get("files"), notes),
        hint=_hint(given.get("runtime_session_hint"), notes),
        timeout_seconds=_seconds(given.get("timeout"), notes),
        notes=tuple(notes[:MAX_NOTES]),
    )


def _args(given: object, notes: list[str]) -> tuple[str, ...]:
    if given is None:
        return ()
    if not isinstance(given, list):
        notes.append("`args` should be a list: it was taken for one with a single value in it")
    words = given if isinstance(given, list) else [given]
    plain = [str(word) for word in words if isinstance(word, (str, int, float)) and "\0" not in str(word)][:MAX_ARGS]
    if len(plain) != len(words):
        notes.append(f"{len(words) - len(plain)} of `args` were left out: they must be strings, {MAX_ARGS} at most")
    return tuple(plain)


def _files(given: object, notes: list[str]) -> tuple[FileRef, ...]:
    if given is None:
        return ()
    if not isinstance(given, Sequence) or isinstance(given, str):
        notes.append("`files` was ignored: it must be a list")
        return ()
    if len(given) > MAX_REFS:
        notes.append(f"only the first {MAX_REFS} of `files` were looked at")
    refs = (_ref(index, each, notes) for index, each in enumerate(given[:MAX_REFS]))
    return tuple(ref for ref in refs if ref is not None)


def _ref(index: int, given: object, notes: list[str]) -> FileRef | None:
    if not isinstance(given, dict):
        notes.append(f"files[{index}] was ignored: it is no reference to a file")
        return None
    name = given.get("name")
    name = name.removeprefix(DATA)[:MAX_NAME_CHARACTERS] if isinstance(name, str) else ""
    session, id = given.get("storage_session_id") or given.get("session_id"), given.get("id")
    if not is_code_id(session) or not is_code_id(id):
        what = shown(name) if name else f"files[{index}]"
        notes.append(f"{what} is not here: its reference has no valid id and session id. Upload the file again")
        return None
    space = {field: _word(given[field]) for field in ("kind", "resource_id", "version") if given.get(field) is not None}
    return FileRef(session=str(session), id=str(id), name=name, space=space)


def _word(given: object) -> str | int:
    """What is no short word is none that anything is called, whatever else it is."""
    if isinstance(given, str) and len(given) <= MAX_WORD_CHARACTERS:
        return given
    return given if isinstance(given, int) and abs(given) < 1 << 63 else "?"


def _hint(given: object, notes: list[str]) -> str | None:
    if given is None or given == "":
        return None
    if isinstance(given, str) and _HINT.fullmatch(given):
        return given
    notes.append(
        "runtime_session_hint was ignored, so nothing lasts: it must be 1 to 128 characters of A-Z a-z 0-9 . _ : -"
    )
    return None


def _seconds(given: object, notes: list[str]) -> float | None:
    """Clients say milliseconds. What is no such number is as if it had not been said."""
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not given > 0:
        notes.append("`timeout` was ignored: it must be a number of milliseconds, more than 0")
        return None
    return min(given, _MOST_MILLISECONDS) / 1000
