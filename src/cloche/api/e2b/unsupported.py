"""What E2B has and this server does not have yet: each says so. Nothing pretends."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from cloche.api.e2b.context import Desk
from cloche.api.e2b.replies import NotOffered

BUILD = "this server builds templates as clients from 2.0 on ask for it (POST /v3/templates): use a newer one"
PUBLISH = "templates that are built by API are their owner's alone on this server; they cannot be made public"
SECRET = "this server keeps no secrets; give their values with a sandbox's network.rules, where programs never see them"
TEAM = "this server has no teams: a key belongs to an owner; `cloche key list` on the server's machine shows them"

_ABSENT = (
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


def routes(desk: Desk) -> list[BaseRoute]:
    plane = ControlAbsent(desk)
    return [desk.route(method, path, partial(plane.refuse, why=why)) for method, path, why in _ABSENT]


class ControlAbsent:
    def __init__(self, desk: Desk):
        self._desk = desk

    async def refuse(self, request: Request, *, why: str) -> Response:
        self._desk.owner(request)
        raise NotOffered(why)
