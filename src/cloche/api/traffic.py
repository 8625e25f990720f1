"""Every request, as the log and the metrics see it: by its route's template, never by what somebody typed."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloche.api.http import CUT_OFF, REQUEST_ID, request_id_of
from cloche.api.rate_limits import RateLimits
from cloche.api.whose import SESSION, TOKEN, key_of, owner_of
from cloche.api.witness import Witness
from cloche.engine.principal import act_for
from cloche.telemetry import Histogram, log

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0, 300.0)
UNMATCHED = "-"  # the route of a request that met none, or that a program inside a sandbox answered
LEFT = 499  # the status of a request whose client left before it was answered
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
            id = key_of(state)
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
        self.status = LEFT
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
            self.status = 403 if self.status == LEFT else self.status
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
    id = key_of(scope["state"])
    return {"key_id": id} if id else {}
