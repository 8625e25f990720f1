"""Request tracking for log and metrics: requests are identified by route template, never by user input."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloche.api.auth import (
    CONSOLE_DIALECT_STATE,
    PAYER_STATE,
    SESSION_STATE,
    TOKEN_KEY_PREFIX,
    request_key_id,
    request_owner,
)
from cloche.api.body_memory import end_body
from cloche.api.http import CUT_OFF_STATE, REQUEST_ID_HEADER, request_id_of
from cloche.engine.operations.audit import NO_PRINCIPAL, AuditLog
from cloche.engine.principal import current_principal, set_current_principal
from cloche.engine.quotas.quotas import QuotaRate, Quotas
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import Principal
from cloche.telemetry import Histogram, log

# The audit of requests: refusals, and the resources that a request stored, read or removed.
#
# The engine itself audits operations on sandboxes, in every dialect. This module covers the rest: data of the
# gateway and of LibreChat, reads of snapshots, volumes and templates, and the actions of admins.

REFUSED_STATUSES = frozenset({401, 403, 404, 429})
METHOD_VERBS = {
    "GET": "read",
    "HEAD": "read",
    "DELETE": "removed",
    "POST": "made",
    "PUT": "changed",
    "PATCH": "changed",
}
FULLY_AUDITED_DIALECTS = frozenset({"v1", "librechat", "admin"})  # dialects with an audit line for every request
AUDITED_READS = frozenset(
    {"snapshots", "volumes", "templates", "builds", "logs"}
)  # of the others: what is read of these
UNAUDITED_RESOURCES = frozenset({"models", "health", "exec"})  # they keep nothing; what `exec` runs the engine tells
PATH_PREFIXES = frozenset(
    {"api", "v1", "v2", "v3", "e2b", "admin", "librechat", "opensandbox"}
)  # in paths, before what it is
LIBRECHAT_ACTIONS: Mapping[str, str] = {"upload": "files.made", "download": "files.read"}  # LibreChat's paths are verbs
OWNER_PARAMETER = "owner"  # as routes call the parameter that is one's name
ERASED_OWNER_STATE = "forgotten_owner"  # in a request's state: a name, and the pseudonym that stands for it

_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class RequestAudit:
    def __init__(self, audit_log: AuditLog):
        self._audit_log = audit_log

    def ended(self, dialect: str, scope: Scope, route: str, status: int) -> None:
        """Audits a finished request by its route template. Never waits."""
        dialect = scope["state"].get(CONSOLE_DIALECT_STATE, dialect)
        if scope["state"].get("answered_inside"):
            return
        method = scope.get("method", "WEBSOCKET")
        if status in REFUSED_STATUSES:
            about = f"{method} {route}" if route != "-" else dialect
            self._audit_log.record(
                "request.refused",
                _principal_owner(scope),
                outcome=str(status),
                about=about,
                who=current_principal() or NO_PRINCIPAL,
            )
        elif status < 400 and (what := _audit_action(dialect, method, route, _is_admin(scope))) is not None:
            owner = _owner_in_path(scope) or _principal_owner(scope)
            principal = _audited_principal(scope, current_principal())
            self._audit_log.record(what, owner, id=audited_id_of(scope), about=f"{method} {route}", who=principal)


def _audit_action(dialect: str, method: str, route: str, admin: bool) -> str | None:
    """The audited action; None for requests that are not audited here."""
    words = [word for word in route.split("/") if word and not word.startswith("{")]
    nouns = [word for word in words if word not in PATH_PREFIXES]
    if not nouns or nouns[0] in UNAUDITED_RESOURCES:
        return None
    if dialect == "admin":
        return f"admin.{nouns[0]}.{METHOD_VERBS.get(method, 'used')}"
    if dialect not in FULLY_AUDITED_DIALECTS:
        if admin and route == "/api/v1/sandboxes" and method == "GET":  # the list of all owners
            return "admin.sandboxes.read"
        return f"{nouns[0]}.read" if nouns[0] in AUDITED_READS and method in ("GET", "HEAD") else None
    noun = "gateway" if dialect == "v1" else dialect
    return f"{noun}.{LIBRECHAT_ACTIONS.get(nouns[0]) or '.'.join((*nouns[:3], METHOD_VERBS.get(method, 'used')))}"


def _principal_owner(scope: Scope) -> str:
    principal = scope["state"].get("principal")
    return principal.owner if isinstance(principal, Principal) else ""


def _is_admin(scope: Scope) -> bool:
    principal = scope["state"].get("principal")
    return isinstance(principal, Principal) and principal.role == "admin"


def audited_id_of(scope: Scope) -> str:
    """The first path parameter that is not an owner. A value that is not a valid id is not repeated."""
    first = next((each for name, each in scope.get("path_params", {}).items() if name != OWNER_PARAMETER), "")
    return first if isinstance(first, str) and _ID.fullmatch(first) else ""


def _owner_in_path(scope: Scope) -> str:
    """The owner in the path, if any. It is never logged as an id, since the log can erase owners only."""
    owner = scope.get("path_params", {}).get(OWNER_PARAMETER)
    if not isinstance(owner, str):
        return ""
    return str(scope["state"].get(ERASED_OWNER_STATE, {}).get(owner, owner))


def _audited_principal(scope: Scope, principal: Principal | None) -> Principal | None:
    """The acting principal; under its pseudonym if this request erases its owner."""
    pseudonym = scope["state"].get(ERASED_OWNER_STATE, {}).get(principal.owner) if principal is not None else None
    if principal is None or pseudonym is None:
        return principal
    return msgspec.structs.replace(principal, owner=pseudonym)


def mark_owner_erased(scope: Scope, owner: str, pseudonym: str) -> None:
    """Marks the owner as erased by this request: the audit lines of the request itself use the pseudonym."""
    scope["state"][ERASED_OWNER_STATE] = {owner: pseudonym}


# The response headers `RateLimit-Policy` and `RateLimit`: the quotas of a principal and their remainders.
#
# As in draft-ietf-httpapi-ratelimit-headers: `"executions";q=600;w=60` and `"executions";r=588;t=41`. Quotas
# that count existing things, instead of events in a period, have neither a window nor a reset.

POLICY_HEADER, LIMIT_HEADER = b"ratelimit-policy", b"ratelimit"


def charge_sandbox_owner(scope: Scope, sandbox: Sandbox) -> None:
    """Attributes a request that carries a sandbox's secret instead of a key to the sandbox's owner."""
    scope["state"][PAYER_STATE] = sandbox.quota_lease.owner, sandbox.quota_lease.key_id


class RateLimitHeaders:
    def __init__(self, quotas: Quotas):
        self._quotas = quotas

    def headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """The headers for the request's own principal; none for an unknown principal, or without quotas."""
        state = scope.get("state", {})
        principal = state.get("principal")
        payer = (principal.owner, principal.key_id) if isinstance(principal, Principal) else state.get(PAYER_STATE)
        rates = () if payer is None else self._quotas.quota_rates(*payer)
        return encode_rate_limit_headers(rates) if rates else []


