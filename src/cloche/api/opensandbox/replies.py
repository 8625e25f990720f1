"""Responses in OpenSandbox's format. No field is ever null: its generated clients fail on that."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.responses import Response

from cloche import errors

INVALID_PARAMETER = "SANDBOX::INVALID_PARAMETER"
NOT_SUPPORTED = "SANDBOX::API_NOT_SUPPORTED"
SANDBOX_NOT_FOUND = "SANDBOX::SANDBOX_NOT_FOUND"
SNAPSHOT_NOT_FOUND = "SNAPSHOT::SNAPSHOT_NOT_FOUND"
CONFLICT = "SANDBOX::CONFLICT"
UNKNOWN_ERROR = "SANDBOX::UNKNOWN_ERROR"
BUSY_CODES: dict[type[errors.ClocheError], str] = {
    errors.Busy: "SANDBOX::AT_CAPACITY",
    errors.QuotaExceeded: "SANDBOX::RATE_LIMITED",
}

Json = dict[str, Any]


class OpenSandboxUnsupported(errors.ClocheError):
    """A feature of OpenSandbox that this server does not support."""

    code = "not_offered"


class UnsupportedField(errors.InvalidRequest):
    """A valid request with a field for a feature that this server does not support."""

    code = "not_offered"


class OpenSandboxConflict(errors.ClocheError):
    """The current state does not allow the operation."""

    code = "conflict"


def json_reply(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def error_reply(status: int, code: str, message: str) -> Response:
    return json_reply({"code": code, "message": message}, status)


def format_timestamp(seconds: float) -> str:
    """RFC 3339, to the microsecond."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")[:-6] + "Z"
