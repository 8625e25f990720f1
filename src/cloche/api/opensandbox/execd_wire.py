"""execd's bytes: requests decoded, events encoded. Pure.

Answers of `/code` are server-sent events, in ASCII: clients split them where `str.splitlines` does. A program that
fails says so with one `error` and no `execution_complete`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from typing import Any

from cloche import errors
from cloche.api.encoding import ascii_json
from cloche.engine.executions.context import Context
from cloche.events import AnyEvent, Display, Ended, Output, Raised, Started
from cloche.model import Struct

_FAILURES = {
    "died": "KernelDied",
    "out_of_memory": "OutOfMemory",
    "timed_out": "ExecutionTimedOut",
    "interrupted": "KeyboardInterrupt",
}


class CodeRequest(Struct):
    code: str
    language: str | None = None
    context: str | None = None


class ContextRequest(Struct):
    language: str
    cwd: str | None = None


def decode_code(body: bytes) -> CodeRequest:
    """Raises InvalidRequest."""
    asked = _object(body)
    if not isinstance(asked.get("code"), str):
        raise errors.InvalidRequest("code: it must be a string")
    where = asked.get("context")
    if where is None:
        where = {}
    if not isinstance(where, dict):
        raise errors.InvalidRequest('context: it must be an object such as {"language": "python"}')
    language, context = _text(where, "language"), _text(where, "id")
    if language is None and context is None:
        raise errors.InvalidRequest('context: it must say where, as {"language": "python"} or {"id": ".."}')
    return CodeRequest(code=asked["code"], language=language and language.lower(), context=context)


def decode_context(body: bytes) -> ContextRequest:
    """Raises InvalidRequest."""
    asked = _object(body)
    language = _text(asked, "language")
    if language is None:
        raise errors.InvalidRequest("language: it is missing; give one such as python")
    return ContextRequest(language=language.lower(), cwd=_text(asked, "cwd"))


def _object(body: bytes) -> dict[str, Any]:
    try:
        asked = json.loads(body)  # Python's own: lone surrogates in code are the program's affair
    except (ValueError, RecursionError):
        raise errors.InvalidRequest("the request's body is not JSON") from None
    if not isinstance(asked, dict):
        raise errors.InvalidRequest("the request's body must be a JSON object")
    return asked


def _text(asked: Mapping[str, Any], name: str) -> str | None:
    """None for what is missing, null or empty."""
    value = asked.get(name)
    if value is not None and not isinstance(value, str):
        raise errors.InvalidRequest(f"{name}: it must be a string")
    return value or None


def encode_context(context: Context) -> dict[str, str]:
    return {"id": context.id, "language": context.language}


class Frames:
    """Events as frames. An execution has one error at most: it waits for the end, which may know more of it."""

    def __init__(self) -> None:
        self._error: dict[str, Any] | None = None

    def encode(self, events: Iterable[AnyEvent], now_ms: int) -> bytes:
        """What these events are on the wire; nothing for those that execd does not know."""
        return b"".join([frame(fields, now_ms) for event in events for fields in self._fields(event)])

    def _fields(self, event: AnyEvent) -> Iterable[dict[str, Any]]:
        match event:
            case Started(count=count) if count:
                return ({"type": "execution_count", "execution_count": count},)
            case Output():
                return ({"type": event.stream, "text": event.text},)
            case Display(update=False):
                return ({"type": "result", "results": results(event)},)
            case Raised():
                self._error = self._error or error(event.name, event.value, event.traceback)
            case Ended():
                return (self._end(event),)
        return ()

    def _end(self, ended: Ended) -> dict[str, Any]:
        found = self._error
        if ended.outcome in _FAILURES and (found is None or ended.outcome == "timed_out"):
            return error(_FAILURES[ended.outcome], ended.reason or ended.outcome)
        if found is None and ended.exit_code:
            return error("CommandExecError", str(ended.exit_code))
        return found or {"type": "execution_complete", "execution_time": round(ended.usage.wall_seconds * 1000)}


def init(context: str, now_ms: int) -> bytes:
    """The first frame. What it names is what can be interrupted."""
    return frame({"type": "init", "text": context}, now_ms)


def ping(now_ms: int) -> bytes:
    return frame({"type": "ping", "text": "pong"}, now_ms)


def frame(fields: Mapping[str, Any], now_ms: int) -> bytes:
    return b"data: " + ascii_json({**fields, "timestamp": now_ms}) + b"\n\n"


def error(name: str, value: str, traceback: str = "") -> dict[str, Any]:
    said = {"ename": name, "evalue": value, "traceback": traceback.splitlines()}
    return {"type": "error", "error": said}


def results(event: Display) -> dict[str, Any]:
    """By MIME type, but for plain text; bytes in base 64."""
    return {"text" if mime == "text/plain" else mime: _plain(value) for mime, value in event.data.items()}


def _plain(value: Any) -> Any:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value
