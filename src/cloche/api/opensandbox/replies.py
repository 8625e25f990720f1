"""Error codes and errors in OpenSandbox's format. No field is ever null: its generated clients fail on that."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from cloche import errors
from cloche.api.dialect import json_reply

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


def error_reply(status: int, code: str, message: str) -> Response:
    return json_reply({"code": code, "message": message}, status)
