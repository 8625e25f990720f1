"""Requests of POST /exec, in the formats of all generations of clients. Pure.

Only requests that cannot be understood at all are refused. Other mistakes become notes, which the model reads
in the program's stderr: an error would hide from it how to do better.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from cloche import errors
from cloche.api.librechat.replies import LibreChatRefusal, is_code_id, quote_ascii_name
from cloche.json_text import TooComplexJson, check_json
from cloche.model import MIB, Struct, ToolDefinition, ToolLanguage, ToolResult, tools_by_identifier

DATA_DIRECTORY = "/mnt/data/"
MAX_ARGS = 1000
MAX_FILE_REFS = 2000  # that are looked at; a program can have fewer, by [librechat] max_files
MAX_REQUEST_NOTES = 20
MAX_CODE_BYTES = 10_000_000
MAX_LONE_SURROGATES = 100_000  # of letters; a body with more is no JSON
MAX_NAME_CHARACTERS = 5000  # that are looked at: no name is as long
MAX_WORD_CHARACTERS = 200
FILE_REF_BYTES = 2000  # that a reference takes in memory, about
_MAX_TIMEOUT_MILLISECONDS = 1e15  # as good as for ever; a JSON number can be more than a float
_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
# A half of a letter without its other one. What is before and behind is looked at in steps of one length, so that it
# takes no time twice, whatever a body is made of.
_LONE_SURROGATES = re.compile(rb"%s(?!%s)|(?<!%s)%s" % (_HIGH, _LOW, _HIGH, _LOW))
_BACKSLASH, _STAND_IN = rb"\\", b"\0\0"  # NUL is in no JSON
_HINT_PATTERN = re.compile(r"[A-Za-z0-9._:-]{1,128}")

T = TypeVar("T")


class ProgramFileRef(Struct):
    """A stored file that the program needs below /mnt/data."""

    session: str
    id: str
    name: str  # where; empty: under the name that it has in the store
    space: dict[str, Any]  # the owner in the client's words: kind, resource_id, version


class ExecRequest(Struct):
    """A program to run. Keys, and ids of users and sessions, in request bodies are ignored."""

    code: str
    lang: str
    args: tuple[str, ...] = ()
    files: tuple[ProgramFileRef, ...] = ()
    hint: str | None = None  # of the session that it belongs to
    timeout_seconds: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Its approximate size in memory: one wide character may make all others take four bytes each."""
        return sum(map(sys.getsizeof, (self.code, *self.args))) + len(self.files) * FILE_REF_BYTES


class _ExecBody(msgspec.Struct):
    """The decoded fields of a body. The rest is skipped: small values take far more memory than bytes.

    For the same reason, each field has its own limit.
    """

    lang: msgspec.Raw = msgspec.Raw(b"null")
    code: msgspec.Raw = msgspec.Raw(b"null")
    args: msgspec.Raw = msgspec.Raw(b"null")
    files: msgspec.Raw = msgspec.Raw(b"null")
    timeout: msgspec.Raw = msgspec.Raw(b"null")
    runtime_session_hint: msgspec.Raw = msgspec.Raw(b"null")


_MAX_FIELD_BYTES = {
    "args": 4 * MIB,
    "files": 4 * MIB,
    "timeout": 1000,
    "runtime_session_hint": 1000,
}


def decode_exec(body: bytes) -> ExecRequest:
    """Raises InvalidRequest for a body that is no JSON object, or has no program, and LibreChatRefusal (413)."""
    _check_complexity(body)
    return _read_json(body, _decode_exec_body)


def _decode_exec_body(body: bytes) -> ExecRequest:
    sent = msgspec.json.decode(body, type=_ExecBody)
    code, lang = _text_field("code", sent.code), _text_field("lang", sent.lang)
    given = {name: memoryview(getattr(sent, name)) for name in _MAX_FIELD_BYTES}
    fields = {name: msgspec.json.decode(raw) for name, raw in given.items() if len(raw) <= _MAX_FIELD_BYTES[name]}
    check_code_size(code)
    return decode_exec_fields(
        {"code": code, **fields}, lang, [_too_long_note(name) for name in given if name not in fields]
    )


