"""E2B's routes that this server does not support: each responds with the reason."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from cloche.api.e2b.context import E2bContext
from cloche.api.e2b.replies import E2bUnsupported

BUILD = "this server builds templates as clients from 2.0 on ask for it (POST /v3/templates): use a newer one"
PUBLISH = "templates that are built by API are their owner's alone on this server; they cannot be made public"
SECRET = "this server keeps no secrets; give their values with a sandbox's network.rules, where programs never see them"
TEAM = "this server has no teams: a key belongs to an owner; `cloche key list` on the server's machine shows them"

_UNSUPPORTED_ROUTES = (
    ("POST", "/templates", BUILD),
    ("POST", "/v2/templates", BUILD),
    ("POST", "/templates/{rest:path}", BUILD),
    ("PATCH", "/templates/{rest:path}", PUBLISH),
    ("POST", "/v2/templates/{rest:path}", BUILD),
    ("PATCH", "/v2/templates/{rest:path}", PUBLISH),
    *((method, f"/secrets{rest}", SECRET) for method in ("GET", "POST", "DELETE") for rest in ("", "/{rest:path}")),
    ("GET", "/teams", TEAM),
    ("GET", "/teams/{rest:path}", TEAM),
)


def unsupported_routes(api: E2bContext) -> list[BaseRoute]:
    plane = ControlUnsupported(api)
    return [api.route(method, path, partial(plane.refuse, why=why)) for method, path, why in _UNSUPPORTED_ROUTES]


class ControlUnsupported:
    def __init__(self, api: E2bContext):
        self._api = api

    async def refuse(self, request: Request, *, why: str) -> Response:
        self._api.owner(request)
        raise E2bUnsupported(why)
