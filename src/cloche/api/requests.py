"""Every request, as the log and the metrics see it: by its route's template, never by what somebody typed."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloche.api.auth import BEHIND, PAYER, SESSION, TOKEN, owner_of, request_key_id
from cloche.api.http import CUT_OFF, REQUEST_ID, request_id_of
from cloche.engine.operations.audit import NONE, Trail
from cloche.engine.principal import act_for, acting
from cloche.engine.quotas.quotas import Quotas
from cloche.engine.quotas.usage import Rate
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import Principal
from cloche.telemetry import Histogram, log

# What of a request is told to the audit log: that it was refused, or what was kept, read or removed by it.
#
# What is done to sandboxes the engine tells itself, whatever the dialect; this is for the rest: what the gateway and
# LibreChat keep, what is read of snapshots, volumes and templates, and what admins do.

REFUSED = frozenset({401, 403, 404, 429})
VERBS = {"GET": "read", "HEAD": "read", "DELETE": "removed", "POST": "made", "PUT": "changed", "PATCH": "changed"}
WHOLE = frozenset({"v1", "librechat", "admin"})  # dialects of which everything is told
READ = frozenset({"snapshots", "volumes", "templates", "builds", "logs"})  # of the others: what is read of these
UNTOLD = frozenset({"models", "health", "exec"})  # they keep nothing; what `exec` runs the engine tells
PLACES = frozenset({"api", "v1", "v2", "v3", "e2b", "admin", "librechat", "opensandbox"})  # in paths, before what it is
DEEDS: Mapping[str, str] = {"upload": "files.made", "download": "files.read"}  # LibreChat's paths are verbs
OWNER = "owner"  # as routes call the parameter that is one's name
FORGOTTEN = "forgotten_owner"  # in a request's state: a name, and the pseudonym that stands for it

_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class Witness:
    def __init__(self, trail: Trail):
        self._trail = trail

    def ended(self, dialect: str, scope: Scope, route: str, status: int) -> None:
        """A request was answered, by that route's template. Never waits."""
        dialect = scope["state"].get(BEHIND, dialect)
        if scope["state"].get("answered_inside"):
            return
        method = scope.get("method", "WEBSOCKET")
        if status in REFUSED:
            about = f"{method} {route}" if route != "-" else dialect
            self._trail.note("request.refused", _owner(scope), outcome=str(status), about=about, who=acting() or NONE)
        elif status < 400 and (what := _deed(dialect, method, route, _is_admin(scope))) is not None:
            whose, who = _named(scope) or _owner(scope), _known(scope, acting())
            self._trail.note(what, whose, id=id_of(scope), about=f"{method} {route}", who=who)


def _deed(dialect: str, method: str, route: str, admin: bool) -> str | None:
    """What was done, in words of ours; None where it is not told here."""
    words = [word for word in route.split("/") if word and not word.startswith("{")]
    nouns = [word for word in words if word not in PLACES]
    if not nouns or nouns[0] in UNTOLD:
        return None
    if dialect == "admin":
        return f"admin.{nouns[0]}.{VERBS.get(method, 'used')}"
    if dialect not in WHOLE:
        if admin and route == "/api/v1/sandboxes" and method == "GET":  # who sees those of all owners
            return "admin.sandboxes.read"
        return f"{nouns[0]}.read" if nouns[0] in READ and method in ("GET", "HEAD") else None
    noun = "gateway" if dialect == "v1" else dialect
    return f"{noun}.{DEEDS.get(nouns[0]) or '.'.join((*nouns[:3], VERBS.get(method, 'used')))}"


def _owner(scope: Scope) -> str:
    principal = scope["state"].get("principal")
    return principal.owner if isinstance(principal, Principal) else ""


def _is_admin(scope: Scope) -> bool:
    principal = scope["state"].get("principal")
    return isinstance(principal, Principal) and principal.role == "admin"


def id_of(scope: Scope) -> str:
    """The first thing that the path names, but for owners. What is no id of ours is not repeated."""
    first = next((each for name, each in scope.get("path_params", {}).items() if name != OWNER), "")
    return first if isinstance(first, str) and _ID.fullmatch(first) else ""