def _text_field(name: str, sent: msgspec.Raw) -> str:
    if bytes(memoryview(sent)[:1]) != b'"':
        raise errors.InvalidRequest(f"`{name}` must be there, and be a string")
    return msgspec.json.decode(sent, type=str)


def _too_long_note(name: str) -> str:
    return f"`{name}` was ignored: it has more than {_MAX_FIELD_BYTES[name]} bytes"


def check_code_size(code: str) -> None:
    """Raises LibreChatRefusal (413)."""
    size = len(code.encode("utf-8", "replace"))
    if size > MAX_CODE_BYTES:
        raise LibreChatRefusal(413, f"Request too large: code has {size} bytes, {MAX_CODE_BYTES} are possible")


def decode_object(body: bytes) -> dict[str, Any]:
    """Raises InvalidRequest, and LibreChatRefusal (413) for a body that would expand too much in memory."""
    _check_complexity(body)
    given = _read_json(body, msgspec.json.decode)
    if not isinstance(given, dict):
        raise errors.InvalidRequest("the body must be a JSON object")
    return given


def _check_complexity(body: bytes) -> None:
    """Raises LibreChatRefusal (413) for a body that would take long to decode, and much memory."""
    try:
        check_json(body)
    except TooComplexJson as error:
        raise LibreChatRefusal(413, f"Request too large: {error}") from None


def _read_json(body: bytes, read: Callable[[bytes], T]) -> T:
    """Raises InvalidRequest, without the decoder's message, which could quote the body."""
    try:
        try:
            return read(body)
        except msgspec.DecodeError:
            if (whole := replace_lone_surrogates(body)) == body:
                raise
            return read(whole)
    except msgspec.ValidationError:
        raise errors.InvalidRequest(
            "the body must be a JSON object, with no numbers that are beyond all bounds"
        ) from None
    except (msgspec.DecodeError, UnicodeError):
        raise errors.InvalidRequest("the body is no JSON") from None


def replace_lone_surrogates(body: bytes) -> bytes:
    """Replaces each lone surrogate, as in a text cut within an emoji, by U+FFFD."""
    if (b"\\ud" not in body and b"\\uD" not in body) or b"\0" in body:
        return body
    single = body.replace(_BACKSLASH, _STAND_IN)  # from here on a backslash begins something
    return _LONE_SURROGATES.sub(rb"\\ufffd", single, MAX_LONE_SURROGATES).replace(_STAND_IN, _BACKSLASH)


def decode_exec_fields(given: Mapping[str, Any], lang: str, noted: Sequence[str] = ()) -> ExecRequest:
    """Decodes the program in an object that has one. `noted` are notes that its author gets already."""
    notes = list(noted)
    return ExecRequest(
        code=given["code"],
        lang=lang[:MAX_WORD_CHARACTERS],
        args=_decode_args(given.get("args"), notes),
        files=_decode_files(given.get("files"), notes),
        hint=_decode_hint(given.get("runtime_session_hint"), notes),
        timeout_seconds=_decode_timeout(given.get("timeout"), notes),
        notes=tuple(notes[:MAX_REQUEST_NOTES]),
    )


def _decode_args(given: object, notes: list[str]) -> tuple[str, ...]:
    if given is None:
        return ()
    if not isinstance(given, list):
        notes.append("`args` should be a list: it was taken for one with a single value in it")
    words = given if isinstance(given, list) else [given]
    plain = [str(word) for word in words if isinstance(word, (str, int, float)) and "\0" not in str(word)][:MAX_ARGS]
    if len(plain) != len(words):
        notes.append(f"{len(words) - len(plain)} of `args` were left out: they must be strings, {MAX_ARGS} at most")
    return tuple(plain)


