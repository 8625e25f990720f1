"""Authentication of the console: by a session's cookie, or locally where no keys are used."""

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
from cloche.api.auth import OPERATOR_STATE, SESSION_COOKIES, SESSION_STATE, refuse_web_pages
from cloche.api.console.context import ConsoleContext, ConsoleVisitor
from cloche.api.console.sessions import AWAY_SECONDS, MAX_SESSION_SECONDS, ConsoleSessions
from cloche.api.http import read_whole_body
from cloche.engine.principal import set_current_principal
from cloche.model import KIB

# Checks that a request was made by the console's own pages, and not by another site in the same browser.
#
# A cookie does not prove that: a browser sends it with every request, and to every port of a host.

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
CSRF_HEADER = "x-cloche-csrf"


def check_csrf_token(headers: Mapping[str, str], expected: str, field: str = "") -> None:
    """Raises Forbidden unless an unsafe request carries the session's token: in its header, or in a form's field."""
    sent = headers.get(CSRF_HEADER) or field
    if not secrets.compare_digest(sent.encode(), expected.encode()):
        raise errors.Forbidden("this request did not come from a page of this session: load the page again")


def check_origin(headers: Mapping[str, str], public_url: str) -> None:
    """Raises Forbidden unless the browser reports a page of ours as the origin; also without any report."""
    origin = headers.get("origin")
    if origin is None and headers.get("sec-fetch-site") == "same-origin":
        return
    if origin is None or not _is_own_origin(origin, headers.get("host", ""), public_url):
        raise errors.Forbidden(
            "this request came from another site. If a proxy stands before the server, it must pass on the Host "
            "header, or `cloche serve --public-url` must say where people reach it"
        )


def check_read_origin(headers: Mapping[str, str]) -> None:
    """Raises Forbidden where the browser reports another site, for requests that only our pages make.

    A typed address, or a bookmark, is `none`.
    """
    if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        raise errors.Forbidden("another site asks for this: open the console itself")


def _is_own_origin(origin: str, host: str, public_url: str) -> bool:
    own = _split_url(origin)
    if own is None or not own.netloc or own.scheme not in ("http", "https"):
        return False
    public = _split_url(public_url) if public_url else None
    return own.netloc == host or (public is not None and (own.scheme, own.netloc) == (public.scheme, public.netloc))


def _split_url(url: str) -> SplitResult | None:
    try:
        return urlsplit(url.lower())
    except ValueError:  # brackets without an address between them
        return None


TLS_COOKIE, COOKIE = SESSION_COOKIES
AWAY_HEADER = "x-cloche-away"  # the seconds since the page was last touched
MAX_FORM_BYTES = 256 * KIB
FORM_TYPE = "application/x-www-form-urlencoded"
_CONSOLE_HEADERS = frozenset({b"cookie", b"authorization", b"x-api-key", CSRF_HEADER.encode()})


class ConsoleAuth:
    def __init__(self, context: ConsoleContext):
        self.sessions = ConsoleSessions(context.keys)
        self._context = context
        self._public_url = context.config.server.public_url
        self._token = secrets.token_urlsafe(24)  # on a server without logins

    async def admit(self, request: Request) -> tuple[Request, ConsoleVisitor]:
        """Authenticates a page request. Raises Unauthenticated, or Forbidden for a request from another site."""
        visitor = self.identify_visitor(request)
        if request.method not in SAFE_METHODS:
            check_origin(request.headers, self._public_url)
            field, request = await _token_field(request)
            check_csrf_token(request.headers, visitor.csrf, field)
        self._set_principal(request.scope, visitor)
        return request, visitor

    def admit_script(self, connection: HTTPConnection) -> ConsoleVisitor:
        """Authenticates a script's request to a dialect. Raises as `admit` does."""
        visitor = self.identify_visitor(connection)
        if connection.scope["type"] == "websocket":
            check_origin(connection.headers, self._public_url)
        elif connection.scope["method"] in SAFE_METHODS:
            check_read_origin(connection.headers)
        else:
            check_origin(connection.headers, self._public_url)
            check_csrf_token(connection.headers, visitor.csrf)
        return visitor

    def rewrite_for_dialect(self, scope: Scope, visitor: ConsoleVisitor) -> None:
        """Rewrites the request for the dialect, as if it had been sent there by the session's principal."""
        self._set_principal(scope, visitor)
        scope["state"][OPERATOR_STATE] = visitor.is_admin
        scope["headers"] = [pair for pair in scope["headers"] if pair[0] not in _CONSOLE_HEADERS]
        scope["path"] = scope["path"].removeprefix("/ui")
        if "raw_path" in scope:
            scope["raw_path"] = scope["raw_path"].removeprefix(b"/ui")

    def identify_visitor(self, connection: HTTPConnection) -> ConsoleVisitor:
        """Raises Unauthenticated; without keys, Forbidden where a web page might be behind it."""
        if self._context.gatekeeper.is_keyless:
            refuse_web_pages(connection)
            return ConsoleVisitor(self._context.gatekeeper.keyless_principal, self._token)
        found = self.sessions.find(self.session_token(connection), away=_is_away(connection))
        if found is None:
            raise errors.Unauthenticated("this needs a login: open /ui/login")
        return found

    def known(self, connection: HTTPConnection) -> ConsoleVisitor | None:
        """As `identify_visitor`; None for an unknown visitor."""
        try:
            return self.identify_visitor(connection)
        except (errors.Unauthenticated, errors.Forbidden):
            return None

    def check_same_origin(self, request: Request) -> None:
        """Raises Forbidden unless a page of ours sends the request, logged in or not."""
        if self._context.gatekeeper.is_keyless:
            refuse_web_pages(request)
        check_origin(request.headers, self._public_url)

    def set_session_cookie(self, response: Response, token: str, request: Request) -> None:
        """Logs the browser in. The cookie is for TLS only if this request used TLS."""
        secure = request.headers.get("origin", "").startswith("https://") or request.url.scheme == "https"
        name, path = (TLS_COOKIE, "/") if secure else (COOKIE, "/ui")  # that name must be for all paths
        response.set_cookie(
            name, token, max_age=int(MAX_SESSION_SECONDS), path=path, secure=secure, httponly=True, samesite="strict"
        )

    def take(self, response: Response, request: Request) -> None:
        """Logs the browser out."""
        self.sessions.close(self.session_token(request))
        response.delete_cookie(TLS_COOKIE, path="/", secure=True, httponly=True, samesite="strict")
        response.delete_cookie(COOKIE, path="/ui", httponly=True, samesite="strict")

    def end_previous_session(self, request: Request) -> None:
        """Ends the browser's previous session and its open connections: a terminal in another window, say."""
        token = self.session_token(request)
        visitor = self.sessions.find(token, away=True)
        if visitor is not None:
            self.sessions.close(token)
            self._context.traffic.leave(visitor.csrf)

    def session_token(self, connection: HTTPConnection) -> str:
        """The session token of the browser. Where the console is served by TLS, a plain cookie is not accepted."""
        public, host = urlsplit(self._public_url), connection.headers.get("host", "")
        by_tls = public.scheme == "https" and public.netloc.lower() == host.lower()
        return read_cookie(connection, (TLS_COOKIE,) if by_tls else (TLS_COOKIE, COOKIE))

    def _set_principal(self, scope: Scope, visitor: ConsoleVisitor) -> None:
        scope.setdefault("state", {}).update({"principal": visitor.principal, SESSION_STATE: visitor.csrf})
        set_current_principal(visitor.principal)


