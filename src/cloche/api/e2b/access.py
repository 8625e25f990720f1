"""Who may speak to a sandbox's ports. The dialect asks before any plane sees a request, so that no plane need ask.

    port 49983 (envd)         the access token; `/files` also takes a signature
    port 49999 (code server)  the traffic token or the access token
    any other port            the same, but only where public traffic was switched off

A sandbox that was made without `secure` (only old clients can) has no access token: as in E2B, its id is enough.
Who has neither is told the same of a sandbox that never was. So `GET /health` of envd needs a token, too, which E2B's
clients send with it.
"""

from __future__ import annotations

import time

from starlette.requests import HTTPConnection

from cloche import errors
from cloche.api.e2b.residents import Lock, Resident, Residents
from cloche.api.e2b.routing import CODE_PORT, ENVD_PORT
from cloche.api.e2b.tokens import Operation, same, signature

ACCESS_HEADER = "x-access-token"
TRAFFIC_HEADER = "e2b-traffic-access-token"
PRIVATE_HEADERS = tuple(name.encode() for name in (ACCESS_HEADER, TRAFFIC_HEADER, "e2b-sandbox-id", "e2b-sandbox-port"))
"""What programs inside a sandbox never see of a request that is carried to them."""

_UNAUTHORIZED = "unauthorized access, please provide a valid access token or method signing if supported"
_SECURED = "Sandbox is secured with traffic access token. Token header 'e2b-traffic-access-token' is"


def may_enter(connection: HTTPConnection, resident: Lock, port: int) -> bool:
    """Raises InvalidRequest as below."""
    try:
        require_entrance(connection, resident, port)
    except (errors.Unauthenticated, errors.Forbidden):
        return False
    return True


def require_entrance(connection: HTTPConnection, resident: Lock, port: int) -> None:
    """Raises Unauthenticated or Forbidden unless this request may go to that port."""
    if port == ENVD_PORT:
        require_access(connection, resident)
    elif port == CODE_PORT:
        if resident.access_token is not None or not resident.public_traffic:
            require_traffic(connection, resident)
    elif not resident.public_traffic:
        require_traffic(connection, resident)


def require_access(connection: HTTPConnection, resident: Lock) -> None:
    """envd's rule. Raises Unauthenticated, or InvalidRequest for an expiration that is no number."""
    token, path = resident.access_token, connection.scope["path"]
    if token is None:
        return
    if path == "/files" and _method(connection) in ("GET", "HEAD", "POST"):
        _require_file_access(connection, token)
    elif not same(connection.headers.get(ACCESS_HEADER), token):
        raise errors.Unauthenticated(_UNAUTHORIZED)


def require_traffic(connection: HTTPConnection, resident: Lock) -> None:
    """Raises Forbidden without a token of that sandbox: the traffic token, or the access token, which is worth more."""
    given, headers = connection.headers.get(TRAFFIC_HEADER), connection.headers
    access = resident.access_token
    if same(given, resident.traffic_token) or (access is not None and same(headers.get(ACCESS_HEADER), access)):
        return
    raise errors.Forbidden(f"{_SECURED} {'missing' if given is None else 'invalid'}")


async def signer_of(connection: HTTPConnection, residents: Residents) -> Resident:
    """The sandbox whose token signed this file URL, which names none. Raises Unauthenticated."""
    query = connection.query_params
    return await residents.by_signature(
        query.get("signature", ""),
        query.get("path", ""),
        _operation(connection),
        query.get("username", ""),
        _expiration(connection),
    )


def _require_file_access(connection: HTTPConnection, token: str) -> None:
    given, query = connection.headers.get(ACCESS_HEADER), connection.query_params
    if given is not None:
        if not same(given, token):
            raise errors.Unauthenticated("access token present in header but does not match")
        return
    if "signature" not in query:
        raise errors.Unauthenticated("missing signature query parameter")
    expiration = _expiration(connection)
    wanted = signature(query.get("path", ""), _operation(connection), query.get("username", ""), token, expiration)
    if not same(query["signature"], wanted):
        raise errors.Unauthenticated("invalid signature")
    if expiration is not None and expiration < time.time():
        raise errors.Unauthenticated("signature is already expired")


def _expiration(connection: HTTPConnection) -> int | None:
    given = connection.query_params.get("signature_expiration")
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and len(given) <= 12):
        raise errors.InvalidRequest("signature_expiration must be a time in seconds since 1970")
    return int(given)


def _operation(connection: HTTPConnection) -> Operation:
    return "write" if _method(connection) == "POST" else "read"


def _method(connection: HTTPConnection) -> str:
    return str(connection.scope.get("method", "GET"))