def _decode_files(given: object, notes: list[str]) -> tuple[ProgramFileRef, ...]:
    if given is None:
        return ()
    if not isinstance(given, Sequence) or isinstance(given, str):
        notes.append("`files` was ignored: it must be a list")
        return ()
    if len(given) > MAX_FILE_REFS:
        notes.append(f"only the first {MAX_FILE_REFS} of `files` were looked at")
    refs = (_decode_file_ref(index, each, notes) for index, each in enumerate(given[:MAX_FILE_REFS]))
    return tuple(ref for ref in refs if ref is not None)


def _decode_file_ref(index: int, given: object, notes: list[str]) -> ProgramFileRef | None:
    if not isinstance(given, dict):
        notes.append(f"files[{index}] was ignored: it is no reference to a file")
        return None
    name = given.get("name")
    name = name.removeprefix(DATA_DIRECTORY)[:MAX_NAME_CHARACTERS] if isinstance(name, str) else ""
    session, id = given.get("storage_session_id") or given.get("session_id"), given.get("id")
    if not is_code_id(session) or not is_code_id(id):
        what = quote_ascii_name(name) if name else f"files[{index}]"
        notes.append(f"{what} is not here: its reference has no valid id and session id. Upload the file again")
        return None
    space = {
        field: _short_word(given[field]) for field in ("kind", "resource_id", "version") if given.get(field) is not None
    }
    return ProgramFileRef(session=str(session), id=str(id), name=name, space=space)


def _short_word(given: object) -> str | int:
    """Returns a short word or number; "?" for anything else, which names nothing."""
    if isinstance(given, str) and len(given) <= MAX_WORD_CHARACTERS:
        return given
    return given if isinstance(given, int) and abs(given) < 1 << 63 else "?"


def _decode_hint(given: object, notes: list[str]) -> str | None:
    if given is None or given == "":
        return None
    if isinstance(given, str) and _HINT_PATTERN.fullmatch(given):
        return given
    notes.append(
        "runtime_session_hint was ignored, so nothing lasts: it must be 1 to 128 characters of A-Z a-z 0-9 . _ : -"
    )
    return None


def _decode_timeout(given: object, notes: list[str]) -> float | None:
    """Converts milliseconds. Anything but a positive number is ignored."""
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not given > 0:
        notes.append("`timeout` was ignored: it must be a number of milliseconds, more than 0")
        return None
    return min(given, _MAX_TIMEOUT_MILLISECONDS) / 1000


# Requests of POST /exec/programmatic: a program with tools, or the results of its calls. Pure.

MAX_RESULTS = 1000
MAX_TOOLS_BYTES = 4_000_000  # of what is said of all tools of a program
MIN_TIMEOUT_SECONDS = 1.0  # what clients take for the least that a program can be given
_CALL_ID = re.compile(r"call_[0-9]{3,6}")
_TOOL_LANGUAGES: dict[str, ToolLanguage] = {
    "python": "python",
    "py": "python",
    "python3": "python",
    "bash": "bash",
    "sh": "bash",
}


class ToolProgram(Struct):
    """A program to start, and the tools that it may call."""

    request: ExecRequest
    language: ToolLanguage
    tools: tuple[ToolDefinition, ...]


class SubmittedResult(Struct):
    """The client's result of one call. Equal results have equal digests."""

    result: ToolResult
    bytes: int
    digest: str


def decode_program(given: Mapping[str, Any], max_tools: int) -> ToolProgram:
    """Raises LibreChatRefusal (400, 413), and InvalidRequest for tools that cannot be called by their names."""
    language = _tool_language(given.get("language") or given.get("lang") or "python")
    code = given.get("code")
    if not isinstance(code, str) or not code:
        raise LibreChatRefusal(400, "Missing required field: code")
    size = len(code.encode("utf-8", "replace"))
    if size > MAX_CODE_BYTES:
        raise LibreChatRefusal(413, f"Request too large: code has {size} bytes, {MAX_CODE_BYTES} are possible")
    request = decode_exec_fields(given, "bash" if language == "bash" else "py")
    if request.timeout_seconds is not None:
        request = msgspec.structs.replace(request, timeout_seconds=max(request.timeout_seconds, MIN_TIMEOUT_SECONDS))
    tools = _decode_tools(given.get("tools"), max_tools)
    tools_by_identifier(tools, language)
    return ToolProgram(request=request, language=language, tools=tools)


