"""What stands around the routes of one plane: answers for paths that are not there, and leave for web pages."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloche.api.e2b.replies import error_reply
from cloche.api.http import what_is_missing
from cloche.api.router import Paths

_PREFLIGHT_SECONDS = "7200"


class Plane:
    """The routes of one plane. A path or method that it does not have is answered in E2B's shape."""

    def __init__(self, name: str, routes: Sequence[BaseRoute]):
        self._name = name
        self._router = Paths(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # makes the router raise what it would else answer in its own words
        try:
            await self._router(scope, receive, send)
        except HTTPException as error:
            await self._missing(error, scope)(scope, receive, send)

    def _missing(self, error: HTTPException, scope: Scope) -> Response:
        what = what_is_missing(error, scope)
        response = error_reply(error.status_code, f"{self._name}: {what}; see docs/dialects/e2b.md for what there is")
        response.headers.update(error.headers or {})
        return response


class OpenToPages:
    """Lets any web page call what is behind: it takes a token of the sandbox to do anything there.

    Never around the control plane, which takes a key.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await _preflight(headers)(scope, receive, send)
            return

        async def allowing(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                answer["access-control-allow-origin"] = "*"
                answer["access-control-expose-headers"] = "*"
            await send(message)

        await self._app(scope, receive, allowing)


def _preflight(asked: Headers) -> Response:
    return Response(
        status_code=204,
        headers={
            "access-control-allow-origin": "*",
            "access-control-allow-methods": "GET, HEAD, POST, PUT, PATCH, DELETE",
            # Not `*`, which browsers do not take for `Authorization`.
            "access-control-allow-headers": asked.get("access-control-request-headers", "*"),
            "access-control-max-age": _PREFLIGHT_SECONDS,
        },
    )
