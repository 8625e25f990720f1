"""The context of the control plane's handlers; the sandbox of a request for a port, and errors, for all handlers."""

from __future__ import annotations

from typing import Any

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from cloche import errors
from cloche.api.auth import Gatekeeper
from cloche.api.dialect import Conflict, DialectContext, NotSupported, json_reply
from cloche.api.e2b.port_target import sandbox_domain, strip_client_id
from cloche.api.e2b.registry import E2bSandbox, E2bSandboxes
from cloche.api.http import status_of
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import MIB


class E2bContext(DialectContext):
    """The context of the control plane. Its `sandbox` never resumes one."""

    max_body_bytes = 4 * MIB

    def __init__(self, engine: Engine, gatekeeper: Gatekeeper, registry: E2bSandboxes, config: Config):
        super().__init__(engine, gatekeeper, config)
        self.registry = registry
        self.max_seconds = config.lifetime.max_seconds

    def domain(self, connection: HTTPConnection) -> str:
        """The domain below which that client finds ports of sandboxes."""
        server = self.config.server
        return sandbox_domain(server.domain, server.public_url, connection.headers.get("host", ""))

    def sandbox_id(self, connection: HTTPConnection) -> str:
        return strip_client_id(connection.path_params["id"])

    async def sandbox(self, connection: HTTPConnection) -> Sandbox:
        return (await self.e2b_sandbox(connection)).sandbox

    async def e2b_sandbox(self, connection: HTTPConnection) -> E2bSandbox:
        """The sandbox in the path, running or paused. Raises SandboxNotFound, Gone, and as `admit`."""
        owner = self.owner(connection)
        return await self.registry.find(self.sandbox_id(connection), owner)

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
        case NotSupported():
            return 501
        case Conflict():
            return 409
    return status_of(error)


# For the handlers of a sandbox's own ports too.

SANDBOX_AWAY_ERRORS = (
    errors.Gone,
    errors.SandboxPaused,
)  # of a sandbox that could be used before: to clients it is gone either way


def e2b_sandbox_of(request: Request) -> E2bSandbox:
    """The sandbox of a request for one of its ports: set by the dialect before the port's handlers run."""
    found: E2bSandbox = request.scope["state"]["e2b_sandbox"]
    return found


def sandbox_away_reply(error: errors.ClocheError, request: Request) -> Response:
    """The response for a sandbox that has ended or was paused meanwhile. Clients search for "was not found"."""
    id = e2b_sandbox_of(request).id
    return json_reply({"sandboxId": id, "message": f"The sandbox was not found: {error}", "code": 502}, 502)


def error_reply(status: int, message: str) -> Response:
    """The control plane's and envd's HTTP errors: JavaScript clients go by `code` in the body."""
    return json_reply(error_body(status, message), status)


def error_body(status: int, message: str) -> dict[str, Any]:
    return {"code": status, "message": message}


def is_worth_retrying(status: int, error: errors.ClocheError) -> bool:
    """Whether clients may repeat the request: they wait for the time in `Retry-After`."""
    if status != 429 and status < 500:
        return True  # they do not anyway
    return error.retry_after_seconds is not None or isinstance(error, errors.ShuttingDown)
