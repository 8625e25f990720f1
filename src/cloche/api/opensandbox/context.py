"""The context of the lifecycle API's handlers: authentication, the requested sandbox, bodies and errors."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cloche import errors
from cloche.api.auth import Gatekeeper, key_from_headers
from cloche.api.http import DialectEndpoint, Handler, read_whole_body, status_of
from cloche.api.opensandbox.registry import SandboxStates
from cloche.api.opensandbox.replies import (
    BUSY_CODES,
    CONFLICT,
    INVALID_PARAMETER,
    NOT_SUPPORTED,
    SANDBOX_NOT_FOUND,
    SNAPSHOT_NOT_FOUND,
    UNKNOWN_ERROR,
    OpenSandboxConflict,
    OpenSandboxUnsupported,
    UnsupportedField,
    error_reply,
)
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import MIB

MAX_BODY_BYTES = 4 * MIB


class OpenSandboxContext:
    """The services shared by the handlers of the lifecycle API."""

    def __init__(self, engine: Engine, gatekeeper: Gatekeeper, known: SandboxStates, config: Config):
        self.engine = engine
        self.known = known
        self.public_url = config.server.public_url
        self.max_seconds = config.lifetime.max_seconds
        self._gatekeeper = gatekeeper

    def route(self, method: str, path: str, handler: Handler) -> Route:
        return Route(path, DialectEndpoint(self, handler), methods=[method])

    def owner(self, request: Request) -> str:
        """Raises Unauthenticated or Forbidden."""
        return self._gatekeeper.admit(request).owner

    async def sandbox(self, request: Request) -> Sandbox:
        """The caller's running sandbox in the path.

        Raises SandboxNotFound, SandboxPaused, Gone, and as `owner`.
        """
        return await self.engine.get(request.path_params["id"], self.owner(request))

    async def body(self, request: Request) -> bytes:
        return await read_whole_body(request, MAX_BODY_BYTES)

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        status, code = _status_and_code_of(error)
        if isinstance(error, errors.Unauthenticated):
            code = "INVALID_API_KEY" if key_from_headers(request.headers) else "MISSING_API_KEY"
        return error_reply(status, code, str(error))


def _status_and_code_of(error: errors.ClocheError) -> tuple[int, str]:
    match error:
        case OpenSandboxUnsupported():
            return 501, NOT_SUPPORTED
        case UnsupportedField():
            return 400, NOT_SUPPORTED
        case OpenSandboxConflict() | errors.SandboxPaused():
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
