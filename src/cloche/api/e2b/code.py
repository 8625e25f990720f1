"""The code server (port 49999): executions as lines of JSON, and contexts.

Access was checked before a request arrives here: see app.py.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any
from weakref import WeakSet

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from cloche import errors
from cloche.api.dialect import InvalidJson, decode_json_object, dialect_route, json_reply
from cloche.api.e2b.context import SANDBOX_AWAY_ERRORS, e2b_sandbox_of, sandbox_away_reply
from cloche.api.e2b.registry import E2bSandboxes
from cloche.api.encoding import ascii_json, to_json_value
from cloche.api.http import MAX_CODE_REQUEST_BYTES, DropConnection, Handler, StreamResponse, read_decoded, status_of
from cloche.config import Config
from cloche.engine.executions.context import Context
from cloche.engine.executions.execution import Execution
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import AnyEvent, Display, Ended, Output, Raised, Result, Started
from cloche.languages import LANGUAGE_NAMES
from cloche.model import DisplayOptions, Struct

# The code server's wire format: decodes requests, encodes events. Pure.
#
# Requests are JSON, validated as FastAPI does. Responses of `/execute` are lines of ASCII JSON: the Python
# client splits them as `str.splitlines` does, the JavaScript client decodes each chunk of bytes separately.

KEEPALIVE_LINE = b'{"type": "keepalive"}\n'
END_LINE = b'{"type": "end_of_execution"}\n'
DEFAULT_LANGUAGE = "python"

_SHORT_LANGUAGES = {"js": "javascript", "ts": "typescript", "": DEFAULT_LANGUAGE}
_QUOTES = ("'", '"')


class UnprocessableRequest(errors.InvalidRequest):
    """A request of the wrong shape. `detail` has FastAPI's format."""

    def __init__(self, kind: str, where: tuple[str | int, ...], message: str):
        super().__init__(message)
        self.detail = [{"type": kind, "loc": ["body", *where], "msg": message}]


class E2bExecuteRequest(Struct):
    code: str
    context_id: str | None = None
    language: str | None = None
    env_vars: dict[str, str] = {}


class E2bContextRequest(Struct):
    language: str = DEFAULT_LANGUAGE
    cwd: str | None = None


def decode_execute_request(body: bytes) -> E2bExecuteRequest:
    """Raises UnprocessableRequest, or InvalidRequest for a context and a language at once."""
    message = _decode_object(body)
    if "code" not in message:
        raise UnprocessableRequest("missing", ("code",), "Field required")
    context_id, language = _string_field(message, "context_id"), _string_field(message, "language")
    if context_id and language:
        raise errors.InvalidRequest("Only one of context_id or language can be provided")
    return E2bExecuteRequest(
        code=_string_field(message, "code", required=True) or "",
        context_id=context_id or None,
        language=normalize_language(language) if language else None,
        env_vars=_decode_env_vars(message.get("env_vars")),
    )


def decode_context_request(body: bytes) -> E2bContextRequest:
    """Raises UnprocessableRequest."""
    message = _decode_object(body)
    return E2bContextRequest(
        language=normalize_language(_string_field(message, "language")), cwd=_string_field(message, "cwd") or None
    )


def normalize_language(given: str | None) -> str:
    name = (given or "").lower().strip()
    return _SHORT_LANGUAGES.get(name, name)


def _decode_object(body: bytes) -> dict[str, Any]:
    try:
        return decode_json_object(body)
    except InvalidJson as error:
        raise _unprocessable_body(error) from None


def _unprocessable_body(error: InvalidJson) -> UnprocessableRequest:
    where = () if error.position is None else (error.position,)
    match error.flaw:
        case "empty":
            return UnprocessableRequest("missing", where, "Field required")
        case "type":
            return UnprocessableRequest("model_attributes_type", where, "Input should be a valid dictionary")
    return UnprocessableRequest("json_invalid", where, f"JSON decode error: {error.problem}")


def _string_field(asked: Mapping[str, Any], name: str, *, required: bool = False) -> str | None:
    value = asked.get(name)
    if value is None and not required:
        return None
    if not isinstance(value, str):
        raise UnprocessableRequest("string_type", (name,), "Input should be a valid string")
    if name != "code":
        _check_unicode(value, (name,))
    return value


