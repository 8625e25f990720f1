"""A router indexed by the number of path segments and the last segment, so that it tries few routes."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.routing import BaseRoute, Route, Router, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send


class PathIndexRouter:
    """Responds as Starlette's Router does with the same routes, in their order, without redirects.

    Starlette's tries every route in turn, which with many routes takes longer than the rest of its work.
    """

    def __init__(self, routes: Sequence[BaseRoute], default: ASGIApp | None = None):
        ends = {_path_end_of(path) for path in map(_path_template_of, routes) if path is not None}
        self._by_end = {end: _build_router_for_end(routes, default, end) for end in ends}
        self._rest = Router([route for route in routes if _path_template_of(route) is None], False, default)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        count, last = _path_end_of(scope["path"]) if scope["type"] != "lifespan" else (0, "")
        found = self._by_end.get((count, last)) or self._by_end.get((count, "{}")) or self._rest
        await found(scope, receive, send)


def _build_router_for_end(routes: Sequence[BaseRoute], default: ASGIApp | None, end: tuple[int, str]) -> Router:
    fitting = {end, (end[0], "{}")}
    paths = [(route, _path_template_of(route)) for route in routes]
    return Router([route for route, path in paths if path is None or _path_end_of(path) in fitting], False, default)


def _path_template_of(route: BaseRoute) -> str | None:
    """The route's path template; None if it can have any length."""
    if not isinstance(route, Route | WebSocketRoute) or ":path}" in route.path:
        return None
    return route.path


def _path_end_of(path: str) -> tuple[int, str]:
    """The number of segments and the last segment; `{}` if that is a parameter."""
    last = path.rpartition("/")[2]
    return path.count("/"), "{}" if "{" in last else last
