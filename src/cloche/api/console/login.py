"""`/ui/login`: in by a link that is good once, or by a key; and out again."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from urllib.parse import parse_qs, urlsplit

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from cloche import errors
from cloche.api.console.context import House
from cloche.api.console.security import Porch
from cloche.api.console.sessions import LINK_SECONDS
from cloche.api.http import status_of, whole_body
from cloche.api.system import json_reply
from cloche.model import KIB, Principal
from cloche.telemetry import log

# Logins that fail are slowed down, per address they come from.

FREE = 10  # so many may fail in a row
EVERY_SECONDS = 3.0  # then one in so many seconds
MAX_ADDRESSES = 10_000


class TooManyLogins(errors.QuotaExceeded):
    code = "too_many_logins"


class Throttle:
    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._until: dict[str, float] = {}  # by address: when all that failed is forgotten; the oldest first

    def check(self, address: str) -> None:
        """Raises TooManyLogins."""
        ahead = self._until.get(address, 0.0) - self._clock() - (FREE - 1) * EVERY_SECONDS
        if ahead > 0:
            wait = math.ceil(ahead)
            raise TooManyLogins(f"too many logins have failed: try again in {wait} s", retry_after_seconds=wait)

    def failed(self, address: str) -> None:
        now = self._clock()
        until = max(self._until.pop(address, now), now) + EVERY_SECONDS
        if len(self._until) >= MAX_ADDRESSES:
            del self._until[next(iter(self._until))]
        self._until[address] = until


MAX_LOGIN_BYTES = 16 * KIB
_INSIDE = re.compile(r"/ui/(?!login|logout)[A-Za-z0-9/_.~%?=&:@+,;-]*")
_UP = re.compile(r"//|\.\.|%2e", re.IGNORECASE)


class Login:
    def __init__(self, house: House, porch: Porch):
        self.address = ""  # of the server, as people reach it; set by whoever knows
        self._house = house
        self._porch = porch
        self._throttle = Throttle()

    async def show(self, request: Request) -> Response:
        """Also for who is logged in: a link that they follow counts. Its script goes on where there is none."""
        known = self._porch.known(request) is not None
        if known and self._house.gatekeeper.keyless:
            return RedirectResponse(place_in(request.query_params.get("next", "")), 303)
        ended = bool(self._porch.token_of(request)) and not known
        return self._form(request, request.query_params.get("next", ""), ended=ended)

    async def enter(self, request: Request) -> Response:
        """With `key`, or `link`, in a form's fields."""
        self._porch.check_own(request)
        address = (request.scope.get("client") or ("", 0))[0]
        fields = _fields(await whole_body(request, MAX_LOGIN_BYTES))
        try:
            self._throttle.check(address)
            token = self._session_of(fields)
        except errors.ClocheError as error:
            return self._failed(request, fields, error)
        if token is None:
            self._throttle.failed(address)
            return self._failed(request, fields, _unknown(fields))
        return self._welcome(request, token, place_in(fields.get("next", "")))

    async def state(self, request: Request) -> Response:
        """Whether this browser is logged in: a page that another site led to has not been told."""
        return json_reply({"logged_in": self._porch.known(request) is not None})

    async def link(self, request: Request) -> Response:
        """For whoever came by the control socket: its file's mode let them in."""
        principal = request.scope["state"].get("principal")
        if not (isinstance(principal, Principal) and principal.role == "admin" and not principal.key_id):
            raise errors.NotFound("the console has no such page")
        return json_reply({"url": self.new_link(), "seconds": 0 if self._house.gatekeeper.keyless else LINK_SECONDS})

    async def leave(self, request: Request) -> Response:
        request, visitor = await self._porch.admit(request)
        response = RedirectResponse("/ui/login", 303)
        self._porch.take(response, request)
        self._house.traffic.leave(visitor.csrf)  # a terminal in another window, say
        self._note("console.logout", visitor.principal)
        return response

    def new_link(self) -> str:
        """The console's address, with what opens it once behind the #, which no server and no proxy ever sees."""
        address = self.address.rstrip("/")
        return f"{address}/ui/" if self._house.gatekeeper.keyless else f"{address}/ui/login#{self._link_token()}"

    def _link_token(self) -> str:
        return self._porch.sessions.new_link()

    def _session_of(self, fields: dict[str, str]) -> str | None:
        sessions = self._porch.sessions
        if fields.get("link"):
            return sessions.follow(fields["link"], self._house.gatekeeper.anybody)
        return sessions.enter(fields.get("key", "").strip())

    def _welcome(self, request: Request, token: str, place: str) -> Response:
        response = RedirectResponse(place, 303)
        self._porch.end_other(request)
        self._porch.give(response, token, request)
        visitor = self._porch.sessions.find(token)
        assert visitor is not None
        request.scope["state"]["principal"] = visitor.principal
        self._note("console.login", visitor.principal)
        return response

    def _failed(self, request: Request, fields: dict[str, str], error: errors.ClocheError) -> Response:
        log.info("console.login_failed", by="link" if fields.get("link") else "key")
        response = self._form(request, fields.get("next", ""), str(error), status_of(error))
        if error.retry_after_seconds is not None:
            response.headers["retry-after"] = str(int(error.retry_after_seconds))
        return response

    def _form(
        self, request: Request, place: str, problem: str = "", status: int = 200, *, ended: bool = False
    ) -> Response:
        values = {"next": place_in(place), "problem": problem, "ended": ended}
        return self._house.render(request, None, "login.html", status_code=status, **values)

    def _note(self, what: str, principal: Principal) -> None:
        self._house.engine.trail.note(what, principal.owner, id=principal.key_id, who=principal)


def place_in(wanted: str) -> str:
    """A page of the console to go on to; the first one for whatever is none."""
    return wanted if len(wanted) < 1000 and _INSIDE.fullmatch(wanted) and not _UP.search(wanted) else "/ui/"


def place_at(address: str) -> str:
    """As `place_in`, of a whole address."""
    try:
        return place_in(urlsplit(address)._replace(scheme="", netloc="", fragment="").geturl())
    except ValueError:  # brackets without an address between them
        return place_in("")


def _fields(body: bytes) -> dict[str, str]:
    try:
        found = parse_qs(body.decode(), max_num_fields=20)
    except ValueError:
        raise errors.InvalidRequest("a login has the fields of a form") from None
    return {name: values[0] for name, values in found.items()}


def _unknown(fields: dict[str, str]) -> errors.Unauthenticated:
    if fields.get("link"):
        return errors.Unauthenticated(
            "This link was used already, or is too old. Ask for a new one, or log in with a key."
        )
    return errors.Unauthenticated("This key is not known here, or was revoked, or has expired.")
