"""`/admin/usage` and `/admin/quotas`: what owners and keys use, and how much they may. For admins."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cloche import errors
from cloche.api.auth import Gatekeeper
from cloche.api.http import Dialect, Edge, whole_body
from cloche.api.system import json_reply
from cloche.config.sections import NAMES, Override
from cloche.engine.quotas.quotas import Quotas
from cloche.model import KIB
from cloche.store.keys import StoredKeys, check_owner
from cloche.store.quotas import Tenant

MAX_ASKED_BYTES = 16 * KIB


class AdminTenants:
    def __init__(self, dialect: Dialect, quotas: Quotas, keys: StoredKeys, gatekeeper: Gatekeeper):
        self._quotas = quotas
        self._keys = keys
        self._gatekeeper = gatekeeper
        one_owner, one_key = "/admin/quotas/{owner}", "/admin/keys/{id}/quota"
        self.routes = [
            Route("/admin/usage", Edge(dialect, self.usage), methods=["GET"]),
            Route("/admin/usage/{owner}", Edge(dialect, self.usage_of_one), methods=["GET"]),
            Route("/admin/quotas", Edge(dialect, self.list), methods=["GET"]),
            *(Route(path, Edge(dialect, self.show), methods=["GET"]) for path in (one_owner, one_key)),
            *(Route(path, Edge(dialect, self.set), methods=["PUT"]) for path in (one_owner, one_key)),
            *(Route(path, Edge(dialect, self.reset), methods=["DELETE"]) for path in (one_owner, one_key)),
        ]

    async def usage(self, request: Request) -> Response:
        self._gatekeeper.admit_admin(request)
        return json_reply(await self._quotas.usage_of_all())

    async def usage_of_one(self, request: Request) -> Response:
        self._gatekeeper.admit_admin(request)
        check_owner(request.path_params["owner"])
        return json_reply(await self._quotas.usage(request.path_params["owner"]))

    async def list(self, request: Request) -> Response:
        """What holds for everybody, and for whom something else does."""
        self._gatekeeper.admit_admin(request)
        own = [self._told(tenant) for tenant in sorted(self._quotas.overrides)]
        return json_reply({"defaults": self._quotas.defaults, "own": own})

    async def show(self, request: Request) -> Response:
        self._gatekeeper.admit_admin(request)
        return json_reply(self._told(await self._tenant(request, revoked=True)))

    async def set(self, request: Request) -> Response:
        """In the place of all that was set before."""
        self._gatekeeper.admit_admin(request)
        tenant = await self._tenant(request)
        override = decode(await whole_body(request, MAX_ASKED_BYTES))
        await self._quotas.set(tenant, override)
        return json_reply(self._told(tenant))

    async def reset(self, request: Request) -> Response:
        self._gatekeeper.admit_admin(request)
        await self._quotas.set(await self._tenant(request, revoked=True), Override())
        return Response(status_code=204)

    async def _tenant(self, request: Request, *, revoked: bool = False) -> Tenant:
        """Raises NotFound for a key that is not there, InvalidRequest for what cannot be an owner."""
        if "id" in request.path_params:
            key = await self._keys.get(request.path_params["id"], revoked=revoked)
            return Tenant(key.owner, key.id)
        check_owner(request.path_params["owner"])
        return Tenant(request.path_params["owner"])

    def _told(self, tenant: Tenant) -> dict[str, Any]:
        return {
            "owner": tenant.owner,
            **({"key_id": tenant.key_id} if tenant.key_id else {}),
            "own": self._quotas.overrides.get(tenant, Override()),
            "quota": self._quotas.quota_of(tenant),
        }


def decode(body: bytes) -> Override:
    """Raises InvalidRequest."""
    try:
        return msgspec.json.decode(body, type=Override)
    except (msgspec.DecodeError, UnicodeDecodeError, errors.InvalidRequest) as error:
        raise errors.InvalidRequest(
            f"the body must be JSON with numbers, or null for no limit, for {', '.join(NAMES)}: {error}"
        ) from None