def _check_unicode(text: str, where: tuple[str, ...]) -> None:
    """Lone surrogates are allowed in code only. Raises UnprocessableRequest."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UnprocessableRequest(
            "string_unicode", where, "Input should be a valid string, unable to parse it as Unicode"
        ) from None


def _decode_env_vars(given: object) -> dict[str, str]:
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise UnprocessableRequest("dict_type", ("env_vars",), "Input should be a valid dictionary")
    for name, value in given.items():
        _check_unicode(name, ("env_vars",))
        if not isinstance(value, str):
            raise UnprocessableRequest("string_type", ("env_vars", name), "Input should be a valid string")
        _check_unicode(value, ("env_vars", name))
    return given


def encode_context(context: Context) -> dict[str, str]:
    return {"id": context.id, "language": context.language, "cwd": context.cwd}


class ExecutionLineEncoder:
    """Encodes events as lines.

    An execution has one error at most, sent at the end, when more is known about it.
    """

    def __init__(self, language: str = DEFAULT_LANGUAGE) -> None:
        self._error: dict[str, Any] | None = None
        self._language = language

    def encode(self, events: Iterable[AnyEvent], timestamp: str) -> bytes:
        """The lines for these events; empty for events that E2B does not have."""
        return b"".join([self._encode_event_lines(event, timestamp) for event in events])

    def _encode_event_lines(self, event: AnyEvent, timestamp: str) -> bytes:
        match event:
            case Output():
                parts = split_java_line(event.text) if self._language == "java" else [event.text]
                return b"".join(
                    [encode_line({"type": event.stream, "text": text, "timestamp": timestamp}) for text in parts]
                )
            case Display(update=False):
                return encode_line(encode_result(event))
            case Started():
                return encode_line({"type": "number_of_executions", "execution_count": event.count})
            case Raised():
                self._error = self._error or encode_error(event.name, event.value, event.traceback)
            case Ended():
                return self._encode_end_lines(event)
        return b""

    def _encode_end_lines(self, ended: Ended) -> bytes:
        found = self._error
        if ended.outcome not in ("ok", "raised") and (found is None or ended.outcome == "timed_out"):
            found = encode_error(*describe_failed_outcome(ended), found["traceback"] if found else "")
        elif found is None and ended.exit_code:
            found = encode_error("", str(ended.exit_code))  # as E2B's bash reports a failed last command of a cell
        return (encode_line(found) if found else b"") + END_LINE


def split_java_line(text: str) -> list[str]:
    """The text and the line end behind it, which E2B's kernel of Java sends apart."""
    return [text[:-1], "\n"] if text.endswith("\n") and len(text) > 1 else [text]


def describe_failed_outcome(ended: Ended) -> tuple[str, str]:
    """Name and value of an error that was not an exception of the program."""
    reason = ended.reason or ended.outcome
    if ended.outcome == "died":
        return "ContextRestarting", f"Context was restarted: {reason}"
    names = {"out_of_memory": "OutOfMemory", "timed_out": "ExecutionTimedOut", "interrupted": "KeyboardInterrupt"}
    return names[ended.outcome], reason


def encode_error(name: str, value: str, traceback: str = "") -> dict[str, Any]:
    return {"type": "error", "name": name, "value": value, "traceback": traceback}


def encode_result(event: Display) -> dict[str, Any]:
    """A display, field by field: bytes in base64; only `extra` may be without a value."""
    made = Result.from_bundle(event.data, main=event.main)
    fields = {name: to_json_value(getattr(made, name)) for name in Result.FIELDS.values()}
    if made.text is not None:
        fields["text"] = strip_outer_quotes(made.text)
    known = {name: value for name, value in fields.items() if value is not None}
    extra = {mime: to_json_value(value) for mime, value in made.extra.items()}
    return {"type": "result", **known, "extra": extra, "is_main_result": event.main}


def strip_outer_quotes(text: str) -> str:
    """The text without matching outer quotes: mostly a string's value instead of its repr."""
    paired = len(text) > 1 and text[0] == text[-1] and text[0] in _QUOTES
    return text[1:-1] if paired else text


def encode_line(fields: Mapping[str, Any]) -> bytes:
    return ascii_json(fields) + b"\n"


QUIET_SECONDS = 5.0
SHOWING = DisplayOptions(json=True, whole_text=True, whole_data=True, saved_images=True)
LISTED_FROM_THE_START = ("javascript",)  # beside Python's


