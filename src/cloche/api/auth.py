"""Who asks. A key is accepted wherever the clients of the field put one."""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
from collections.abc import Mapping
from typing import Any, Protocol
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
        key = presented_key(request.headers)
        if not key:
            raise errors.Unauthenticated("this needs a key: send it as `X-API-Key`, or as `Authorization: Bearer`")
        found = self._keys.find(key)
        if found is None:
            raise errors.Unauthenticated("this key is not known here: `cloche key list` shows those that are")
        return found


def presented_key(headers: Mapping[str, str]) -> str:
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


# Whose a request is, as soon as that is known: by its key, or by the sandbox whose secret or whose port it uses.

PAYER = "payer"  # in a request's state: owner and id of the key for whom a request without a key counts
TOKEN = "jwt:"
HOST = "host_owner"  # the owner of the sandbox that it visits
SESSION = "session"  # what is a secret of the session at the console that it belongs to
BEHIND = "behind"  # the dialect that a page of the console asks
OPERATOR = "operator"  # whether it is an admin's at the console, who may see what is others'


def owner_of(state: Mapping[str, Any]) -> str | None:
    """None for a stranger's, or until it is known."""
    principal = state.get("principal")
    if isinstance(principal, Principal):
        return principal.owner
    payer = state.get(PAYER)
    return state.get(HOST) if payer is None else str(payer[0])


def request_key_id(state: Mapping[str, Any]) -> str:
    """The id of the key that it came with, or TOKEN and that of whoever signed its token; empty where there is none."""
    principal = state.get("principal")
    return principal.key_id if isinstance(principal, Principal) else ""


# Secrets of one sandbox, made from the server's own: nothing to store, and the same after a restart.


def token_of(secret: bytes, purpose: str, sandbox: str) -> str:
    """As good as a key, for one purpose and one sandbox. `secret` is the server's, and never leaves it."""
    return hmac.new(secret, f"{purpose}:{sandbox}".encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


def same(given: str | None, wanted: str) -> bool:
    """Compares secrets in constant time."""
    return given is not None and hmac.compare_digest(given.encode("utf-8", "surrogatepass"), wanted.encode())