def encode_rate_limit_headers(rates: list[QuotaRate]) -> list[tuple[bytes, bytes]]:
    policy = ", ".join(f'"{each.name}";q={each.quota}{_encode_parameter("w", each.window_seconds)}' for each in rates)
    left = ", ".join(f'"{each.name}";r={each.left}{_encode_parameter("t", each.reset_seconds)}' for each in rates)
    return [(POLICY_HEADER, policy.encode()), (LIMIT_HEADER, left.encode())]


def _encode_parameter(name: str, value: int | None) -> str:
    return "" if value is None else f";{name}={value}"


LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0, 300.0)
NO_ROUTE = "-"  # the route of a request that met none, or that a program inside a sandbox answered
STATUS_CLIENT_DISCONNECTED = 499  # the status of a request without an answer, because its client left
STATUS_SWITCHING_PROTOCOLS = 101
CUT_OFF_SECONDS = 5.0
START_MESSAGES = frozenset({"http.response.start", "websocket.accept", "websocket.http.response.start"})
BODY_MESSAGES = frozenset({"http.response.body", "websocket.http.response.body"})


class RequestTracker:
    """Counts and logs requests, and adds the request id and the rate-limit headers to every response."""

    def __init__(self, audit: RequestAudit | None = None, rates: RateLimitHeaders | None = None) -> None:
        self._rates = rates
        self._audit = audit
        self._answering: dict[asyncio.Task[Any] | None, Scope] = {}
        self._cut: set[asyncio.Task[Any] | None] = set()  # of those, what was cut off
        self.requests: Counter[tuple[str, int]] = Counter()  # by dialect and status
        self.seconds: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(LATENCY_BUCKETS))  # by dialect

    async def follow(self, dialect: str, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets `app` handle the request."""
        began_at = time.perf_counter()
        task = asyncio.current_task()
        self._answering[task] = scope
        set_current_principal(None)  # the task of a pipelined request was made in that of the one before it
        answer = TrackedSend(send, scope, self._rates)
        try:
            await app(scope, receive, answer)
        except asyncio.CancelledError:
            if task not in self._cut:
                raise  # else the server closes what it sees unfinished
        finally:
            del self._answering[task]
            self._cut.discard(task)
            end_body(scope["state"])
            self._record_ended_request(dialect, scope, answer, time.perf_counter() - began_at)

    async def cut_off(self, owner: str) -> None:
        """Cancels all requests in progress of that owner, except the current one."""
        theirs = self._cut_off_matching(lambda state: request_owner(state) == owner)
        if theirs:
            await asyncio.wait(theirs, timeout=CUT_OFF_SECONDS)

    def keep(self, keys: set[str]) -> None:
        """Cancels the requests in progress of every key with an id that is not in `keys`.

        Does not wait for their end. Requests with a token, over the control socket or with a sandbox's own secret
        have no key, and continue.
        """

        def has_stopped(state: Mapping[str, Any]) -> bool:
            id = request_key_id(state)
            return bool(id) and id not in keys and not id.startswith(TOKEN_KEY_PREFIX)

        self._cut_off_matching(has_stopped)

    def leave(self, session: str) -> None:
        """Cancels the requests in progress of a closed console session. Does not wait for their end."""
        self._cut_off_matching(lambda state: state.get(SESSION_STATE) == session)

    def _cut_off_matching(self, meant: Callable[[Mapping[str, Any]], bool]) -> list[asyncio.Task[Any]]:
        own = asyncio.current_task()
        found = [
            task
            for task, scope in self._answering.items()
            if task is not None and task is not own and task not in self._cut and meant(scope["state"])
        ]
        self._cut.update(found)
        for task in found:
            self._answering[task]["state"][CUT_OFF_STATE] = True
            task.cancel()
        return found

    def _record_ended_request(self, dialect: str, scope: Scope, answer: TrackedSend, seconds: float) -> None:
        self.requests[dialect, answer.status] += 1
        self.seconds[dialect].observe(seconds)
        route = route_template_of(scope)
        if self._audit is not None:
            self._audit.ended(dialect, scope, route, answer.status)
        log.info(
            "request.ended",
            method=scope.get("method", "WEBSOCKET"),
            route=route,
            status=answer.status,
            ms=round(seconds * 1000, 2),
            request=request_id_of(scope),
            dialect=dialect,
            **_key_id_field(scope),
            **({} if answer.whole else {"cut_off": True}),
        )


class TrackedSend:
    """A `send` that adds the request id and the rate-limit headers, and records status and completeness."""

    def __init__(self, send: Send, scope: Scope, rates: RateLimitHeaders | None):
        self.status = STATUS_CLIENT_DISCONNECTED
        self.whole = False
        self._send = send
        self._scope = scope
        self._rates = rates
        self._request_id = request_id_of(scope).encode()

    async def __call__(self, message: Message) -> None:
        kind = message["type"]
        if kind in START_MESSAGES:
            self.status = message.get("status", STATUS_SWITCHING_PROTOCOLS)
            self.whole = kind == "websocket.accept"  # either side may end that when it likes
            message["headers"] = _with_request_id(message.get("headers", ()), self._request_id)
            if self._rates is not None:
                message["headers"] += self._rates.headers(self._scope)
        elif kind in BODY_MESSAGES:
            self.whole = not message.get("more_body", False)
        elif kind == "websocket.close":
            self.status = 403 if self.status == STATUS_CLIENT_DISCONNECTED else self.status
            self.whole = True
        await self._send(message)


def _with_request_id(headers: Any, request_id: bytes) -> list[tuple[bytes, bytes]]:
    name = REQUEST_ID_HEADER.encode()
    return [*(header for header in headers if header[0].lower() != name), (name, request_id)]


def route_template_of(scope: Scope) -> str:
    """The template of the matched route: each parameter by name instead of value."""
    if "endpoint" not in scope:
        return NO_ROUTE
    path: str = scope["path"]
    names: dict[str, str] = {}
    for name, value in scope.get("path_params", {}).items():
        names[str(value)] = f"{{{name}}}"
        if "/" in str(value):
            path = path.replace(value, names[value])
    return "/".join(names.get(segment, segment) for segment in path.split("/"))


def _key_id_field(scope: Scope) -> dict[str, str]:
    id = request_key_id(scope["state"])
    return {"key_id": id} if id else {}
