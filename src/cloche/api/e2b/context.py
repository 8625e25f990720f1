"""The context of the control plane's handlers: authentication, the requested sandbox, bodies and errors."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cloche import errors
from cloche.api.auth import Gatekeeper
from cloche.api.e2b.registry import E2bSandbox, E2bSandboxes
from cloche.api.e2b.replies import E2bConflict, E2bUnsupported, error_reply, is_worth_retrying, strip_client_id
from cloche.api.http import DialectEndpoint, Handler, read_whole_body, status_of
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import MIB

MAX_BODY_BYTES = 4 * MIB


class E2bContext:
    """The services shared by the handlers of the control plane."""

    def __init__(self, engine: Engine, gatekeeper: Gatekeeper, residents: E2bSandboxes, config: Config):
        self.engine = engine
        self.residents = residents
        self.domain = config.server.domain
        self.max_seconds = config.lifetime.max_seconds
        self._gatekeeper = gatekeeper

    def route(self, method: str, path: str, handler: Handler) -> Route:
        return Route(path, DialectEndpoint(self, handler), methods=[method])

    def owner(self, request: Request) -> str:
        """Raises Unauthenticated or Forbidden."""
        return self._gatekeeper.admit(request).owner

    async def sandbox(self, request: Request) -> Sandbox:
        """The caller's running sandbox in the path; never resumes one. Raises SandboxPaused, and as `e2b_sandbox`."""
        return (await self.e2b_sandbox(request)).sandbox

    async def e2b_sandbox(self, request: Request) -> E2bSandbox:
        """The sandbox in the path, running or paused. Raises SandboxNotFound, Gone, and as `owner`."""
        owner = self.owner(request)
        return await self.residents.find(self.id(request), owner)

    def id(self, request: Request) -> str:
        return strip_client_id(request.path_params["id"])

    async def body(self, request: Request) -> bytes:
        return await read_whole_body(request, MAX_BODY_BYTES)

    def check_timeout(self, name: str, seconds: int, least: int = 0) -> None:
        """Raises InvalidRequest that names the field."""
        if seconds < least:
            raise errors.InvalidRequest(f"{name}: it must be at least {least} s, not {seconds}")
        if seconds > self.max_seconds:
            most = f"{self.max_seconds:g}"
            raise errors.InvalidRequest(f"{name}: it can be {most} s at most on this server, not {seconds}")

    def seconds(self, timeout: int | None, default: int | None) -> int:
        """Seconds from now; an omitted timeout means the default. Raises InvalidRequest."""
        if timeout is not None:
            self.check_timeout("timeout", timeout)
            return timeout
        if default is None:
            raise errors.InvalidRequest("timeout: it is missing; give the seconds from now on")
        return default

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        status = _control_status_of(error)
        response = error_reply(status, str(error))
        if not is_worth_retrying(status, error):
            response.headers["Should-Retry"] = "false"  # else clients try a 429 or 503 again, three times
        return response


def _control_status_of(error: errors.ClocheError) -> int:
    match error:
        case errors.Gone():
            return 404  # clients know no 410; the message says when and why
        case E2bUnsupported():
            return 501
        case E2bConflict():
            return 409
    return status_of(error)
