"""The state that all handlers of this dialect share."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cloche import errors
from cloche.api.auth import Gatekeeper
from cloche.api.dialect import DialectContext, InvalidJson, event_stream, invalid_type, json_reply
from cloche.api.http import StreamResponse, status_of
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.gateway.containers import InvalidContainerOption
from cloche.gateway.gateway import Gateway, TooManyTurns
from cloche.gateway.items import Item

# Streams of a turn's events.

QUIET_SECONDS = 10.0
KEEPALIVE = b": keep-alive\n\n"


def turn_stream(frames: AsyncGenerator[bytes, None]) -> StreamResponse:
    return event_stream(
        frames,
        headers={"cache-control": "no-cache"},
        at_once=True,
        quiet_seconds=QUIET_SECONDS,
        keepalive=KEEPALIVE,
    )


# Errors in the shape of OpenAI's API: `{"error": {"message", "type", "param", "code"}}`.

INVALID_REQUEST = "invalid_request_error"
_QUOTA_ERRORS = {
    True: ("requests", None, "rate_limit_exceeded"),
    False: ("insufficient_quota", None, "insufficient_quota"),
}


class BadParameter(errors.InvalidRequest):
    """An invalid field of a request. `reason` is OpenAI's error code."""

    def __init__(self, message: str, param: str | None, reason: str = "invalid_value", *, status: int = 400):
        super().__init__(message)
        self.param = param
        self.reason = reason
        self.status = status


class OpenAiNotFound(errors.NotFound):
    """An object of OpenAI's API that does not exist, or belongs to another owner."""

    def __init__(self, message: str, param: str | None = None, reason: str | None = None):
        super().__init__(message)
        self.param = param
        self.reason = reason


class FailedAfterCode(errors.ClocheError):
    """A failure after code has run: a client that simply retried would run it twice."""

    def __init__(self, error: errors.ClocheError):
        super().__init__(str(error))
        self.error = error
        self.code = error.code


class OpenAiContext(DialectContext):
    """The context of all handlers of this dialect."""

    def __init__(self, engine: Engine, gateway: Gateway, gatekeeper: Gatekeeper, config: Config):
        super().__init__(engine, gatekeeper, config)
        self.gateway = gateway

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        again = "true" if isinstance(error, errors.Unavailable) else None
        if isinstance(error, errors.QuotaExceeded) and error.retry_after_seconds is None:
            again = "false"  # something has to be removed first
        if isinstance(error, FailedAfterCode):
            error, again = error.error, "false"
        status, body = status_and_body(error)
        response = json_reply({"error": body}, status)
        if again is not None:
            response.headers["x-should-retry"] = again
        if isinstance(error, errors.UpstreamFailed) and error.retry_after:
            response.headers["retry-after"] = error.retry_after
        return response


def status_and_body(error: errors.ClocheError) -> tuple[int, dict[str, str | None]]:
    """The HTTP status and the `error` of an answer."""
    match error:
        case errors.Unauthenticated():
            return 401, _error_body(f"Incorrect API key provided: {error}", code="invalid_api_key")
        case errors.UpstreamFailed():
            return error.status, _error_body(str(error), error.kind, error.param, error.reason)
        case BadParameter() | InvalidContainerOption() | TooManyTurns():
            return error.status, _error_body(str(error), INVALID_REQUEST, error.param, error.reason)
        case OpenAiNotFound():
            return 404, _error_body(str(error), INVALID_REQUEST, error.param, error.reason)
        case errors.QuotaExceeded():
            return 429, _error_body(str(error), *_QUOTA_ERRORS[error.retry_after_seconds is not None])
        case errors.ModelNotFound():
            return 404, _error_body(str(error), INVALID_REQUEST, "model", "model_not_found")
        case errors.SandboxExpired() | errors.SandboxLost():
            return 400, _error_body("Container is expired.")
        case errors.SandboxNotFound() | errors.SandboxKilled():
            return 404, _error_body(str(error) if "ontainer" in str(error) else "Container not found.")
    # In a sandbox, trying again does not help where there is no space.
    status = 400 if isinstance(error, errors.NoSpace) else status_of(error)
    kind = "server_error" if status >= 500 else INVALID_REQUEST
    return status, _error_body(str(error), kind, code="server_error" if status >= 500 else error.code)


def _error_body(
    message: str, kind: str = INVALID_REQUEST, param: str | None = None, code: str | None = None
) -> dict[str, str | None]:
    return {"message": message, "type": kind, "param": param, "code": code}


# Types of request fields, as far as they are read here: errors are reported before anything is done.

MAX_INPUT_ITEMS = 10_000  # of an input, or messages of a chat
MAX_INPUT_PARTS = 50_000  # of all items together: contents, outputs, calls
MAX_TOOLS = 128
MAX_INCLUDE = 100
MAX_MODEL_CHARACTERS = 256  # characters