def code_routes(registry: E2bSandboxes, config: Config) -> list[BaseRoute]:
    plane = CodeServer()

    def route(path: str, method: str, handler: Handler) -> Route:
        return dialect_route(plane, method, path, handler)

    return [
        route("/health", "GET", plane.health),
        route("/execute", "POST", plane.execute),
        route("/contexts", "GET", plane.list_contexts),
        route("/contexts", "POST", plane.create_context),
        route("/contexts/{id}/restart", "POST", plane.restart_context),
        route("/contexts/{id}", "DELETE", plane.remove_context),
    ]


class ContextCreationFailed(errors.ClocheError):
    """No context could be created. E2B has one status for every reason."""

    def __init__(self, reason: errors.ClocheError):
        super().__init__(f"Failed to create context: {reason}")


class CodeServer:
    def __init__(self) -> None:
        self._opened: WeakSet[Sandbox] = WeakSet()

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        if isinstance(error, UnprocessableRequest):
            return json_reply({"detail": error.detail}, 422)
        if isinstance(error, SANDBOX_AWAY_ERRORS):
            return sandbox_away_reply(error, request)
        return PlainTextResponse(str(error), status_of(error))

    async def health(self, request: Request) -> Response:
        return json_reply("OK")

    async def execute(self, request: Request) -> Response:
        sandbox = self._open_sandbox(request)
        message = await read_decoded(request, decode_execute_request, MAX_CODE_REQUEST_BYTES)
        context = _context_for_request(sandbox, message)
        execution = context.execute(message.code, env=message.env_vars, until_deadline=True, showing=SHOWING)
        return StreamResponse(
            _stream_execution_lines(execution, sandbox, context.language),
            at_once=True,
            quiet_seconds=QUIET_SECONDS,
            keepalive=KEEPALIVE_LINE,
            until=sandbox.wait_ended,
        )

    async def list_contexts(self, request: Request) -> Response:
        return json_reply([encode_context(each) for each in self._open_sandbox(request).contexts])

    async def create_context(self, request: Request) -> Response:
        sandbox = self._open_sandbox(request)
        message = await read_decoded(request, decode_context_request, MAX_CODE_REQUEST_BYTES)
        try:
            context = await sandbox.create_context(language=message.language, cwd=message.cwd)
        except (errors.InvalidRequest, errors.FileError, errors.Unavailable) as error:
            raise ContextCreationFailed(error) from error
        return json_reply(encode_context(context))

    async def restart_context(self, request: Request) -> Response:
        await _find_context(self._open_sandbox(request), request.path_params["id"]).restart()
        return json_reply(None)

    async def remove_context(self, request: Request) -> Response:
        sandbox = self._open_sandbox(request)
        sandbox.remove_context(_find_context(sandbox, request.path_params["id"]).id)
        return json_reply(None)

    def _open_sandbox(self, request: Request) -> Sandbox:
        sandbox = e2b_sandbox_of(request).sandbox
        if sandbox not in self._opened:
            self._opened.add(sandbox)
            for language in LISTED_FROM_THE_START:
                if language in LANGUAGE_NAMES:
                    sandbox.default_context(language)
        return sandbox


def _context_for_request(sandbox: Sandbox, request: E2bExecuteRequest) -> Context:
    if request.context_id is not None:
        return _find_context(sandbox, request.context_id)
    try:
        return sandbox.default_context(request.language or DEFAULT_LANGUAGE)
    except errors.InvalidRequest as error:
        raise ContextCreationFailed(error) from error


def _find_context(sandbox: Sandbox, id: str) -> Context:
    try:
        return sandbox.context(id)
    except errors.ContextNotFound:
        raise errors.ContextNotFound(f"Context {id} not found") from None


async def _stream_execution_lines(execution: Execution, sandbox: Sandbox, language: str) -> AsyncGenerator[bytes, None]:
    """The response lines. Closing the generator interrupts the program.

    Raises DropConnection if the sandbox ends meanwhile.
    """
    lines = ExecutionLineEncoder(language)
    try:
        async with execution:
            while events := await execution.next_events():
                if execution.ended is not None and execution.ended.reason == (sandbox.ending or ""):
                    raise DropConnection
                if encoded := lines.encode(events, datetime.now(UTC).isoformat()):
                    yield encoded
    except SANDBOX_AWAY_ERRORS:
        raise DropConnection from None
    except errors.ClocheError as error:  # no kernel could be started: the headers are out, so it is said here
        yield encode_line(encode_error(type(error).__name__, str(error))) + END_LINE
