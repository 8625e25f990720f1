"""The console, `/ui`: pages for people, over the same engine and behind the same keys.

Without a session there is the login page and the console's own files, and nothing else. Behind one, the pages' scripts
speak the dialects that everybody speaks: `/ui/api/v1` is `/api/v1`, `/ui/v1` is `/v1`, `/ui/admin` is `/admin`, each
for the session's owner.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from cloche import errors
from cloche.api.auth import BEHIND
from cloche.api.console.context import House, Looks, Page, Visitor
from cloche.api.console.login import Login, place_at
from cloche.api.console.security import Hardened, Porch
from cloche.api.console.statics import PREFIX as STATIC
from cloche.api.http import Edge, Handler, request_id, status_of, what_is_missing
from cloche.protocol import responses

# Each has `pages(house) -> list[Page]`.
MODULES = ("start", "health", "playground", "sandboxes", "templates", "network", "requests", "keys", "usage", "audit")


def pages_of(house: House) -> list[Page]:
    found = []
    for name in MODULES:
        found += import_module(f"{__name__}.{name}").pages(house)
    return found


class Ui:
    """`behind` are the dialects that the pages' scripts speak, by the first word of their paths."""

    def __init__(self, house: House, behind: Mapping[str, ASGIApp]):
        self.house = house
        self.porch = Porch(house)
        self.login = Login(house, self.porch)
        self._looks = Looks(house.engine.trail.note)
        self._behind = dict(behind)
        routes = [
            Route("/ui/login", Edge(self, self.login.show), methods=["GET"]),
            Route("/ui/login", Edge(self, self.login.enter), methods=["POST"]),
            Route("/ui/login/state", Edge(self, self.login.state), methods=["GET"]),
            Route("/ui/login/links", Edge(self, self.login.link), methods=["POST"]),
            Route("/ui/logout", Edge(self, self.login.leave), methods=["POST"]),
            Route(STATIC + "{name:path}", Edge(self, house.statics.answer), methods=["GET"]),
            *(
                Route("/ui" + each.path, Edge(self, self._guarded(each)), methods=each.methods)
                for each in pages_of(house)
            ),
            Route("/ui", Edge(self, _go_on), methods=["GET"]),
        ]
        self._router = Router(routes, redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.house.statics.ready()
        hardened = Hardened(scope, send)
        path: str = scope["path"]
        dialect = path.removeprefix("/ui/").partition("/")[0]
        if dialect in self._behind:
            hardened.make_inert()
            scope["state"][BEHIND] = dialect
            await self._pass_on(self._behind[dialect], scope, receive, hardened)
        elif scope["type"] == "http":
            await self._answer(scope, receive, hardened)
        else:
            await WebSocket(scope, receive, hardened).close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # makes the router raise what it would else answer in its own words
        try:
            await self._router(scope, receive, send)
        except HTTPException as error:
            await Edge(self, _absent(error))(scope, receive, send)

    async def _pass_on(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """To a dialect, as the session's owner."""
        connection = HTTPConnection(scope)
        try:
            visitor = self.porch.admit_script(connection)
        except errors.ClocheError as error:
            await self._refuse(error, scope, receive, send)
            return
        self.porch.put_on(scope, visitor)
        await app(scope, receive, send)

    async def _refuse(self, error: errors.ClocheError, scope: Scope, receive: Receive, send: Send) -> None:
        reply = self.render_error(error, Request({**scope, "type": "http", "method": scope.get("method", "GET")}))
        if scope["type"] == "websocket":
            await WebSocket(scope, receive, send).send_denial_response(reply)
        else:
            await reply(scope, receive, send)

    def _guarded(self, page: Page) -> Handler:
        async def answer(request: Request) -> Response:
            request, visitor = await self.porch.admit(request)
            if page.admin and not visitor.is_admin:
                raise errors.Forbidden("this page is for admins: log in with a key that has the role admin")
            response = await page.handler(request, visitor)
            self._looks.note(request, visitor, page)
            return response

        return answer

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        """A page for people, JSON for scripts. Who has no session goes to the login page."""
        status = status_of(error)
        if request.headers.get("hx-request"):
            return _for_htmx(error, status, request)
        if "text/html" not in request.headers.get("accept", ""):
            return _for_scripts(error, status, request)
        if status == 401:
            return RedirectResponse(login_of(request), 303)
        return self._page_of(error, status, request)

    def _page_of(self, error: errors.ClocheError, status: int, request: Request) -> Response:
        visitor = self.porch.known(request)
        return self.house.render(
            request, visitor, "error.html", status_code=status, status=status, error=error, id=request_id(request)
        )


def login_of(request: Request) -> str:
    """The login page, from which one comes back."""
    wanted = request.scope["path"] if request.method == "GET" else "/ui/"
    query = request.scope.get("query_string", b"").decode("latin-1")
    return login_for(f"{wanted}?{query}" if query and wanted != "/ui/" else wanted)


def login_for(place: str) -> str:
    return "/ui/login?next=" + quote(place, safe="/")


def _for_htmx(error: errors.ClocheError, status: int, request: Request) -> Response:
    if status == 401:
        page = place_at(request.headers.get("hx-current-url", ""))
        return Response(status_code=401, headers={"hx-redirect": login_for(page)})
    return _for_scripts(error, status, request)


def _for_scripts(error: errors.ClocheError, status: int, request: Request) -> Response:
    failure = responses.Failure(error=responses.fault_of(error, request_id(request)))
    return Response(responses.encode(failure), status, media_type="application/json")


def _absent(error: HTTPException) -> Handler:
    async def answer(request: Request) -> Response:
        raise errors.NotFound(f"the console has no such page: {what_is_missing(error, request.scope)}")

    return answer


async def _go_on(request: Request) -> Response:
    return RedirectResponse("/ui/", 303)


__all__ = ["House", "Page", "Ui", "Visitor"]
