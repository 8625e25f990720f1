"""Every request, as the log and the metrics see it: by its route's template, never by what somebody typed."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloche.api.http import REQUEST_ID, request_id_of
from cloche.model import Principal
from cloche.telemetry import Histogram, log

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0, 300.0)
UNMATCHED = "-"  # the route of a request that met none, or that a program inside a sandbox answered
LEFT = 499  # the status of a request whose client left before it was answered
SWITCHED = 101
BEGINNINGS = frozenset({"http.response.start", "websocket.accept", "websocket.http.response.start"})
BODIES = frozenset({"http.response.body", "websocket.http.response.body"})


class Traffic:
    """Counts and logs requests, and gives every answer its request's id."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by dialect and status
        self.seconds: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(SECONDS))  # by dialect

    async def follow(self, dialect: str, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Has `app` answer the request."""
        began_at = time.perf_counter()
        answer = Answer(send, request_id_of(scope))
        try:
            await app(scope, receive, answer)
        finally:
            self._ended(dialect, scope, answer, time.perf_counter() - began_at)

    def _ended(self, dialect: str, scope: Scope, answer: Answer, seconds: float) -> None:
        self.requests[dialect, answer.status] += 1
        self.seconds[dialect].observe(seconds)
        log.info(
            "request.ended",
            method=scope.get("method", "WEBSOCKET"),
            route=route_of(scope),
            status=answer.status,
            ms=round(seconds * 1000, 2),
            request=request_id_of(scope),
            dialect=dialect,
            **_who(scope),
            **({} if answer.whole else {"cut_off": True}),
        )


class Answer:
    """A `send` that adds the request's id, and remembers what was sent."""

    def __init__(self, send: Send, request_id: str):
        self.status = LEFT
        self.whole = False
        self._send = send
        self._request_id = request_id.encode()

    async def __call__(self, message: Message) -> None:
        kind = message["type"]
        if kind in BEGINNINGS:
            self.status = message.get("status", SWITCHED)
            self.whole = kind == "websocket.accept"  # either side may end that when it likes
            message["headers"] = _with_id(message.get("headers", ()), self._request_id)
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
    principal = scope["state"].get("principal")
    return {"key_id": principal.key_id} if isinstance(principal, Principal) and principal.key_id else {}
