"""OpenSandbox's routes that this server does not support: each responds with the reason."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from cloche import errors
from cloche.api.http import Dialect, DialectEndpoint, Handler
from cloche.api.opensandbox.context import OpenSandboxContext
from cloche.api.opensandbox.execd import EXECD_PATH
from cloche.api.opensandbox.replies import OpenSandboxUnsupported

SEE_DOCS = "; docs/dialects/opensandbox.md says what there is"
TEMPLATE = "templates are built with `cloche template build` on the server's machine, not over this API"
METADATA = "metadata cannot be changed yet; give them when a sandbox is made"
DIAGNOSTICS = "this server has no diagnostics over this API; `cloche logs` on the server's machine shows its events"
POOL = "this server keeps its own pools, sized by pool.ready in its configuration"
EXECD = "of execd there are code and contexts only yet" + SEE_DOCS
PORT = "only the ports of execd and of the network policy can be reached by this API yet" + SEE_DOCS
OTHER = "not offered yet" + SEE_DOCS

_UNSUPPORTED_PATHS = (
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
_UNSUPPORTED_EXECD_PATHS = ("command", "session", "files", "directories", "metrics", "pty", "v1")
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


def unsupported_routes(api: OpenSandboxContext, execd: Dialect) -> list[BaseRoute]:
    return [
        *(_all_methods_route(path, api, partial(_refuse_after_auth, api, why=why)) for path, why in _UNSUPPORTED_PATHS),
        *(
            each
            for name in _UNSUPPORTED_EXECD_PATHS
            for each in _routes_at_and_below(f"{EXECD_PATH}/{name}", execd, partial(_refuse_unsupported, why=EXECD))
        ),
        *_routes_at_and_below(EXECD_PATH, execd, _raise_no_execd_path),
        *_routes_at_and_below("/sandboxes/{id}/proxy/{port}", api, partial(_refuse_unsupported, why=PORT)),
    ]


def _routes_at_and_below(path: str, dialect: Dialect, handler: Handler) -> list[Route]:
    return [_all_methods_route(each, dialect, handler) for each in (path, path + "/{rest:path}")]


def _all_methods_route(path: str, dialect: Dialect, handler: Handler) -> Route:
    return Route(path, DialectEndpoint(dialect, handler), methods=_METHODS)


async def _refuse_after_auth(api: OpenSandboxContext, request: Request, *, why: str) -> Response:
    if "id" in request.path_params:
        await api.sandbox(request)  # one that is not there is the more useful answer
    else:
        api.owner(request)
    raise OpenSandboxUnsupported(why)


async def _refuse_unsupported(request: Request, *, why: str) -> Response:
    raise OpenSandboxUnsupported(why)


async def _raise_no_execd_path(request: Request) -> Response:
    raise errors.NotFound("execd: there is no such path" + SEE_DOCS)
