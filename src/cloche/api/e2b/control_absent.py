"""What E2B has and this server does not have yet: each says so. Nothing pretends."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from cloche.api.e2b.desk import Desk
from cloche.api.e2b.replies import NotOffered

PAUSE = "this server cannot pause sandboxes yet; give it a longer timeout instead"
FORK = "this server cannot fork sandboxes yet; create another one"
SNAPSHOT = "this server has no snapshots yet; copy files out to keep them"
BUILD = "templates are built with `cloche template build` on the server's machine, not over this API"
VOLUME = "this server has no volumes yet; write files into the sandbox instead"
SECRET = "this server keeps no secrets; give their values with a sandbox's network.rules, where programs never see them"
TEAM = "this server has no teams: a key belongs to an owner; `cloche key list` on the server's machine shows them"

_OF_A_SANDBOX = (
    ("POST", "/sandboxes/{id}/pause", PAUSE),
    ("POST", "/sandboxes/{id}/fork", FORK),
    ("POST", "/sandboxes/{id}/snapshots", SNAPSHOT),
)
_OF_NOBODY = (
    ("GET", "/snapshots", SNAPSHOT),
    ("POST", "/templates", BUILD),
    ("POST", "/v2/templates", BUILD),
    ("POST", "/v3/templates", BUILD),
    ("POST", "/templates/tags", BUILD),
    ("DELETE", "/templates/tags", BUILD),
    ("POST", "/templates/{rest:path}", BUILD),
    ("PATCH", "/templates/{rest:path}", BUILD),
    ("POST", "/v2/templates/{rest:path}", BUILD),
    ("PATCH", "/v2/templates/{rest:path}", BUILD),
    ("GET", "/templates/{rest:path}", BUILD),  # of its builds and their files
    *((method, f"/volumes{rest}", VOLUME) for method in ("GET", "POST", "DELETE") for rest in ("", "/{rest:path}")),
    *((method, "/volumecontent/{rest:path}", VOLUME) for method in ("GET", "POST", "PUT", "PATCH", "DELETE")),
    *((method, f"/secrets{rest}", SECRET) for method in ("GET", "POST", "DELETE") for rest in ("", "/{rest:path}")),
    ("GET", "/teams", TEAM),
    ("GET", "/teams/{rest:path}", TEAM),
)


def routes(desk: Desk) -> list[BaseRoute]:
    plane = ControlAbsent(desk)
    return [
        *(desk.route(method, path, partial(plane.of_a_sandbox, why=why)) for method, path, why in _OF_A_SANDBOX),
        *(desk.route(method, path, partial(plane.of_nobody, why=why)) for method, path, why in _OF_NOBODY),
    ]


class ControlAbsent:
    def __init__(self, desk: Desk):
        self._desk = desk

    async def of_a_sandbox(self, request: Request, *, why: str) -> Response:
        await self._desk.sandbox(request)  # one that is not there is the more useful answer
        raise NotOffered(why)

    async def of_nobody(self, request: Request, *, why: str) -> Response:
        self._desk.owner(request)
        raise NotOffered(why)
