"""Who comes in: by a session's cookie, or by being on this machine where no keys are used."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from urllib.parse import SplitResult, parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import Message, Scope, Send

from cloche import errors
from cloche.api.auth import OPERATOR, SESSION, SESSION_COOKIES, refuse_web_pages
from cloche.api.console.context import House, Visitor
from cloche.api.console.sessions import AWAY_SECONDS, LONGEST_SECONDS, Sessions
from cloche.api.http import whole_body
from cloche.engine.principal import act_for
from cloche.model import KIB

# Whether a request was made by the console's own pages, and not by another site that a visitor has open.
#
# A cookie does not say that: a browser sends it along whoever asks, and to every port of a host.

SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
HEADER = "x-cloche-csrf"


def check_token(headers: Mapping[str, str], expected: str, field: str = "") -> None:
    """Raises Forbidden unless an unsafe request carries the session's token: in its header, or in a form's field."""
    sent = headers.get(HEADER) or field
    if not secrets.compare_digest(sent.encode(), expected.encode()):
        raise errors.Forbidden("this request did not come from a page of this session: load the page again")


def check_origin(headers: Mapping[str, str], public_url: str) -> None:
    """Raises Forbidden unless a browser says that a page of ours asks; also where it says nothing."""
    origin = headers.get("origin")
    if origin is None and headers.get("sec-fetch-site") == "same-origin":
        return
    if origin is None or not _is_own(origin, headers.get("host", ""), public_url):
        raise errors.Forbidden(
            "this request came from another site. If a proxy stands before the server, it must pass on the Host "
            "header, or `cloche serve --public-url` must say where people reach it"
        )


def check_reading(headers: Mapping[str, str]) -> None:
    """For what only pages of ours ask for. Raises Forbidden where a browser says that another site does.

    A name that was typed, or a bookmark, is `none`.
    """
    if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        raise errors.Forbidden("another site asks for this: open the console itself")


def _is_own(origin: str, host: str, public_url: str) -> bool:
    own = _split(origin)
    if own is None or not own.netloc or own.scheme not in ("http", "https"):
        return False
    public = _split(public_url) if public_url else None
    return own.netloc == host or (public is not None and (own.scheme, own.netloc) == (public.scheme, public.netloc))


def _split(url: str) -> SplitResult | None:
    try:
        return urlsplit(url.lower())
    except ValueError:  # brackets without an address between them
        return None


TLS_COOKIE, COOKIE = SESSION_COOKIES
AWAY = "x-cloche-away"  # for how many seconds nobody has touched the page that asks
MAX_FORM_BYTES = 256 * KIB
FORM = "application/x-www-form-urlencoded"
_OURS = frozenset({b"cookie", b"authorization", b"x-api-key", HEADER.encode()})


class Porch:
    def __init__(self, house: House):
        self.sessions = Sessions(house.keys)
        self._house = house
        self._public_url = house.config.server.public_url
        self._token = secrets.token_urlsafe(24)  # where nobody logs in

    async def admit(self, request: Request) -> tuple[Request, Visitor]:
        """For a page. Raises Unauthenticated, or Forbidden for what another site asks for."""
        visitor = self.recognise(request)
        if request.method not in SAFE:
            check_origin(request.headers, self._public_url)
            field, request = await _token_field(request)
            check_token(request.headers, visitor.csrf, field)
        self._note(request.scope, visitor)
        return request, visitor

    def admit_script(self, connection: HTTPConnection) -> Visitor:
        """For what a page's script asks a dialect for. Raises as `admit` does."""
        visitor = self.recognise(connection)
        if connection.scope["type"] == "websocket":
            check_origin(connection.headers, self._public_url)
        elif connection.scope["method"] in SAFE:
            check_reading(connection.headers)
        else:
            check_origin(connection.headers, self._public_url)
            check_token(connection.headers, visitor.csrf)
        return visitor

    def put_on(self, scope: Scope, visitor: Visitor) -> None:
        """The request as the dialect behind sees it: as if it had come there, by whom the session knows."""
        self._note(scope, visitor)
        scope["state"][OPERATOR] = visitor.is_admin
        scope["headers"] = [pair for pair in scope["headers"] if pair[0] not in _OURS]
        scope["path"] = scope["path"].removeprefix("/ui")
        if "raw_path" in scope:
            scope["raw_path"] = scope["raw_path"].removeprefix(b"/ui")

    def recognise(self, connection: HTTPConnection) -> Visitor:
        """Raises Unauthenticated; without keys, Forbidden where a web page might be behind it."""
        if self._house.gatekeeper.keyless:
            refuse_web_pages(connection)  # type: ignore[arg-type]  # it looks at headers only
            return Visitor(self._house.gatekeeper.anybody, self._token)
        found = self.sessions.find(self.token_of(connection), away=_is_away(connection))
        if found is None:
            raise errors.Unauthenticated("this needs a login: open /ui/login")
        return found

    def known(self, connection: HTTPConnection) -> Visitor | None:
        """As `recognise`; None for a stranger."""
        try:
            return self.recognise(connection)
        except (errors.Unauthenticated, errors.Forbidden):
            return None

    def check_own(self, request: Request) -> None:
        """Raises Forbidden unless a page of ours asks, logged in or not."""
        if self._house.gatekeeper.keyless:
            refuse_web_pages(request)
        check_origin(request.headers, self._public_url)

    def give(self, response: Response, token: str, request: Request) -> None:
        """The browser is logged in from here on. It asks by TLS if it did so now."""
        secure = request.headers.get("origin", "").startswith("https://") or request.url.scheme == "https"
        name, path = (TLS_COOKIE, "/") if secure else (COOKIE, "/ui")  # that name must be for all paths
        response.set_cookie(
            name, token, max_age=int(LONGEST_SECONDS), path=path, secure=secure, httponly=True, samesite="strict"
        )

    def take(self, response: Response, request: Request) -> None:
        """The browser is logged out."""
        self.sessions.close(self.token_of(request))
        response.delete_cookie(TLS_COOKIE, path="/", secure=True, httponly=True, samesite="strict")
        response.delete_cookie(COOKIE, path="/ui", httponly=True, samesite="strict")

    def end_other(self, request: Request) -> None:
        """Ends the session that this browser had, with what is being answered to it: a terminal in another window."""
        token = self.token_of(request)
        visitor = self.sessions.find(token, away=True)
        if visitor is not None:
            self.sessions.close(token)
            self._house.traffic.leave(visitor.csrf)

    def token_of(self, connection: HTTPConnection) -> str:
        """What the browser holds. Where people are known to come by TLS, a plain cookie is not one that was given."""
        public, host = urlsplit(self._public_url), connection.headers.get("host", "")
        by_tls = public.scheme == "https" and public.netloc.lower() == host.lower()
        return cookie_of(connection, (TLS_COOKIE,) if by_tls else (TLS_COOKIE, COOKIE))

    def _note(self, scope: Scope, visitor: Visitor) -> None:
        scope.setdefault("state", {}).update({"principal": visitor.principal, SESSION: visitor.csrf})
        act_for(visitor.principal)


