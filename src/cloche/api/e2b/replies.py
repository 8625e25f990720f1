"""Answers in E2B's shapes, and times as it writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

from cloche import errors
from cloche.model import Struct

_FIRST_SECONDS, _LAST_SECONDS = -62135596800, 253402300799  # the years 1 to 9999, which is what RFC 3339 can write

AWAY = (errors.Gone, errors.SandboxPaused)  # of a sandbox that could be used before: to clients it is gone either way
NEVER = "9999-12-31T23:59:59Z"  # the end of a sandbox that has no deadline


class NotOffered(errors.ClocheError):
    """E2B has it, this server does not."""

    code = "not_offered"


class Conflict(errors.ClocheError):
    """It cannot be done in the state that things are in."""

    code = "conflict"


def json_reply(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def error_reply(status: int, message: str) -> Response:
    """The control plane's and envd's HTTP errors: JavaScript clients go by `code` in the body."""
    return json_reply(error_body(status, message), status)


def error_body(status: int, message: str) -> dict[str, Any]:
    return {"code": status, "message": message}


def is_worth_a_retry(status: int, error: errors.ClocheError) -> bool:
    """Whether clients may send the same again: they wait for as long as `Retry-After` says."""
    if status != 429 and status < 500:
        return True  # they do not anyway
    return error.retry_after_seconds is not None or isinstance(error, errors.ShuttingDown)


def timestamp(seconds: float | None) -> str:
    """RFC 3339, to the microsecond. A moment that it cannot write, as a file may have, is the nearest that it can."""
    if seconds is None:
        return NEVER
    seconds = min(max(_FIRST_SECONDS, seconds), _LAST_SECONDS)
    return datetime.fromtimestamp(microseconds(seconds) / 1_000_000, UTC).isoformat(timespec="microseconds")[:-6] + "Z"


def microseconds(seconds: float) -> int:
    """The moment as clients see it: what they send back must compare equal."""
    return round(seconds * 1_000_000)


# Which sandbox and port a request is for: by its Host name, by two headers, or by a signature.

PREFIX = "/e2b"
ENVD_PORT = 49983
CODE_PORT = 49999
ID_HEADER = "e2b-sandbox-id"
PORT_HEADER = "e2b-sandbox-port"

_LABEL = re.compile(r"(\d{1,5})-([a-z0-9]+)(?:-[a-z0-9]+)?")
_OWN_LABEL = re.compile(r"(\d{1,5})-(i[a-z0-9]{20})(?:-[a-z0-9]+)?")
_ID = re.compile(r"[a-z0-9]{1,64}")


class Target(Struct):
    """A port of a sandbox."""

    sandbox: str
    port: int
    by_host: bool


def target_of(scope: Scope, domain: str) -> Target | None:
    """None for a request that is not for a sandbox. Raises InvalidRequest for one that names none that could be.

    `domain` is the one under which sandboxes are reached. Without it a Host name counts that starts with an id as we
    make them: `8000-something` may well be the name of the machine itself. With it, an id below another domain is
    refused: whoever asks so means a sandbox, and not this server.
    """
    headers = Headers(scope=scope)
    host = _host(headers.get("host", ""))
    by_host = _by_host(host, _host(domain))
    if by_host is not None:
        return by_host
    sandbox, port = headers.get(ID_HEADER), headers.get(PORT_HEADER)
    if sandbox is None and port is None:
        if _OWN_LABEL.fullmatch(host.partition(".")[0]) and "." in host:
            raise errors.InvalidRequest("Invalid host")
        return None
    if sandbox is None or port is None:
        raise errors.InvalidRequest("missing header: E2b-Sandbox-Id and E2b-Sandbox-Port go together")
    return Target(sandbox=_sandbox(sandbox), port=_port(port), by_host=False)


def is_api_host(scope: Scope, domain: str) -> bool:
    """Whether it is for `api.DOMAIN`: where clients that know only a domain look for the control plane."""
    return bool(domain) and _host(Headers(scope=scope).get("host", "")) == f"api.{_host(domain)}"


def is_signed_file(scope: Scope) -> bool:
    """Whether it is a signed file URL: those lose the prefix, and name no sandbox."""
    return without_prefix(scope["path"]) == "/files" and b"signature=" in scope.get("query_string", b"")


def without_prefix(path: str) -> str:
    return path[len(PREFIX) :] or "/" if path == PREFIX or path.startswith(PREFIX + "/") else path


def strip_prefix(scope: Scope) -> None:
    """Lets what is behind see the path as if it had the origin to itself."""
    raw = scope.get("raw_path")
    if raw is not None and scope["path"] != without_prefix(scope["path"]):
        scope["raw_path"] = raw[len(PREFIX) :] or b"/"
    scope["path"], scope["root_path"] = without_prefix(scope["path"]), ""


def bare_id(given: str) -> str:
    """A sandbox's id as it was sent: E2B's old ones carry a client's id behind a dash."""
    return given.partition("-")[0]


def _by_host(host: str, domain: str) -> Target | None:
    label, _, rest = host.partition(".")
    match = (_LABEL if domain else _OWN_LABEL).fullmatch(label)
    if match is None or not rest or (domain and rest != domain):
        return None
    return Target(sandbox=match[2], port=_port(match[1]), by_host=True)


def _host(given: str) -> str:
    """A Host name in the one way that is compared: without a port, and without the dot that may end a whole name."""
    name, colon, port = given.lower().rpartition(":")
    return (name if colon and port.isdigit() else given.lower()).removesuffix(".")


def _sandbox(given: str) -> str:
    id = bare_id(given)
    if not _ID.fullmatch(id):
        raise errors.InvalidRequest("Invalid sandbox ID")
    return id


def _port(given: str) -> int:
    port = int(given) if given.isascii() and given.isdigit() and len(given) < 6 else 0
    if not 0 < port < 1 << 16:
        raise errors.InvalidRequest("Invalid sandbox port")
    return port