def _named(scope: Scope) -> str:
    """The owner that the path names, if it does: never as an id, as the log can forget owners only."""
    owner = scope.get("path_params", {}).get(OWNER)
    if not isinstance(owner, str):
        return ""
    return str(scope["state"].get(FORGOTTEN, {}).get(owner, owner))


def _known(scope: Scope, who: Principal | None) -> Principal | None:
    """Who asked; by a pseudonym, if it was them whom the log forgets."""
    pseudonym = scope["state"].get(FORGOTTEN, {}).get(who.owner) if who is not None else None
    return who if who is None or pseudonym is None else msgspec.structs.replace(who, owner=pseudonym)


def forgotten(scope: Scope, owner: str, pseudonym: str) -> None:
    """By that request, the log forgets the owner: what it says of the request itself, it says of the pseudonym."""
    scope["state"][FORGOTTEN] = {owner: pseudonym}


# What is left of quotas, in every answer to whoever has any: `RateLimit-Policy` and `RateLimit`.
#
# As draft-ietf-httpapi-ratelimit-headers has them: `"executions";q=600;w=60` and `"executions";r=588;t=41`. What
# counts
# for as long as it is there, and not for some time, has neither a window nor a reset.

POLICY_HEADER, LIMIT_HEADER = b"ratelimit-policy", b"ratelimit"


def bill(scope: Scope, sandbox: Sandbox) -> None:
    """For a request with a secret of that very sandbox instead of a key: it is its owner's."""
    scope["state"][PAYER] = sandbox.charge.owner, sandbox.charge.key_id


class RateLimits:
    def __init__(self, quotas: Quotas):
        self._quotas = quotas

    def headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """Of whoever asks, and never of anybody else; none where nobody is known, or there are no quotas."""
        state = scope.get("state", {})
        principal = state.get("principal")
        payer = (principal.owner, principal.key_id) if isinstance(principal, Principal) else state.get(PAYER)
        rates = () if payer is None else self._quotas.rates(*payer)
        return encode(rates) if rates else []


def encode(rates: list[Rate]) -> list[tuple[bytes, bytes]]:
    policy = ", ".join(f'"{each.name}";q={each.quota}{_parameter("w", each.window_seconds)}' for each in rates)
    left = ", ".join(f'"{each.name}";r={each.left}{_parameter("t", each.reset_seconds)}' for each in rates)
    return [(POLICY_HEADER, policy.encode()), (LIMIT_HEADER, left.encode())]


def _parameter(name: str, value: int | None) -> str:
    return "" if value is None else f";{name}={value}"


SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0, 300.0)
UNMATCHED = "-"  # the route of a request that met none, or that a program inside a sandbox answered
CLIENT_CLOSED_REQUEST = 499  # the status of a request whose client left before it was answered
SWITCHED = 101
CUT_OFF_SECONDS = 5.0
BEGINNINGS = frozenset({"http.response.start", "websocket.accept", "websocket.http.response.start"})
BODIES = frozenset({"http.response.body", "websocket.http.response.body"})


