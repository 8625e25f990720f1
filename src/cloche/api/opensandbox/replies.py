"""Answers in OpenSandbox's shapes. No field of an answer is ever null: its generated clients fail on that."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.responses import Response

from cloche import errors

INVALID = "SANDBOX::INVALID_PARAMETER"
NOT_SUPPORTED = "SANDBOX::API_NOT_SUPPORTED"
NOT_FOUND = "SANDBOX::SANDBOX_NOT_FOUND"
SNAPSHOT_NOT_FOUND = "SNAPSHOT::SNAPSHOT_NOT_FOUND"
CONFLICT = "SANDBOX::CONFLICT"
UNKNOWN = "SANDBOX::UNKNOWN_ERROR"
BUSY: dict[type[errors.ClocheError], str] = {
    errors.Busy: "SANDBOX::AT_CAPACITY",
    errors.QuotaExceeded: "SANDBOX::RATE_LIMITED",
}

Json = dict[str, Any]


class NotOffered(errors.ClocheError):
    """OpenSandbox has it, this server does not."""

    code = "not_offered"


class Unsupported(errors.InvalidRequest):
    """A request that is right but for a field that asks for what this server does not have."""

    code = "not_offered"


class Conflict(errors.ClocheError):
    """What is asked for does not fit what is there by now."""

    code = "conflict"


def json_reply(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def error_reply(status: int, code: str, message: str) -> Response:
    return json_reply({"code": code, "message": message}, status)


def timestamp(seconds: float) -> str:
    """RFC 3339, to the microsecond."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")[:-6] + "Z"