def decode_results(given: object) -> dict[str, SubmittedResult]:
    """Returns the results by call. Raises LibreChatRefusal (400)."""
    if not isinstance(given, list):
        raise LibreChatRefusal(400, "tool_results must be an array when continuation_token is provided")
    if not given:
        raise LibreChatRefusal(
            400, "tool_results must be a non-empty array; send one result for each of the tool_calls"
        )
    if len(given) > MAX_RESULTS:
        raise LibreChatRefusal(400, f"tool_results has {len(given)} entries; there were never so many tool_calls")
    results = [_decode_result(index, each) for index, each in enumerate(given)]
    by_call = {each.result.call_id: each for each in results}
    if len(by_call) != len(results):
        raise LibreChatRefusal(400, "tool_results has two results for one call_id; send one for each of the tool_calls")
    return by_call


def _tool_language(given: object) -> ToolLanguage:
    language = _TOOL_LANGUAGES.get(given.strip().lower()) if isinstance(given, str) else None
    if language is None:
        raise LibreChatRefusal(
            400, f'Unsupported language {quote_ascii_name(str(given))}; supported values are "python" and "bash"'
        )
    return language


def _decode_tools(given: object, max_tools: int) -> tuple[ToolDefinition, ...]:
    if not isinstance(given, list):
        raise LibreChatRefusal(400, "Missing required field: tools (must be an array)")
    if len(given) > max_tools:
        raise LibreChatRefusal(400, f"Too many tools provided ({len(given)}). Maximum is {max_tools}.")
    tools = tuple(_decode_tool(index, each) for index, each in enumerate(given))
    size = len(msgspec.json.encode(tools))
    if size > MAX_TOOLS_BYTES:  # they are kept for as long as the program runs
        raise LibreChatRefusal(413, f"Request too large: tools have {size} bytes, {MAX_TOOLS_BYTES} are possible")
    return tools


def _decode_tool(index: int, given: object) -> ToolDefinition:
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        raise LibreChatRefusal(400, f"tools[{index}] must be an object with a name")
    description, parameters = given.get("description"), given.get("parameters")
    return ToolDefinition(
        name=given["name"],
        description=description if isinstance(description, str) else "",
        parameters=parameters if isinstance(parameters, dict) else {},
    )


def _decode_result(index: int, given: object) -> SubmittedResult:
    if not isinstance(given, dict):
        raise LibreChatRefusal(400, f"tool_results[{index}] must be an object with call_id, result and is_error")
    call_id, failed, message = given.get("call_id"), given.get("is_error", False), given.get("error_message")
    if not isinstance(call_id, str) or not _CALL_ID.fullmatch(call_id):
        raise LibreChatRefusal(
            400, f"tool_results[{index}].call_id must be the id of one of the tool_calls, such as call_001"
        )
    if failed is not None and not isinstance(failed, bool):
        raise LibreChatRefusal(400, f"tool_results[{index}].is_error must be true or false")
    error = (message if isinstance(message, str) and message else "Tool execution failed") if failed else None
    content = msgspec.json.encode(None if failed else given.get("result"), order="sorted")
    digest = hashlib.sha256(content + b"\0" + (error or "").encode("utf-8", "replace"))
    # The program gets it as JSON. Until then it is kept as such: as objects it can be much larger.
    result = ToolResult(call_id=call_id, result=msgspec.Raw(content), error=error)
    return SubmittedResult(result=result, bytes=len(content) + len(error or ""), digest=digest.hexdigest())


def results_problem(wanted: Sequence[str], given: Mapping[str, SubmittedResult]) -> str:
    """The problem with results for these calls; empty if there is none."""
    known = set(wanted)
    unknown = [id for id in given if id not in known]
    missing = [id for id in wanted if id not in given]
    if unknown:
        return f"tool_results has results of calls that were not issued with this token: {', '.join(unknown[:10])}"
    return f"tool_results has no result for {', '.join(missing[:10])}" if missing else ""