class Traffic:
    """Counts and logs requests, and gives every answer its request's id, and what is left of quotas."""

    def __init__(self, witness: Witness | None = None, rates: RateLimits | None = None) -> None:
        self._rates = rates
        self._witness = witness
        self._answering: dict[asyncio.Task[Any] | None, Scope] = {}
        self._cut: set[asyncio.Task[Any] | None] = set()  # of those, what was cut off
        self.requests: Counter[tuple[str, int]] = Counter()  # by dialect and status
        self.seconds: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(SECONDS))  # by dialect

    async def follow(self, dialect: str, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Has `app` answer the request."""
        began_at = time.perf_counter()
        task = asyncio.current_task()
        self._answering[task] = scope
        act_for(None)  # the task of a pipelined request was made in that of the one before it
        answer = Answer(send, scope, self._rates)
        try:
            await app(scope, receive, answer)
        except asyncio.CancelledError:
            if task not in self._cut:
                raise  # else the server closes what it sees unfinished
        finally:
            del self._answering[task]
            self._cut.discard(task)
            self._ended(dialect, scope, answer, time.perf_counter() - began_at)

    async def cut_off(self, owner: str) -> None:
        """Ends the requests of that owner that are being answered, but for the one that asks for it."""
        theirs = self._cut_off_where(lambda state: owner_of(state) == owner)
        if theirs:
            await asyncio.wait(theirs, timeout=CUT_OFF_SECONDS)

    def keep(self, keys: set[str]) -> None:
        """Ends what is being answered to whoever came with another key than these, by its id. Does not wait for it.

        Who came with a token, or by the control socket, has no key. Nor has who has a sandbox's own secret.
        """

        def has_stopped(state: Mapping[str, Any]) -> bool:
            id = request_key_id(state)
            return bool(id) and id not in keys and not id.startswith(TOKEN)

        self._cut_off_where(has_stopped)

    def leave(self, session: str) -> None:
        """Ends what is being answered to a session of the console that was closed. Does not wait for it."""
        self._cut_off_where(lambda state: state.get(SESSION) == session)

    def _cut_off_where(self, meant: Callable[[Mapping[str, Any]], bool]) -> list[asyncio.Task[Any]]:
        own = asyncio.current_task()
        found = [
            task
            for task, scope in self._answering.items()
            if task is not None and task is not own and task not in self._cut and meant(scope["state"])
        ]
        self._cut.update(found)
        for task in found:
            self._answering[task]["state"][CUT_OFF] = True
            task.cancel()
        return found

    def _ended(self, dialect: str, scope: Scope, answer: Answer, seconds: float) -> None:
        self.requests[dialect, answer.status] += 1
        self.seconds[dialect].observe(seconds)
        route = route_of(scope)
        if self._witness is not None:
            self._witness.ended(dialect, scope, route, answer.status)
        log.info(
            "request.ended",
            method=scope.get("method", "WEBSOCKET"),
            route=route,
            status=answer.status,
            ms=round(seconds * 1000, 2),
            request=request_id_of(scope),
            dialect=dialect,
            **_who(scope),
            **({} if answer.whole else {"cut_off": True}),
        )


class Answer:
    """A `send` that adds the request's id and what is left of quotas, and remembers what was sent."""

    def __init__(self, send: Send, scope: Scope, rates: RateLimits | None):
        self.status = CLIENT_CLOSED_REQUEST
        self.whole = False
        self._send = send
        self._scope = scope
        self._rates = rates
        self._request_id = request_id_of(scope).encode()

    async def __call__(self, message: Message) -> None:
        kind = message["type"]
        if kind in BEGINNINGS:
            self.status = message.get("status", SWITCHED)
            self.whole = kind == "websocket.accept"  # either side may end that when it likes
            message["headers"] = _with_id(message.get("headers", ()), self._request_id)
            if self._rates is not None:
                message["headers"] += self._rates.headers(self._scope)
        elif kind in BODIES:
            self.whole = not message.get("more_body", False)
        elif kind == "websocket.close":
            self.status = 403 if self.status == CLIENT_CLOSED_REQUEST else self.status
            self.whole = True
        await self._send(message)


def _with_id(headers: Any, request_id: bytes) -> list[tuple[bytes, bytes]]:
    name = REQUEST_ID.encode()
    return [*(header for header in headers if header[0].lower() != name), (name, request_id)]


def route_of(scope: Scope) -> str:
    """The template of the route that answered: each parameter by its name instead of its value."""
    if "endpoint" not in scope:
        return UNMATCHED
    path: str = scope["path"]
    names: dict[str, str] = {}
    for name, value in scope.get("path_params", {}).items():
        names[str(value)] = f"{{{name}}}"
        if "/" in str(value):
            path = path.replace(value, names[value])
    return "/".join(names.get(segment, segment) for segment in path.split("/"))


def _who(scope: Scope) -> dict[str, str]:
    id = request_key_id(scope["state"])
    return {"key_id": id} if id else {}
