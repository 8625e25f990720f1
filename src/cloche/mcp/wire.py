"""JSON-RPC as `/mcp` has it: one message per request. Pure decoding, pure encoding."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cloche import errors
from cloche.api.http import request_id, status_of
from cloche.mcp.shapes import sayable_values
from cloche.protocol import responses

PARSE_ERROR, INVALID_REQUEST, INTERNAL_ERROR = -32700, -32600, -32603
UNSUPPORTED_VERSION = -32022
CANCELLED = -32800
MAX_VALUES = 200_000
LINE_ENDS = {end.encode(): f"\\u{ord(end):04x}".encode() for end in "\u0085\u2028\u2029"}
JSON = "application/json"

Id = int | str


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A request, a notification (no id), or an answer to something that we never asked (no method)."""

    jsonrpc: str
    method: str | None = None
    id: Id | None = None
    params: dict[str, Any] | None = None

    @property
    def meta(self) -> dict[str, Any]:
        found = (self.params or {}).get("_meta")
        return found if isinstance(found, dict) else {}

    @property
    def progress_token(self) -> Id | None:
        token = self.meta.get("progressToken")
        return token if isinstance(token, int | str) and not isinstance(token, bool) else None


class NotJson(errors.InvalidRequest):
    """A body that is no message."""


def message_of(body: bytes) -> Message:
    """Raises InvalidRequest that says what is wrong."""
    if body[:1] == b"[":
        raise errors.InvalidRequest("one message at a time: batches are not part of the protocol any more")
    try:
        message: Message = responses.decode(body, Message, MAX_VALUES)
    except msgspec.ValidationError as error:
        raise errors.InvalidRequest(f"this is no JSON-RPC message: {error}") from None
    except ValueError as error:
        raise NotJson(f"the body is no valid JSON: {error}") from None
    if message.jsonrpc != "2.0":
        raise errors.InvalidRequest('this is no JSON-RPC message: it needs "jsonrpc": "2.0"')
    return message


def encoded(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(sayable_values(value))


def answer(id: Id, result: dict[str, Any]) -> bytes:
    return encoded({"jsonrpc": "2.0", "id": id, "result": result})


def failure(id: Id | None, code: int, message: str, data: Any = None) -> bytes:
    error = {"code": code, "message": message}
    return encoded({"jsonrpc": "2.0", "id": id, "error": error if data is None else {**error, "data": data}})


def notification(method: str, params: dict[str, Any] | None) -> bytes:
    told = {"jsonrpc": "2.0", "method": method}
    return encoded(told if params is None else {**told, "params": params})


def event(message: bytes) -> bytes:
    """As one server-sent event. Some clients split lines wherever Unicode has one."""
    if not message.isascii():
        for line_end, escaped in LINE_ENDS.items():
            message = message.replace(line_end, escaped)
    return b"event: message\ndata: " + message + b"\n\n"


class Dialect:
    """How `/mcp` says that something of ours went wrong, before a tool was called."""

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        status = status_of(error)
        code = PARSE_ERROR if isinstance(error, NotJson) else INVALID_REQUEST if status < 500 else INTERNAL_ERROR
        body = failure(None, code, str(error), {"code": error.code, "request_id": request_id(request)})
        headers = {"www-authenticate": 'Bearer realm="cloche"'} if status == 401 else None
        return Response(body, status, headers, JSON)
