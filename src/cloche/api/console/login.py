"""`/ui/login`: login by a link that works once, or by a key; and logout."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from urllib.parse import parse_qs, urlsplit

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from cloche import errors
from cloche.api.console.context import ConsoleContext
from cloche.api.console.security import ConsoleAuth
from cloche.api.console.sessions import LINK_SECONDS
from cloche.api.dialect import json_reply
from cloche.api.http import read_whole_body, status_of
from cloche.model import KIB, Principal
from cloche.telemetry import log

# Slows down failed logins, per client address.

FREE_FAILURES = 10  # so many may fail in a row
SECONDS_PER_LOGIN = 3.0  # then one in so many seconds
MAX_ADDRESSES = 10_000


class TooManyLogins(errors.QuotaExceeded):
    code = "too_many_logins"


class LoginThrottle:
    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._until: dict[str, float] = {}  # by address: when all that failed is forgotten; the oldest first

    def check(self, address: str) -> None:
        """Raises TooManyLogins."""
        ahead = self._until.get(address, 0.0) - self._clock() - (FREE_FAILURES - 1) * SECONDS_PER_LOGIN
        if ahead > 0:
            wait = math.ceil(ahead)
            raise TooManyLogins(f"too many logins have failed: try again in {wait} s", retry_after_seconds=wait)

    def failed(self, address: str) -> None:
        now = self._clock()
        until = max(self._until.pop(address, now), now) + SECONDS_PER_LOGIN
        if len(self._until) >= MAX_ADDRESSES:
            del self._until[next(iter(self._until))]
        self._until[address] = until


MAX_LOGIN_BYTES = 16 * KIB
_CONSOLE_PATH = re.compile(r"/ui/(?!login|logout)[A-Za-z0-9/_.~%?=&:@+,;-]*")
_PARENT_PATH = re.compile(r"//|\.\.|%2e", re.IGNORECASE)


class ConsoleLogin:
    def __init__(self, context: ConsoleContext, auth: ConsoleAuth):
        self.address = ""  # the public address of the server; set by the listener
        self._context = context
        self._auth = auth
        self._throttle = LoginThrottle()

    async def show(self, request: Request) -> Response:
        """The login page, also with a session: a link in its address counts. Without one, its script goes on."""
        known = self._auth.known(request) is not None
        if known and self._context.gatekeeper.is_keyless:
            return RedirectResponse(safe_page(request.query_params.get("next", "")), 303)
        ended = bool(self._auth.session_token(request)) and not known
        return self._login_form(request, request.query_params.get("next", ""), ended=ended)

    async def enter(self, request: Request) -> Response:
        """Logs in with `key`, or `link`, in a form's fields."""
        self._auth.check_same_origin(request)
        address = (request.scope.get("client") or ("", 0))[0]
        fields = _form_fields(await read_whole_body(request, MAX_LOGIN_BYTES))
        try:
            self._throttle.check(address)
            token = self._open_session(fields)
        except errors.ClocheError as error:
            return self._login_failed(request, fields, error)
        if token is None:
            self._throttle.failed(address)
            return self._login_failed(request, fields, _unknown_credentials(fields))
        return self._log_in(request, token, safe_page(fields.get("next", "")))

    async def state(self, request: Request) -> Response:
        """Whether this browser is logged in: a page opened from another site was sent no cookie."""
        return json_reply({"logged_in": self._auth.known(request) is not None})

    async def link(self, request: Request) -> Response:
        """Issues a login link to clients of the control socket, which its file's mode protects."""
        principal = request.scope["state"].get("principal")
        if not (isinstance(principal, Principal) and principal.role == "admin" and not principal.key_id):
            raise errors.NotFound("the console has no such page")
        return json_reply(
            {"url": self.new_link(), "seconds": 0 if self._context.gatekeeper.is_keyless else LINK_SECONDS}
        )

    async def leave(self, request: Request) -> Response:
        request, visitor = await self._auth.admit(request)
        response = RedirectResponse("/ui/login", 303)
        self._auth.take(response, request)
        self._context.traffic.leave(visitor.csrf)  # a terminal in another window, say
        self._audit_login("console.logout", visitor.principal)
        return response

    def new_link(self) -> str:
        """The console's address with a one-time token behind the #, which no server and no proxy ever sees."""
        address = self.address.rstrip("/")
        return (
            f"{address}/ui/" if self._context.gatekeeper.is_keyless else f"{address}/ui/login#{self._new_link_token()}"
        )

    def _new_link_token(self) -> str:
        return self._auth.sessions.new_link()

    def _open_session(self, fields: dict[str, str]) -> str | None:
        sessions = self._auth.sessions
        if fields.get("link"):
            return sessions.follow(fields["link"], self._context.gatekeeper.keyless_principal)
        return sessions.enter(fields.get("key", "").strip())

    def _log_in(self, request: Request, token: str, place: str) -> Response:
        response = RedirectResponse(place, 303)
        self._auth.end_previous_session(request)
        self._auth.set_session_cookie(response, token, request)
        visitor = self._auth.sessions.find(token)
        assert visitor is not None
        request.scope["state"]["principal"] = visitor.principal
        self._audit_login("console.login", visitor.principal)
        return response

    def _login_failed(self, request: Request, fields: dict[str, str], error: errors.ClocheError) -> Response:
        log.info("console.login_failed", by="link" if fields.get("link") else "key")
        response = self._login_form(request, fields.get("next", ""), str(error), status_of(error))
        if error.retry_after_seconds is not None:
            response.headers["retry-after"] = str(int(error.retry_after_seconds))
        return response

    def _login_form(
        self, request: Request, place: str, problem: str = "", status: int = 200, *, ended: bool = False
    ) -> Response:
        values = {"next": safe_page(place), "problem": problem, "ended": ended}
        return self._context.render(request, None, "login.html", status_code=status, **values)

    def _audit_login(self, what: str, principal: Principal) -> None:
        self._context.engine.audit_log.record(what, principal.owner, id=principal.key_id, who=principal)


def safe_page(wanted: str) -> str:
    """The console page to open next; the first page for an unsafe address."""
    return (
        wanted if len(wanted) < 1000 and _CONSOLE_PATH.fullmatch(wanted) and not _PARENT_PATH.search(wanted) else "/ui/"
    )


def safe_page_of_url(address: str) -> str:
    """As `safe_page`, for a whole URL."""
    try:
        return safe_page(urlsplit(address)._replace(scheme="", netloc="", fragment="").geturl())
    except ValueError:  # brackets without an address between them
        return safe_page("")


def _form_fields(body: bytes) -> dict[str, str]:
    try:
        found = parse_qs(body.decode(), max_num_fields=20)
    except ValueError:
        raise errors.InvalidRequest("a login has the fields of a form") from None
    return {name: values[0] for name, values in found.items()}


def _unknown_credentials(fields: dict[str, str]) -> errors.Unauthenticated:
    if fields.get("link"):
        return errors.Unauthenticated(
            "This link was used already, or is too old. Ask for a new one, or log in with a key."
        )
    return errors.Unauthenticated("This key is not known here, or was revoked, or has expired.")