Parts = list[dict[str, Any]]


class UpstreamOptions(msgspec.Struct):
    """The options for the upstream, echoed in the response."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    service_tier: str | None = None
    safety_identifier: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    user: str | None = None
    prompt: dict[str, Any] | None = None
    moderation: dict[str, Any] | None = None


class _TypedItem(msgspec.Struct):
    type: str
    id: str | None = None
    status: str | None = None


class _MessageItem(_TypedItem, kw_only=True):
    role: str
    content: str | Parts | None = None


class _CallItem(_TypedItem, kw_only=True):
    call_id: str
    name: str
    arguments: str = ""
    input: str = ""


class _OutputItem(_TypedItem, kw_only=True):
    call_id: str
    output: str | Parts


class _CodeCallItem(_TypedItem, kw_only=True):
    code: str | None = None
    container_id: str | None = None
    outputs: Parts | None = None


class _ReasoningItem(_TypedItem, kw_only=True):
    summary: Parts | None = None
    content: Parts | None = None
    encrypted_content: str | None = None


class _ReferenceItem(_TypedItem, kw_only=True):
    id: str


_ITEM_TYPES: dict[str, type[_TypedItem]] = {
    "message": _MessageItem,
    "function_call": _CallItem,
    "custom_tool_call": _CallItem,
    "function_call_output": _OutputItem,
    "custom_tool_call_output": _OutputItem,
    "code_interpreter_call": _CodeCallItem,
    "reasoning": _ReasoningItem,
    "item_reference": _ReferenceItem,
}


class _ToolFields(msgspec.Struct):
    type: str
    name: str | None = None
    server_label: str | None = None
    description: str | None = None


class _NamedToolFields(_ToolFields, kw_only=True):
    name: str


_NAMED_TOOLS = ("function", "custom")


def check_model(name: str | None) -> str:
    """The name. Raises InvalidRequest."""
    if not name:
        raise missing_parameter("model")
    if len(name) > MAX_MODEL_CHARACTERS:
        raise BadParameter(
            f"Invalid 'model': string too long. Expected a string with maximum length {MAX_MODEL_CHARACTERS}, but "
            "got a string "
            f"with length {len(name)} instead.",
            "model",
            "string_above_max_length",
        )
    if not name.isprintable():
        raise BadParameter("Invalid 'model': it has characters that no name has.", "model")
    return name


def check_length(value: Any, most: int, param: str) -> None:
    """Raises InvalidRequest for a list that is too long. Other types are refused elsewhere."""
    if isinstance(value, list) and len(value) > most:
        raise BadParameter(
            f"Invalid '{param}': array too long. Expected an array with maximum length {most}, but got an array with "
            f"length {len(value)} instead.",
            param,
            "array_above_max_length",
        )


def check_item_lengths(items: Any, param: str) -> None:
    """Raises InvalidRequest for too many items, or too many parts in all of them, before they are decoded."""
    check_length(items, MAX_INPUT_ITEMS, param)
    parts = 0
    for item in items if isinstance(items, list) else ():
        if isinstance(item, dict):
            parts += sum(len(value) for value in item.values() if isinstance(value, list))
    if parts > MAX_INPUT_PARTS:
        raise BadParameter(
            f"Invalid '{param}': too many parts. Expected {MAX_INPUT_PARTS} at most in all of them, but got {parts} "
            "instead.",
            param,
            "array_above_max_length",
        )


def check_item(item: Item, where: str) -> None:
    """Raises InvalidRequest that names the field. Of unknown types, only the type is checked."""
    convert_typed(item, _TypedItem, where)
    convert_typed(item, _ITEM_TYPES.get(item["type"], _TypedItem), where)


def check_tool(tool: Item, where: str) -> None:
    """Raises InvalidRequest that names the field."""
    convert_typed(tool, _NamedToolFields if tool.get("type") in _NAMED_TOOLS else _ToolFields, where)


def convert_typed(raw: dict[str, Any], kind: type[Any], where: str = "") -> Any:
    """Converts an object. Raises InvalidRequest that names the field; `where` is the object's path."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise _bad_type(invalid_type(error), where) from None


def _bad_type(error: InvalidJson, where: str) -> BadParameter:
    if "missing required field" in error.problem:
        return missing_parameter(f"{where}.{error.problem.split('`')[1]}".lstrip("."))
    inside = error.path if not error.path or error.path.startswith("[") else f".{error.path}"
    param = (where + inside).lstrip(".") or None
    return BadParameter(f"Invalid type for '{param}': {error.problem}.", param, "invalid_type")


def missing_parameter(param: str) -> BadParameter:
    return BadParameter(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
