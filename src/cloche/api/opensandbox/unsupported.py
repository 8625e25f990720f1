"""What OpenSandbox has and this server does not have yet: each says so. Nothing pretends."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from cloche import errors
from cloche.api.http import Dialect, Edge, Handler
from cloche.api.opensandbox.context import Desk
from cloche.api.opensandbox.execd import BASE
from cloche.api.opensandbox.replies import NotOffered

SEE = "; docs/dialects/opensandbox.md says what there is"
TEMPLATE = "templates are built with `cloche template build` on the server's machine, not over this API"
METADATA = "metadata cannot be changed yet; give them when a sandbox is made"
DIAGNOSTICS = "this server has no diagnostics over this API; `cloche logs` on the server's machine shows its events"
POOL = "this server keeps its own pools, sized by pool.ready in its configuration"
EXECD = "of execd there are code and contexts only yet" + SEE
PORT = "only the ports of execd and of the network policy can be reached by this API yet" + SEE
OTHER = "not offered yet" + SEE

_PATHS = (
    ("/sandboxes/{id}/metadata", METADATA),
    ("/sandboxes/{id}/diagnostics/{rest:path}", DIAGNOSTICS),
    ("/templates", TEMPLATE),
    ("/templates/{rest:path}", TEMPLATE),
    ("/pools", POOL),
    ("/pools/{rest:path}", POOL),
    ("/metrics/events", OTHER),
    ("/health", OTHER),
    ("/version", OTHER),
)
_OF_EXECD = ("command", "session", "files", "directories", "metrics", "pty", "v1")
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


def routes(desk: Desk, execd: Dialect) -> list[BaseRoute]:
    return [
        *(_route(path, desk, partial(_of_owners, desk, why=why)) for path, why in _PATHS),
        *(each for name in _OF_EXECD for each in _below(f"{BASE}/{name}", execd, partial(_refuse, why=EXECD))),
        *_below(BASE, execd, _nothing),
        *_below("/sandboxes/{id}/proxy/{port}", desk, partial(_refuse, why=PORT)),
    ]


def _below(path: str, dialect: Dialect, handler: Handler) -> list[Route]:
    return [_route(each, dialect, handler) for each in (path, path + "/{rest:path}")]


def _route(path: str, dialect: Dialect, handler: Handler) -> Route:
    return Route(path, Edge(dialect, handler), methods=_METHODS)


async def _of_owners(desk: Desk, request: Request, *, why: str) -> Response:
    if "id" in request.path_params:
        await desk.sandbox(request)  # one that is not there is the more useful answer
    else:
        desk.owner(request)
    raise NotOffered(why)


async def _refuse(request: Request, *, why: str) -> Response:
    raise NotOffered(why)


async def _nothing(request: Request) -> Response:
    raise errors.NotFound("execd: there is no such path" + SEE)
