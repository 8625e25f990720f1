"""Keys as Jupyter's clients send them: `Authorization: token KEY`, `?token=KEY`, and a login with a password.

The password is the key. A login is kept in memory for some hours, under a random value that is the cookie.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, QueryParams
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import Scope

from cloche import errors
from cloche.api.auth import Gatekeeper, key_from_headers, secrets_match
from cloche.api.http import read_whole_body
from cloche.model import KIB

LOGIN_COOKIE = "cloche_jupyter"
XSRF_COOKIE = "_xsrf"
XSRF_HEADER = "x-xsrftoken"
LOGIN_SECONDS = 12 * 3600.0
MAX_LOGINS = 1000
MAX_LOGIN_BYTES = 16 * KIB
_SAFE_METHODS = ("GET", "HEAD")
_COOKIE_PATH = "/jupyter"
_FORM = (
    "<!doctype html><title>Cloche</title><form method=post>"
    '<input type=hidden name={name} value="{xsrf}">'
    "<label>Key <input type=password name=password autofocus></label> <button>Log in</button></form>"
)


class Login(NamedTuple):
    key: str
    until: float


class JupyterLogins:
    """The logins of all clients. Each request looks its key up again, so a revoked key ends its logins."""

    def __init__(self, gatekeeper: Gatekeeper):
        self._gatekeeper = gatekeeper
        self._logins: dict[str, Login] = {}  # by the hash of the cookie, the oldest first

    def present_key(self, scope: Scope) -> None:
        """Puts the key of a request, wherever it is, into a header where the gatekeeper looks for it."""
        headers = Headers(scope=scope)
        if key_from_headers(headers):
            return
        key = _sent_token(headers, scope) or self._key_of_login(headers, scope)
        if key:
            scope["headers"] = [*scope["headers"], (b"x-api-key", key.encode("utf-8", "surrogateescape"))]

    async def show(self, request: Request) -> Response:
        """The form, and the cookie that protects it."""
        xsrf = _cookies(request.headers).get(XSRF_COOKIE) or secrets.token_urlsafe(24)
        if not xsrf.replace("-", "").replace("_", "").isalnum():
            xsrf = secrets.token_urlsafe(24)
        response = HTMLResponse(_FORM.format(name=XSRF_COOKIE, xsrf=xsrf))
        response.set_cookie(XSRF_COOKIE, xsrf, path=_COOKIE_PATH, samesite="lax")
        return response

    async def enter(self, request: Request) -> Response:
        """Raises Unauthenticated for a wrong password, Forbidden without the form's token or from another site.

        A page that a program in a sandbox serves may be able to plant the cookie of the token.
        """
        if not _is_own_origin(request.headers):
            raise errors.Forbidden("a login comes from this server's own page")
        fields = _form_fields(await read_whole_body(request, MAX_LOGIN_BYTES))
        sent = fields.get(XSRF_COOKIE) or request.headers.get(XSRF_HEADER)
        wanted = _cookies(request.headers).get(XSRF_COOKIE, "")
        if not wanted or not secrets_match(sent, wanted):
            raise errors.Forbidden(f"'{XSRF_COOKIE}' argument missing from POST: GET this address first")
        key = fields.get("password", "").strip()
        if not self._gatekeeper.is_keyless and not self._gatekeeper.knows(key):
            raise errors.Unauthenticated("Invalid credentials: the password is a key of this server")
        response = RedirectResponse(_COOKIE_PATH + "/api", 302)
        secure = request.url.scheme == "https"
        response.set_cookie(
            LOGIN_COOKIE, self._add(key), path=_COOKIE_PATH, httponly=True, samesite="lax", secure=secure
        )
        return response

    async def leave(self, request: Request) -> Response:
        self._logins.pop(_hash(_cookies(request.headers).get(LOGIN_COOKIE, "")), None)
        response = RedirectResponse(_COOKIE_PATH + "/login", 302)
        response.delete_cookie(LOGIN_COOKIE, path=_COOKIE_PATH)
        return response

    def _add(self, key: str) -> str:
        now, token = time.monotonic(), secrets.token_urlsafe(32)
        self._logins = {hashed: each for hashed, each in self._logins.items() if each.until > now}
        while len(self._logins) >= MAX_LOGINS:
            del self._logins[next(iter(self._logins))]
        self._logins[_hash(token)] = Login(key, now + LOGIN_SECONDS)
        return token

    def _key_of_login(self, headers: Headers, scope: Scope) -> str:
        """The key of the cookie's login. A page of another site can send the cookie, but does not know the token."""
        cookies = _cookies(headers)
        found = self._logins.get(_hash(cookies.get(LOGIN_COOKIE, "")))
        if found is None or found.until < time.monotonic() or not _is_own_origin(headers):
            return ""
        if scope["type"] == "http" and scope["method"] not in _SAFE_METHODS:
            sent = headers.get(XSRF_HEADER) or QueryParams(scope.get("query_string", b"")).get(XSRF_COOKIE)
            wanted = cookies.get(XSRF_COOKIE, "")
            return found.key if wanted and secrets_match(sent, wanted) else ""
        return found.key


def _sent_token(headers: Mapping[str, str], scope: Scope) -> str:
    """The key as a token."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "token":
        return value.strip()
    return QueryParams(scope.get("query_string", b"")).get("token", "").strip()


def _is_own_origin(headers: Mapping[str, str]) -> bool:
    """Whether the request comes from a page of this server, or from no page at all."""
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = headers.get("origin")
    try:
        return origin is None or urlsplit(origin).netloc == headers.get("host")
    except ValueError:  # brackets without an address between them
        return False


def _cookies(headers: Mapping[str, str]) -> dict[str, str]:
    """By name; none of a name that is there twice, as a neighbour's page can plant one."""
    given = headers.get("cookie", "")
    names = Counter(part.partition("=")[0].strip() for part in given.split(";"))
    try:
        return {name: each.value for name, each in SimpleCookie(given).items() if names[name] == 1}
    except CookieError:
        return {}


def _form_fields(body: bytes) -> dict[str, str]:
    try:
        return {name: values[0] for name, values in parse_qs(body.decode(), max_num_fields=20).items()}
    except ValueError:
        raise errors.InvalidRequest("a login has the fields of a form") from None


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()