def read_cookie(connection: HTTPConnection, names: Sequence[str]) -> str:
    """The cookie with the first of these names that is set; empty where there are several of that name.

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
    said = connection.headers.get(AWAY_HEADER, "")
    return said.isascii() and said.isdigit() and len(said) <= 9 and int(said) > AWAY_SECONDS


async def _token_field(request: Request) -> tuple[str, Request]:
    """The token in a form, and the request as it was before its body was read."""
    if CSRF_HEADER in request.headers or not request.headers.get("content-type", "").startswith(FORM_TYPE):
        return "", request
    body = await read_whole_body(request, MAX_FORM_BYTES)
    fields = parse_qs(body.decode("utf-8", "replace"), max_num_fields=1000)

    async def again() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return fields.get("csrf", [""])[0], Request(request.scope, again)


# Security headers of every answer of the console: its own files only, no frames around it, no traces.

_NAMED_HOST = re.compile(r"(?:127\.0\.0\.1|[a-z0-9.-]*[a-z][a-z0-9.-]*)(?::[0-9]{1,5})?", re.IGNORECASE)

# For API responses: one that is opened as a page gets an origin of its own, and can do nothing.
INERT_POLICY = "sandbox; default-src 'none'; frame-ancestors 'self'"


def content_security_policy(host: str) -> str:
    """The Content-Security-Policy of a page.

    Scripts come from the directory of our own files only. Elsewhere below the same origin are files and ports of
    sandboxes. An address that no such rule can name (of IPv6, say) gets the closest rule.
    """
    own = f"{host}/ui/static/" if _NAMED_HOST.fullmatch(host) else "'self'"
    return (
        f"default-src 'none'; script-src {own}; style-src {own}; img-src 'self' data: blob:; font-src {own}; "
        "connect-src 'self'; frame-src 'self'; media-src 'self' blob:; form-action 'self'; base-uri 'none'; "
        "frame-ancestors 'none'"
    )


class HardenedSend:
    """A `send` that adds these headers where an answer has none. An inert answer always gets our policy."""

    def __init__(self, scope: Scope, send: Send):
        self._send = send
        self._is_inert = False
        self._policy = content_security_policy(Headers(scope=scope).get("host", ""))

    def make_inert(self) -> None:
        """Marks the answer as no page."""
        self._is_inert, self._policy = True, INERT_POLICY

    async def __call__(self, message: Message) -> None:
        if message["type"] in ("http.response.start", "websocket.http.response.start"):
            self._add_headers(MutableHeaders(scope=message))
        await self._send(message)

    def _add_headers(self, headers: MutableHeaders) -> None:
        if self._is_inert:
            headers["content-security-policy"] = self._policy
        headers.setdefault("content-security-policy", self._policy)
        headers.setdefault("x-content-type-options", "nosniff")
        headers.setdefault("referrer-policy", "same-origin")  # with `no-referrer`, a form's Origin would be `null`
        headers.setdefault("cache-control", "no-store")
        headers.setdefault("cross-origin-opener-policy", "same-origin")
        headers.setdefault("cross-origin-resource-policy", "same-origin")
        headers.setdefault("permissions-policy", "camera=(), geolocation=(), microphone=(), payment=(), usb=()")
