"""How OpenAI's API says that something went wrong: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cloche import errors
from cloche.api.http import status_of
from cloche.gateway.containers import BadWish
from cloche.gateway.gateway import TooManyTurns

INVALID = "invalid_request_error"
_QUOTA = {True: ("requests", None, "rate_limit_exceeded"), False: ("insufficient_quota", None, "insufficient_quota")}


class BadParameter(errors.InvalidRequest):
    """A request's field that makes no sense. `reason` is OpenAI's word for how."""

    def __init__(self, message: str, param: str | None, reason: str = "invalid_value", *, status: int = 400):
        super().__init__(message)
        self.param = param
        self.reason = reason
        self.status = status


class NotThere(errors.NotFound):
    """Something of OpenAI's kinds that does not exist, or is somebody else's."""

    def __init__(self, message: str, param: str | None = None, reason: str | None = None):
        super().__init__(message)
        self.param = param
        self.reason = reason


class AfterCode(errors.ClocheError):
    """A failure after code has run: a client that simply tried again would run it twice."""

    def __init__(self, error: errors.ClocheError):
        super().__init__(str(error))
        self.error = error
        self.code = error.code


class OpenAiErrors:
    """The dialect's errors."""

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        again = "true" if isinstance(error, errors.Unavailable) else None
        if isinstance(error, errors.QuotaExceeded) and error.retry_after_seconds is None:
            again = "false"  # something has to be removed first
        if isinstance(error, AfterCode):
            error, again = error.error, "false"
        status, body = status_and_body(error)
        response = Response(msgspec.json.encode({"error": body}), status, media_type="application/json")
        if again is not None:
            response.headers["x-should-retry"] = again
        if isinstance(error, errors.UpstreamFailed) and error.retry_after:
            response.headers["retry-after"] = error.retry_after
        return response


def status_and_body(error: errors.ClocheError) -> tuple[int, dict[str, str | None]]:
    """The HTTP status and the `error` of an answer."""
    match error:
        case errors.Unauthenticated():
            return 401, _body(f"Incorrect API key provided: {error}", code="invalid_api_key")
        case errors.UpstreamFailed():
            return error.status, _body(str(error), error.kind, error.param, error.reason)
        case BadParameter() | BadWish() | TooManyTurns():
            return error.status, _body(str(error), INVALID, error.param, error.reason)
        case NotThere():
            return 404, _body(str(error), INVALID, error.param, error.reason)
        case errors.QuotaExceeded():
            return 429, _body(str(error), *_QUOTA[error.retry_after_seconds is not None])
        case errors.ModelNotFound():
            return 404, _body(str(error), INVALID, "model", "model_not_found")
        case errors.SandboxExpired() | errors.SandboxLost():
            return 400, _body("Container is expired.")
        case errors.SandboxNotFound() | errors.SandboxKilled():
            return 404, _body(str(error) if "ontainer" in str(error) else "Container not found.")
    # In a sandbox, trying again does not help where there is no space.
    status = 400 if isinstance(error, errors.NoSpace) else status_of(error)
    kind = "server_error" if status >= 500 else INVALID
    return status, _body(str(error), kind, code="server_error" if status >= 500 else error.code)


def _body(
    message: str, kind: str = INVALID, param: str | None = None, code: str | None = None
) -> dict[str, str | None]:
    return {"message": message, "type": kind, "param": param, "code": code}
