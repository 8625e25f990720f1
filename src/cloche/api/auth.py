"""Who asks. A key is accepted wherever the clients of the field put one."""

from __future__ import annotations

import base64
import ipaddress
from collections.abc import Mapping
from typing import Protocol
from urllib.parse import urlsplit

from starlette.requests import Request

from cloche import errors
from cloche.engine.principal import act_for
from cloche.model import Principal

OWN_HEADERS = ("x-api-key", "api-key", "open-sandbox-api-key")
# What a browser holds that is logged in at the console; the first by TLS, where no neighbour's site can plant one.
SESSION_COOKIES = ("__Host-cloche_session", "cloche_session")
FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")


class Keys(Protocol):
    """The keys that are valid now."""

    def find(self, key: str) -> Principal | None: ...


class Gatekeeper:
    """Says who a request is from. Without keys (`--insecure-no-auth`) everybody on this machine is the same owner."""

    def __init__(self, keys: Keys | None, anybody: Principal):
        self._keys = keys
        self.anybody = anybody

    @property
    def keyless(self) -> bool:
        """Whether nobody needs a key here."""
        return self._keys is None

    def admit(self, request: Request) -> Principal:
        """Raises Unauthenticated, or Forbidden where a web page might be behind a request without a key.

        A request that came through the control socket carries its principal already: its file's mode let it in.
        """
        state = request.scope.setdefault("state", {})
        known = state.get("principal")
        if not isinstance(known, Principal):
            known = state["principal"] = self._recognise(request)
        act_for(known)
        return known

    def admit_admin(self, request: Request) -> Principal:
        """As `admit`, for what only admins may do. Raises Forbidden, too."""
        principal = self.admit(request)
        if principal.role != "admin":
            raise errors.Forbidden("this needs a key with the role admin")
        return principal

    def knows(self, key: str) -> bool:
        """Whether it is a key of this server."""
        return bool(key) and self._keys is not None and self._keys.find(key) is not None

    def _recognise(self, request: Request) -> Principal:
        if self._keys is None:
            refuse_web_pages(request)
            return self.anybody
        key = key_of(request.headers)
        if not key:
            raise errors.Unauthenticated("this needs a key: send it as `X-API-Key`, or as `Authorization: Bearer`")
        found = self._keys.find(key)
        if found is None:
            raise errors.Unauthenticated("this key is not known here: `cloche key list` shows those that are")
        return found


def key_of(headers: Mapping[str, str]) -> str:
    """The key that a request carries; empty if none."""
    for name in OWN_HEADERS:
        if headers.get(name):
            return headers[name].strip()
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    return _password(value.strip()) if scheme.lower() == "basic" else ""


def _password(encoded: str) -> str:
    """The password, or the user where there is none: a URL can be written as http://KEY@host, too."""
    try:
        user, _, password = base64.b64decode(encoded, validate=True).decode().partition(":")
        return password or user
    except ValueError:  # also where it is no base64, or not UTF-8
        return ""


def refuse_web_pages(request: Request) -> None:
    """Without a key, a page in the user's browser could run code here: by its Origin, or by a name that it rebound.

    So could everybody whom a proxy on this machine lets through.
    """
    origin = request.headers.get("origin")
    foreign = origin is not None and _place_of(origin) != request.headers.get("host")
    if foreign or not is_local(request):
        raise errors.Forbidden("without keys, only programs on this machine are served, by its loopback address")


def _place_of(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc
    except ValueError:  # brackets without an address between them
        return None


def is_local(request: Request) -> bool:
    """Whether it was sent to this machine's loopback address, by no proxy that says so."""
    return _names_loopback(request) and not any(request.headers.get(name) for name in FORWARDED)


def is_loopback(host: str) -> bool:
    """Whether that name or address means this machine and no network."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _names_loopback(request: Request) -> bool:
    try:
        return is_loopback(urlsplit(f"//{request.headers.get('host', '')}").hostname or "")
    except ValueError:  # brackets without an address between them
        return False
