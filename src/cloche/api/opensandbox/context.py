"""The context of the lifecycle API's handlers: authentication, the requested sandbox, bodies and errors."""

from __future__ import annotations

from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from cloche import errors
from cloche.api.auth import Gatekeeper, key_from_headers, secrets_match
from cloche.api.dialect import Conflict, DialectContext, NotSupported, UnsupportedField, json_reply
from cloche.api.http import status_of
from cloche.api.opensandbox.lifecycle_schema import EGRESS_PORT, EXECD_PORT, TOKEN_HEADERS_BY_PORT
from cloche.api.opensandbox.registry import SandboxStates
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import MIB

# Error codes of the lifecycle API.
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

PLANE_PORTS: dict[Literal["execd", "egress"], int] = {"execd": EXECD_PORT, "egress": EGRESS_PORT}


class OpenSandboxContext(DialectContext):
    """The context of the lifecycle API, and of the two planes with tokens of a sandbox's own."""

    max_body_bytes = 4 * MIB

    def __init__(self, engine: Engine, gatekeeper: Gatekeeper, states: SandboxStates, config: Config):
        super().__init__(engine, gatekeeper, config)
        self.states = states
        self.public_url = config.server.public_url

    async def sandbox_by_token(self, request: Request, plane: Literal["execd", "egress"]) -> Sandbox:
        """The running sandbox in the path, by its own token. Raises Unauthenticated, SandboxNotFound, Gone."""
        id, port = self.sandbox_id(request), PLANE_PORTS[plane]
        header = TOKEN_HEADERS_BY_PORT[port]
        if not secrets_match(request.headers.get(header), self.states.token(id, plane)):
            raise errors.Unauthenticated(
                f"{header} is missing or wrong: GET /sandboxes/ID/endpoints/{port} has it in `headers`"
            )
        return await (await self.engine.handle(id, None)).running()

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        if isinstance(error, errors.Unauthenticated):
            code = "INVALID_API_KEY" if key_from_headers(request.headers) else "MISSING_API_KEY"
            return error_reply(401, code, str(error))
        return render_lifecycle_error(error)


def render_lifecycle_error(error: errors.ClocheError) -> Response:
    """Any error but that of a key."""
    status, code = _status_and_code_of(error)
    return error_reply(status, code, str(error))


def _status_and_code_of(error: errors.ClocheError) -> tuple[int, str]:
    match error:
        case NotSupported():
            return 501, NOT_SUPPORTED
        case UnsupportedField():
            return 400, NOT_SUPPORTED
        case Conflict() | errors.SandboxPaused():
            return 409, CONFLICT
        case errors.SnapshotNotFound():
            return 404, SNAPSHOT_NOT_FOUND
        case errors.TemplateNotFound():
            return 400, INVALID_PARAMETER
        case errors.NotFound() | errors.Gone():
            return 404, SANDBOX_NOT_FOUND  # clients know no 410; the message says when and why
        case errors.InvalidRequest():
            return status_of(error), INVALID_PARAMETER
        case errors.Forbidden():
            return 403, "SANDBOX::FORBIDDEN"
    return status_of(error), BUSY_CODES.get(type(error), UNKNOWN_ERROR)


def error_reply(status: int, code: str, message: str) -> Response:
    """An error in OpenSandbox's format. No field of a response is ever null: generated clients fail on that."""
    return json_reply({"code": code, "message": message}, status)
