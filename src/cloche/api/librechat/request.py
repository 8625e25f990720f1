"""What is asked of POST /exec, in the words of all generations of clients. Pure.

Only what cannot be understood at all is refused. Everything else that makes no sense becomes a note, which the model
reads in the program's stderr: an error would hide from it what it could do better.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from cloche import errors
from cloche.api.librechat.names import shown
from cloche.api.librechat.replies import is_code_id
from cloche.model import Struct

DATA = "/mnt/data/"
MAX_ARGS = 1000
MAX_REFS = 2000  # that are looked at; a program can have fewer, by [librechat] max_files
MAX_NOTES = 20
_HINT = re.compile(r"[A-Za-z0-9._:-]{1,128}")


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


def decode(body: bytes) -> Asked:
    """Raises InvalidRequest for what is no JSON object, or has no program in it."""
    given = decode_object(body)
    for name in ("lang", "code"):
        if not isinstance(given.get(name), str):
            raise errors.InvalidRequest(f"`{name}` must be there, and be a string")
    return decode_fields(given, given["lang"])


def decode_object(body: bytes) -> dict[str, Any]:
    """Raises InvalidRequest."""
    try:
        given = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise errors.InvalidRequest("the body is no JSON") from None  # what the decoder says could quote it
    if not isinstance(given, dict):
        raise errors.InvalidRequest("the body must be a JSON object")
    return given


def decode_fields(given: Mapping[str, Any], lang: str) -> Asked:
    """The program in an object that has one."""
    notes: list[str] = []
    return Asked(
        code=given["code"],
        lang=lang,
        args=_args(given.get("args"), notes),
        files=_files(given.get("files"), notes),
        hint=_hint(given.get("runtime_session_hint"), notes),
        timeout_seconds=_seconds(given.get("timeout")),
        notes=tuple(notes[:MAX_NOTES]),
    )


def _args(given: object, notes: list[str]) -> tuple[str, ...]:
    if given is None:
        return ()
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
    name = name.removeprefix(DATA) if isinstance(name, str) else ""
    session, id = given.get("storage_session_id") or given.get("session_id"), given.get("id")
    if not is_code_id(session) or not is_code_id(id):
        what = shown(name) if name else f"files[{index}]"
        notes.append(f"{what} is not here: its reference has no valid id and session id. Upload the file again")
        return None
    space = {field: given[field] for field in ("kind", "resource_id", "version") if given.get(field) is not None}
    return FileRef(session=str(session), id=str(id), name=name, space=space)


def _hint(given: object, notes: list[str]) -> str | None:
    if given is None or given == "":
        return None
    if isinstance(given, str) and _HINT.fullmatch(given):
        return given
    notes.append(
        "runtime_session_hint was ignored, so nothing lasts: it must be 1 to 128 characters of A-Z a-z 0-9 . _ : -"
    )
    return None


def _seconds(given: object) -> float | None:
    """Clients say milliseconds. What is no such number is as if it had not been said."""
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not math.isfinite(given) or given <= 0:
        return None
    return given / 1000
