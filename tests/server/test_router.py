"""Routes found by their length and end are the routes that a walk through all of them finds."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.routing import Route, Router, WebSocketRoute
from starlette.types import Receive, Scope, Send

from cloche.api.dialect import PathIndexRouter


class _Named:
    """An endpoint that says which one it is."""

    def __init__(self, name: str):
        self.name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"by": self.name, "with": scope.get("path_params", {})})


ROUTES = [
    Route("/boxes", _Named("list"), methods=["GET"]),
    Route("/boxes", _Named("create"), methods=["POST"]),
    Route("/boxes/all", _Named("all"), methods=["GET"]),
    Route("/boxes/{id}", _Named("one"), methods=["GET"]),
    Route("/boxes/{id}/run", _Named("run"), methods=["POST"]),
    Route("/boxes/{id}/{verb}", _Named("verb"), methods=["POST"]),
    Route("/boxes/{id}/files/{path:path}", _Named("file"), methods=["GET"]),
    WebSocketRoute("/boxes/{id}/run", _Named("socket")),
    Route("/boxes/{id}/run", _Named("wrong method")),
    Route("/{rest:path}", _Named("rest"), methods=["PUT"]),
]
PATHS = ("/", "", "/boxes", "/boxes/", "/boxes/all", "/boxes/1", "/boxes/1/run", "/boxes/1/stop", "/boxes/{id}")
PATHS += ("/boxes/1/files/a/b", "/boxes/1/files/", "/boxes/1/run/", "/nowhere", "/a/b/c/d/e", "//", "/boxes//run")


def _answer(router: Any, kind: str, method: str, path: str) -> list[Any]:
    said: list[Any] = []

    async def send(message: Any) -> None:
        said.append(message)

    async def receive() -> Any:
        return {"type": f"{kind}.disconnect"}

    scope = {"type": kind, "method": method, "path": path, "root_path": "", "headers": [], "query_string": b""}
    asyncio.run(router(scope, receive, send))
    return said


@pytest.mark.parametrize("path", PATHS)
def test_the_same_route_answers(path: str):
    nobody = _Named("nobody")
    quick, plain = PathIndexRouter(ROUTES, nobody), Router(ROUTES, redirect_slashes=False, default=nobody)
    for kind, method in (("http", "GET"), ("http", "POST"), ("http", "PUT"), ("http", "PATCH"), ("websocket", "")):
        assert _answer(quick, kind, method, path) == _answer(plain, kind, method, path), (kind, method)
