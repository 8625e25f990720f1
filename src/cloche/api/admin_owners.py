"""`/admin/owners`: forgetting one. For admins."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cloche import errors
from cloche.api.auth import Gatekeeper
from cloche.api.erasing import Erasing
from cloche.api.http import Dialect, Edge
from cloche.api.system import json_reply
from cloche.api.witness import forgotten


class AdminOwners:
    def __init__(self, dialect: Dialect, erasing: Erasing, gatekeeper: Gatekeeper):
        self._erasing = erasing
        self._gatekeeper = gatekeeper
        self.routes = [Route("/admin/owners/{owner}", Edge(dialect, self.erase), methods=["DELETE"])]

    async def erase(self, request: Request) -> Response:
        """Harmless for an owner who has nothing."""
        self._gatekeeper.admit_admin(request)
        owner, audit = request.path_params["owner"], request.query_params.get("audit", "false")
        self._erasing.check(owner)
        if audit not in ("true", "false"):
            raise errors.InvalidRequest("audit must be true or false: whether the audit log forgets the name, too")
        if audit == "true":
            forgotten(request.scope, owner, await self._erasing.pseudonym(owner))
        return json_reply(await self._erasing.erase(owner, forget=audit == "true"))
