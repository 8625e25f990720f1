"""Answers in E2B's shapes, and times as it writes them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.responses import Response

from cloche import errors

_FIRST_SECONDS, _LAST_SECONDS = -62135596800, 253402300799  # the years 1 to 9999, which is what RFC 3339 can write

AWAY = (errors.Gone, errors.SandboxPaused)  # of a sandbox that could be used before: to clients it is gone either way
NEVER = "9999-12-31T23:59:59Z"  # the end of a sandbox that has no deadline


class NotOffered(errors.ClocheError):
    """E2B has it, this server does not."""

    code = "not_offered"


class Conflict(errors.ClocheError):
    """It cannot be done in the state that things are in."""

    code = "conflict"


def json_reply(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def error_reply(status: int, message: str) -> Response:
    """The control plane's and envd's HTTP errors: JavaScript clients go by `code` in the body."""
    return json_reply(error_body(status, message), status)


def error_body(status: int, message: str) -> dict[str, Any]:
    return {"code": status, "message": message}


def is_worth_a_retry(status: int, error: errors.ClocheError) -> bool:
    """Whether clients may send the same again: they wait for as long as `Retry-After` says."""
    if status != 429 and status < 500:
        return True  # they do not anyway
    return error.retry_after_seconds is not None or isinstance(error, errors.ShuttingDown)


def timestamp(seconds: float | None) -> str:
    """RFC 3339, to the microsecond. A moment that it cannot write, as a file may have, is the nearest that it can."""
    if seconds is None:
        return NEVER
    seconds = min(max(_FIRST_SECONDS, seconds), _LAST_SECONDS)
    return datetime.fromtimestamp(microseconds(seconds) / 1_000_000, UTC).isoformat(timespec="microseconds")[:-6] + "Z"


def microseconds(seconds: float) -> int:
    """The moment as clients see it: what they send back must compare equal."""
    return round(seconds * 1_000_000)
