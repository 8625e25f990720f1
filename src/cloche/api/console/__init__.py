"""The console, `/ui`: pages for people, over the same engine and behind the same keys.

Without a session there is only the login page and the console's own files. With one, the pages' scripts use
the common dialects: `/ui/api/v1` is `/api/v1`, `/ui/v1` is `/v1`, `/ui/admin` is `/admin`, each for the
session's owner.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from cloche import errors
from cloche.api.auth import CONSOLE_DIALECT_STATE
from cloche.api.console.context import AdminReadAudit, ConsoleContext, ConsolePage, ConsoleVisitor
from cloche.api.console.login import ConsoleLogin, safe_page_of_url
from cloche.api.console.security import ConsoleAuth, HardenedSend
from cloche.api.console.statics import STATIC_PREFIX as STATIC
from cloche.api.dialect import describe_missing_route, dialect_route, json_reply
from cloche.api.http import DialectEndpoint, Handler, request_id, status_of
from cloche.protocol import responses

# Each has `pages(context) -> list[ConsolePage]`.
PAGE_MODULES = (
    "start",
    "health",
    "playground",
    "sandboxes",
    "templates",
    "network",
    "requests",
    "keys",
    "usage",
    "audit",
)


def load_pages(context: ConsoleContext) -> list[ConsolePage]:
    found = []
    for name in PAGE_MODULES:
        found += import_module(f"{__name__}.{name}").pages(context)
    return found


class Console:
    """The console's ASGI application. `behind` are the scripts' dialects, by the first word of their paths."""

    def __init__(self, context: ConsoleContext, behind: Mapping[str, ASGIApp]):
        self.context = context
        self.auth = ConsoleAuth(context)
        self.login = ConsoleLogin(context, self.auth)
        self._looks = AdminReadAudit(context.engine.audit_log.record)
        self._behind = dict(behind)
        routes = [
            dialect_route(self, "GET", "/ui/login", self.login.show),
            dialect_route(self, "POST", "/ui/login", self.login.enter),
            dialect_route(self, "GET", "/ui/login/state", self.login.state),
            dialect_route(self, "POST", "/ui/login/links", self.login.link),
            dialect_route(self, "POST", "/ui/logout", self.login.leave),
            dialect_route(self, "GET", STATIC + "{name:path}", context.statics.answer),
            *(
                dialect_route(self, each.methods, "/ui" + each.path, self._guard_page(each))
                for each in load_pages(context)
            ),
            dialect_route(self, "GET", "/ui", _redirect_home),
        ]
        self._router = Router(routes, redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.context.statics.ready()
        hardened = HardenedSend(scope, send)
        path: str = scope["path"]
        dialect = path.removeprefix("/ui/").partition("/")[0]
        if dialect in self._behind:
            hardened.make_inert()
            scope["state"][CONSOLE_DIALECT_STATE] = dialect
            await self._pass_on(self._behind[dialect], scope, receive, hardened)
        elif scope["type"] == "http":
            await self._answer_page(scope, receive, hardened)
        else:
            await WebSocket(scope, receive, hardened).close()

    async def _answer_page(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # makes the router raise what it would else answer in its own words
        try:
            await self._router(scope, receive, send)
        except HTTPException as error:
            await DialectEndpoint(self, _missing_page(error))(scope, receive, send)

    async def _pass_on(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request to a dialect, as the session's owner."""
        connection = HTTPConnection(scope)
        try:
            visitor = self.auth.admit_script(connection)
        except errors.ClocheError as error:
            await self._refuse_request(error, scope, receive, send)
            return
        self.auth.rewrite_for_dialect(scope, visitor)
        await app(scope, receive, send)

    async def _refuse_request(self, error: errors.ClocheError, scope: Scope, receive: Receive, send: Send) -> None:
        reply = self.render_error(error, Request({**scope, "type": "http", "method": scope.get("method", "GET")}))
        if scope["type"] == "websocket":
            await WebSocket(scope, receive, send).send_denial_response(reply)
        else:
            await reply(scope, receive, send)

    def _guard_page(self, page: ConsolePage) -> Handler:
        async def answer(request: Request) -> Response:
            request, visitor = await self.auth.admit(request)
            if page.admin and not visitor.is_admin:
                raise errors.Forbidden("this page is for admins: log in with a key that has the role admin")
            response = await page.handler(request, visitor)
            self._looks.record(request, visitor, page)
            return response

        return answer

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        """A page for people, JSON for scripts. A page request without a session is redirected to the login page."""
        status = status_of(error)
        if request.headers.get("hx-request"):
            return _htmx_error(error, status, request)
        if "text/html" not in request.headers.get("accept", ""):
            return _json_error(error, status, request)
        if status == 401:
            return RedirectResponse(login_redirect(request), 303)
        return self._error_page(error, status, request)

    def _error_page(self, error: errors.ClocheError, status: int, request: Request) -> Response:
        visitor = self.auth.known(request)
        return self.context.render(
            request, visitor, "error.html", status_code=status, status=status, error=error, id=request_id(request)
        )


def login_redirect(request: Request) -> str:
    """The address of the login page, with the way back to this page."""
    wanted = request.scope["path"] if request.method == "GET" else "/ui/"
    query = request.scope.get("query_string", b"").decode("latin-1")
    return login_url(f"{wanted}?{query}" if query and wanted != "/ui/" else wanted)


def login_url(place: str) -> str:
    return "/ui/login?next=" + quote(place, safe="/")


def _htmx_error(error: errors.ClocheError, status: int, request: Request) -> Response:
    if status == 401:
        page = safe_page_of_url(request.headers.get("hx-current-url", ""))
        return Response(status_code=401, headers={"hx-redirect": login_url(page)})
    return _json_error(error, status, request)


def _json_error(error: errors.ClocheError, status: int, request: Request) -> Response:
    failure = responses.ErrorResponse(error=responses.to_error_info(error, request_id(request)))
    return json_reply(failure, status)


def _missing_page(error: HTTPException) -> Handler:
    async def answer(request: Request) -> Response:
        raise errors.NotFound(f"the console has no such page: {describe_missing_route(error, request.scope)}")

    return answer


async def _redirect_home(request: Request) -> Response:
    return RedirectResponse("/ui/", 303)


__all__ = ["Console", "ConsoleContext", "ConsolePage", "ConsoleVisitor"]
