"""Where the lifecycle API's handlers meet who asks, what for, and how errors are said."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cloche import errors
from cloche.api.auth import Gatekeeper, presented_key
from cloche.api.http import Edge, Handler, status_of, whole_body
from cloche.api.opensandbox.registry import KnownSandboxes
from cloche.api.opensandbox.replies import (
    BUSY,
    CONFLICT,
    INVALID,
    NOT_FOUND,
    NOT_SUPPORTED,
    SNAPSHOT_NOT_FOUND,
    UNKNOWN,
    Conflict,
    NotOffered,
    Unsupported,
    error_reply,
)
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import MIB

MAX_BODY_BYTES = 4 * MIB


class Desk:
    """What every handler of the lifecycle API needs."""

    def __init__(self, engine: Engine, gatekeeper: Gatekeeper, known: KnownSandboxes, config: Config):
        self.engine = engine
        self.known = known
        self.public_url = config.server.public_url
        self.max_seconds = config.lifetime.max_seconds
        self._gatekeeper = gatekeeper

    def route(self, method: str, path: str, handler: Handler) -> Route:
        return Route(path, Edge(self, handler), methods=[method])

    def owner(self, request: Request) -> str:
        """Raises Unauthenticated or Forbidden."""
        return self._gatekeeper.admit(request).owner

    async def sandbox(self, request: Request) -> Sandbox:
        """The running one of the caller's that the path names.

        Raises SandboxNotFound, SandboxPaused, Gone, and as `owner`.
        """
        return await self.engine.get(request.path_params["id"], self.owner(request))

    async def body(self, request: Request) -> bytes:
        return await whole_body(request, MAX_BODY_BYTES)

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        status, code = _named(error)
        if isinstance(error, errors.Unauthenticated):
            code = "INVALID_API_KEY" if presented_key(request.headers) else "MISSING_API_KEY"
        return error_reply(status, code, str(error))


def _named(error: errors.ClocheError) -> tuple[int, str]:
    match error:
        case NotOffered():
            return 501, NOT_SUPPORTED
        case Unsupported():
            return 400, NOT_SUPPORTED
        case Conflict() | errors.SandboxPaused():
            return 409, CONFLICT
        case errors.SnapshotNotFound():
            return 404, SNAPSHOT_NOT_FOUND
        case errors.TemplateNotFound():
            return 400, INVALID
        case errors.NotFound() | errors.Gone():
            return 404, NOT_FOUND  # clients know no 410; the message says when and why
        case errors.InvalidRequest():
            return status_of(error), INVALID
        case errors.Forbidden():
            return 403, "SANDBOX::FORBIDDEN"
    return status_of(error), BUSY.get(type(error), UNKNOWN)
