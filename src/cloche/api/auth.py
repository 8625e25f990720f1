"""Authentication: the principal of a request. Keys are accepted in every header that known clients use."""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

from cloche import errors
from cloche.engine.principal import set_current_principal
from cloche.model import Principal

API_KEY_HEADERS = ("x-api-key", "api-key", "open-sandbox-api-key")
# What a browser holds that is logged in at the console; the first by TLS, where no neighbour's site can plant one.
SESSION_COOKIES = ("__Host-cloche_session", "cloche_session")
PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")


class KeyLookup(Protocol):
    """The keys that are valid now."""

    def find(self, key: str) -> Principal | None: ...


class Gatekeeper:
    """Finds the principal of a request.

    Without keys (`--insecure-no-auth`) every program on this machine acts as the same owner.
    """

    def __init__(self, keys: KeyLookup | None, keyless_principal: Principal):
        self._keys = keys
        self.keyless_principal = keyless_principal

    @property
    def is_keyless(self) -> bool:
        """Whether this server works without keys."""
        return self._keys is None

    def admit(self, request: HTTPConnection) -> Principal:
        """Returns the principal.

        Raises Unauthenticated, or Forbidden if a web page may have sent a keyless request. A request over the control
        socket carries its principal already: the socket's file mode admitted it.
        """
        state = request.scope.setdefault("state", {})
        known = state.get("principal")
        if not isinstance(known, Principal):
            known = state["principal"] = self._find_principal(request)
        set_current_principal(known)
        return known

    def admit_admin(self, request: HTTPConnection) -> Principal:
        """As `admit`, for admin-only operations. Also raises Forbidden."""
        principal = self.admit(request)
        if principal.role != "admin":
            raise errors.Forbidden("this needs a key with the role admin")
        return principal

    def knows(self, key: str) -> bool:
        """Whether it is a key of this server."""
        return bool(key) and self._keys is not None and self._keys.find(key) is not None

    def _find_principal(self, request: HTTPConnection) -> Principal:
        if self._keys is None:
            refuse_web_pages(request)
            return self.keyless_principal
        key = key_from_headers(request.headers)
        if not key:
            raise errors.Unauthenticated("this needs a key: send it as `X-API-Key`, or as `Authorization: Bearer`")
        found = self._keys.find(key)
        if found is None:
            raise errors.Unauthenticated("this key is not known here: `cloche key list` shows those that are")
        return found


def key_from_headers(headers: Mapping[str, str]) -> str:
    """The key that a request carries; empty if none."""
    for name in API_KEY_HEADERS:
        if headers.get(name):
            return headers[name].strip()
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    return _basic_auth_password(value.strip()) if scheme.lower() == "basic" else ""


def _basic_auth_password(encoded: str) -> str:
    """The password, or the user where there is none: a URL can be written as http://KEY@host, too."""
    try:
        user, _, password = base64.b64decode(encoded, validate=True).decode().partition(":")
        return password or user
    except ValueError:  # also where it is no base64, or not UTF-8
        return ""


def refuse_web_pages(request: HTTPConnection) -> None:
    """Raises Forbidden for requests of web pages, recognized by a foreign Origin or a rebound host name.

    Without a key such a page in the user's browser could run code here. The same holds for every request that a
    proxy on this machine lets through.
    """
    origin = request.headers.get("origin")
    foreign = origin is not None and _origin_netloc(origin) != request.headers.get("host")
    if foreign or not is_local(request):
        raise errors.Forbidden("without keys, only programs on this machine are served, by its loopback address")


def _origin_netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc
    except ValueError:  # brackets without an address between them
        return None


def is_local(request: HTTPConnection) -> bool:
    """Whether it was sent to this machine's loopback address, without a proxy that declares itself."""
    return _names_loopback(request) and not any(request.headers.get(name) for name in PROXY_HEADERS)


def is_loopback(host: str) -> bool:
    """Whether that name or address denotes this machine's loopback interface."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _names_loopback(request: HTTPConnection) -> bool:
    try:
        return is_loopback(urlsplit(f"//{request.headers.get('host', '')}").hostname or "")
    except ValueError:  # brackets without an address between them
        return False


# The owner of a request, once known: by its key, or by the sandbox with the secret or port that it uses.

PAYER_STATE = "payer"  # in a request's state: owner and id of the key that a request without a key is charged to
TOKEN_KEY_PREFIX = "jwt:"
HOST_OWNER_STATE = "host_owner"  # the owner of the sandbox that it visits
SESSION_STATE = "session"  # what is a secret of the session at the console that it belongs to
CONSOLE_DIALECT_STATE = "behind"  # the dialect that a page of the console asks
OPERATOR_STATE = "operator"  # whether an admin sent it at the console: then it may see what belongs to others


def request_owner(state: Mapping[str, Any]) -> str | None:
    """The owner; None for an unauthenticated request, or before the owner is known."""
    principal = state.get("principal")
    if isinstance(principal, Principal):
        return principal.owner
    payer = state.get(PAYER_STATE)
    return state.get(HOST_OWNER_STATE) if payer is None else str(payer[0])


def request_key_id(state: Mapping[str, Any]) -> str:
    """The id of the request's key, or TOKEN_KEY_PREFIX and the id of its token's signer; empty without a key."""
    principal = state.get("principal")
    return principal.key_id if isinstance(principal, Principal) else ""


# Sandbox secrets derived from the server's own secret: not stored, and the same after a restart.


def derive_sandbox_token(secret: bytes, purpose: str, sandbox: str) -> str:
    """A token equivalent to a key, for one purpose and one sandbox.

    `secret` is the server's, and never leaves it.
    """
    return hmac.new(secret, f"{purpose}:{sandbox}".encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


def secrets_match(given: str | None, wanted: str) -> bool:
    """Compares secrets in constant time."""
    return given is not None and hmac.compare_digest(given.encode("utf-8", "surrogatepass"), wanted.encode())
