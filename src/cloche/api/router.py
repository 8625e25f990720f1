"""A router that looks at few routes: those whose paths are as long as the request's, and end as it ends."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.routing import BaseRoute, Route, Router, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send


class Paths:
    """Answers as Starlette's Router does with the same routes, in their order, without redirections.

    That one tries route after route, which of many takes longer than the rest of a request's way through it.
    """

    def __init__(self, routes: Sequence[BaseRoute], default: ASGIApp | None = None):
        ends = {_end(path) for path in map(_path_of, routes) if path is not None}
        self._by_end = {end: _router(routes, default, end) for end in ends}
        self._rest = Router([route for route in routes if _path_of(route) is None], False, default)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        count, last = _end(scope["path"]) if scope["type"] != "lifespan" else (0, "")
        found = self._by_end.get((count, last)) or self._by_end.get((count, "{}")) or self._rest
        await found(scope, receive, send)


def _router(routes: Sequence[BaseRoute], default: ASGIApp | None, end: tuple[int, str]) -> Router:
    fitting = {end, (end[0], "{}")}
    paths = [(route, _path_of(route)) for route in routes]
    return Router([route for route, path in paths if path is None or _end(path) in fitting], False, default)


def _path_of(route: BaseRoute) -> str | None:
    """Its template; None where it can be of any length."""
    if not isinstance(route, Route | WebSocketRoute) or ":path}" in route.path:
        return None
    return route.path


def _end(path: str) -> tuple[int, str]:
    """How many segments it has, and the last one; of a template's, whether that can be anything."""
    last = path.rpartition("/")[2]
    return path.count("/"), "{}" if "{" in last else last
