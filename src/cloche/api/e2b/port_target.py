"""The sandbox and port that a request is for: by its Host name, by two headers, or by a signature."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import re
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from cloche import errors
from cloche.model import Struct

E2B_PREFIX = "/e2b"
ENVD_PORT = 49983
CODE_PORT = 49999
ID_HEADER = "e2b-sandbox-id"
PORT_HEADER = "e2b-sandbox-port"

_LABEL = re.compile(r"(\d{1,5})-([a-z0-9]+)(?:-[a-z0-9]+)?")
_OWN_LABEL = re.compile(r"(\d{1,5})-(i[a-z0-9]{20})(?:-[a-z0-9]+)?")
_ID = re.compile(r"[a-z0-9]{1,64}")
_HOST_NAME = re.compile(r"[a-z0-9.-]{1,253}")
NO_DOMAIN = "server-domain-is-not-set.invalid"  # resolves nowhere (RFC 2606)


class PortTarget(Struct):
    """A port of a sandbox."""

    sandbox: str
    port: int
    by_host: bool


def port_target_of(scope: Scope, domain: str) -> PortTarget | None:
    """The target; None for a request that is not for a sandbox. Raises InvalidRequest for an impossible target.

    `domain` is the parent domain of sandbox host names. Without it only Host names that start with an id of our
    own format count: `8000-something` may be the name of the machine itself. With it, a sandbox id below another
    domain is refused: such a request means a sandbox, and not this server.
    """
    headers = Headers(scope=scope)
    host = _normalize_host_name(headers.get("host", ""))
    by_host = _target_from_host(host, _normalize_host_name(domain))
    if by_host is not None:
        return by_host
    sandbox, port = headers.get(ID_HEADER), headers.get(PORT_HEADER)
    if sandbox is None and port is None:
        if _OWN_LABEL.fullmatch(host.partition(".")[0]) and "." in host:
            raise errors.InvalidRequest("Invalid host")
        return None
    if sandbox is None or port is None:
        raise errors.InvalidRequest("missing header: E2b-Sandbox-Id and E2b-Sandbox-Port go together")
    return PortTarget(sandbox=_parse_sandbox_id(sandbox), port=_parse_port_number(port), by_host=False)


@functools.lru_cache(maxsize=64)  # nearly all requests of a server have one of a few names
def is_sandbox_host(host: str, domain: str, *, has_headers: bool) -> bool:
    """Whether the Host name alone says that it is for this dialect, with any path.

    It is a sandbox's own, or `api.DOMAIN`, or that of a sandbox below another domain, which is refused.
    """
    label, _, parent = _normalize_host_name(host).partition(".")
    if domain and parent == _normalize_host_name(domain):
        return label == "api" or _LABEL.fullmatch(label) is not None
    if not parent or not _OWN_LABEL.fullmatch(label):
        return False
    return not (domain and has_headers)  # which win over a wrong name


def is_port_health(path: str, headers: Headers) -> bool:
    """Whether it is `GET /health` of envd or of the code server, by headers: clients may ask without the prefix."""
    return path == "/health" and headers.get(PORT_HEADER) in (str(ENVD_PORT), str(CODE_PORT))


def sandbox_domain(configured: str, public_url: str, host: str) -> str:
    """The domain for names of sandboxes in responses: the configured one, else the address that the client uses.

    Never none: clients would take E2B's own domain then, and send code and tokens there. No name can be put before
    an address: on one machine it is `localhost`, else one that resolves nowhere.
    """
    if configured:
        return configured
    try:
        address = urlsplit(public_url or f"//{host}")
        name, port = address.hostname or "", address.port
    except ValueError:
        return NO_DOMAIN
    with contextlib.suppress(ValueError):
        name = "localhost" if ipaddress.ip_address(name).is_loopback else ""
    if not _HOST_NAME.fullmatch(name):
        return NO_DOMAIN
    return name if port is None else f"{name}:{port}"


def is_api_host(scope: Scope, domain: str) -> bool:
    """Whether it is for `api.DOMAIN`: where clients that know only a domain look for the control plane."""
    return (
        bool(domain)
        and _normalize_host_name(Headers(scope=scope).get("host", "")) == f"api.{_normalize_host_name(domain)}"
    )


def is_signed_file_url(scope: Scope) -> bool:
    """Whether it is a signed file URL: these lack the prefix, and name no sandbox."""
    return without_prefix(scope["path"]) == "/files" and b"signature=" in scope.get("query_string", b"")


def without_prefix(path: str) -> str:
    return path[len(E2B_PREFIX) :] or "/" if path == E2B_PREFIX or path.startswith(E2B_PREFIX + "/") else path


def strip_e2b_prefix(scope: Scope) -> None:
    """Removes the prefix from the path, so that the routes behind see only their own paths."""
    raw = scope.get("raw_path")
    if raw is not None and scope["path"] != without_prefix(scope["path"]):
        scope["raw_path"] = raw[len(E2B_PREFIX) :] or b"/"
    scope["path"], scope["root_path"] = without_prefix(scope["path"]), ""


def strip_client_id(given: str) -> str:
    """A sandbox's id as it was sent: E2B's old ones carry a client's id behind a dash."""
    return given.partition("-")[0]


def _target_from_host(host: str, domain: str) -> PortTarget | None:
    label, _, rest = host.partition(".")
    match = (_LABEL if domain else _OWN_LABEL).fullmatch(label)
    if match is None or not rest or (domain and rest != domain):
        return None
    return PortTarget(sandbox=match[2], port=_parse_port_number(match[1]), by_host=True)


def _normalize_host_name(given: str) -> str:
    """The normalized Host name: lower case, without a port and without a trailing dot."""
    name, colon, port = given.lower().rpartition(":")
    return (name if colon and port.isdigit() else given.lower()).removesuffix(".")


def _parse_sandbox_id(given: str) -> str:
    id = strip_client_id(given)
    if not _ID.fullmatch(id):
        raise errors.InvalidRequest("Invalid sandbox ID")
    return id


def _parse_port_number(given: str) -> int:
    port = int(given) if given.isascii() and given.isdigit() and len(given) < 6 else 0
    if not 0 < port < 1 << 16:
        raise errors.InvalidRequest("Invalid sandbox port")
    return port