def cookie_of(connection: HTTPConnection, names: Sequence[str]) -> str:
    """What the browser holds under the first of these names that it has; empty where it holds several of that name.

    Then a neighbour's site has added one of its own.
    """
    pairs = [pair for header in connection.headers.getlist("cookie") for pair in header.split(";")]
    for wanted in names:
        split = (pair.strip().partition("=") for pair in pairs)
        found = [value for name, _, value in split if name == wanted]
        if found:
            return found[0] if len(found) == 1 else ""
    return ""


def _is_away(connection: HTTPConnection) -> bool:
    said = connection.headers.get(AWAY, "")
    return said.isascii() and said.isdigit() and len(said) <= 9 and int(said) > AWAY_SECONDS


async def _token_field(request: Request) -> tuple[str, Request]:
    """The token in a form, and the request as it was before its body was read."""
    if HEADER in request.headers or not request.headers.get("content-type", "").startswith(FORM):
        return "", request
    body = await whole_body(request, MAX_FORM_BYTES)
    fields = parse_qs(body.decode("utf-8", "replace"), max_num_fields=1000)

    async def again() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return fields.get("csrf", [""])[0], Request(request.scope, again)


# What a browser is told with every answer of the console: nothing but its own files, no frame around it, no traces.

_NAMED = re.compile(r"(?:127\.0\.0\.1|[a-z0-9.-]*[a-z][a-z0-9.-]*)(?::[0-9]{1,5})?", re.IGNORECASE)

# For what is no page: an answer of an API that somebody opens as one gets an origin of its own, and can do nothing.
INERT = "sandbox; default-src 'none'; frame-ancestors 'self'"


def policy(host: str) -> str:
    """The Content-Security-Policy of a page.

    Scripts come from the directory of our own files only. Elsewhere below the same origin are files and ports of
    sandboxes. An address that no such rule can name (of IPv6, say) gets what comes closest.
    """
    own = f"{host}/ui/static/" if _NAMED.fullmatch(host) else "'self'"
    return (
        f"default-src 'none'; script-src {own}; style-src {own}; img-src 'self' data: blob:; font-src {own}; "
        "connect-src 'self'; frame-src 'self'; media-src 'self' blob:; form-action 'self'; base-uri 'none'; "
        "frame-ancestors 'none'"
    )


class Hardened:
    """A `send` that adds these headers where an answer does not bring its own. Of an inert one, the policy is ours."""

    def __init__(self, scope: Scope, send: Send):
        self._send = send
        self._is_inert = False
        self._policy = policy(Headers(scope=scope).get("host", ""))

    def make_inert(self) -> None:
        """From here on the answer is no page."""
        self._is_inert, self._policy = True, INERT

    async def __call__(self, message: Message) -> None:
        if message["type"] in ("http.response.start", "websocket.http.response.start"):
            self._harden(MutableHeaders(scope=message))
        await self._send(message)

    def _harden(self, headers: MutableHeaders) -> None:
        if self._is_inert:
            headers["content-security-policy"] = self._policy
        headers.setdefault("content-security-policy", self._policy)
        headers.setdefault("x-content-type-options", "nosniff")
        headers.setdefault("referrer-policy", "same-origin")  # with `no-referrer`, a form's Origin would be `null`
        headers.setdefault("cache-control", "no-store")
        headers.setdefault("cross-origin-opener-policy", "same-origin")
        headers.setdefault("cross-origin-resource-policy", "same-origin")
        headers.setdefault("permissions-policy", "camera=(), geolocation=(), microphone=(), payment=(), usb=()")
