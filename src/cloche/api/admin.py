"""`/admin`: keys, which say who may use this server, and what requests did.

For admins: with a key, or over the control socket.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from cloche import errors
from cloche.api.admin_audit import AdminAudit
from cloche.api.admin_capacity import AdminCapacity
from cloche.api.admin_owners import AdminOwners
from cloche.api.admin_requests import AdminRequests
from cloche.api.admin_tenants import AdminTenants
from cloche.api.auth import Gatekeeper
from cloche.api.erasing import Erasing
from cloche.api.http import Edge, whole_body
from cloche.api.revoking import kill_made
from cloche.api.system import Routes, error_reply, json_reply
from cloche.engine.engine import Engine
from cloche.model import KIB, Struct
from cloche.store.gateway import Steps
from cloche.store.keys import KeyRecord, StoredKeys

T = TypeVar("T", bound=Struct)

MAX_ASKED_BYTES = 16 * KIB


class Asked(Struct, forbid_unknown_fields=True):
    """What a new key should be."""

    owner: str = "local"
    role: str = "user"
    name: str = ""
    expires_at: float | None = None  # seconds since 1970


class Renewed(Struct, forbid_unknown_fields=True):
    """What a key should be that takes another's place."""

    expires_at: float | None = None  # None: when the other one would have expired, if ever


class Admin:
    def __init__(self, keys: StoredKeys, steps: Steps, gatekeeper: Gatekeeper, engine: Engine, erasing: Erasing):
        self._keys = keys
        self._engine = engine
        self._quotas = engine.quotas
        self._gatekeeper = gatekeeper
        self._routes = Routes(
            [
                Route("/admin/keys", Edge(self, self.list), methods=["GET"]),
                Route("/admin/keys", Edge(self, self.add), methods=["POST"]),
                Route("/admin/keys/{id}", Edge(self, self.revoke), methods=["DELETE"]),
                Route("/admin/keys/{id}/rotate", Edge(self, self.rotate), methods=["POST"]),
                *AdminTenants(self, engine.quotas, keys, gatekeeper).routes,
                *AdminRequests(self, steps, gatekeeper).routes,
                *AdminCapacity(self, engine, gatekeeper).routes,
                *AdminOwners(self, erasing, gatekeeper).routes,
                *AdminAudit(self, Path(engine.config.data_dir, "audit"), gatekeeper).routes,
            ]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._routes(scope, receive, send)

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        return error_reply(error)

    async def list(self, request: Request) -> Response:
        self._gatekeeper.admit_admin(request)
        return json_reply(await self._keys.list())

    async def add(self, request: Request) -> Response:
        self._gatekeeper.admit_admin(request)
        asked = decode(await whole_body(request, MAX_ASKED_BYTES), Asked)
        made = await self._keys.add(asked.owner, asked.role, asked.name, asked.expires_at)
        return json_reply(told(*made), 201)

    async def rotate(self, request: Request) -> Response:
        self._gatekeeper.admit_admin(request)
        asked = decode(await whole_body(request, MAX_ASKED_BYTES), Renewed)
        made = await self._keys.rotate(request.path_params["id"], asked.expires_at)
        await self._quotas.try_refresh()
        return json_reply(told(*made), 201)

    async def revoke(self, request: Request) -> Response:
        """With `kill=true` its sandboxes end, too, also where it was revoked before."""
        self._gatekeeper.admit_admin(request)
        id, kill = request.path_params["id"], request.query_params.get("kill", "false")
        if kill not in ("true", "false"):
            raise errors.InvalidRequest("kill must be true or false: whether the sandboxes that it made end, too")
        await self._keys.revoke(id, again=kill == "true")
        if kill == "false":
            return Response(status_code=204)
        return json_reply({"id": id, "sandboxes_killed": await kill_made(self._engine, self._keys, id)})


def decode(body: bytes, kind: type[T]) -> T:
    """Raises InvalidRequest."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        fields = ", ".join(each.name for each in msgspec.structs.fields(kind))
        raise errors.InvalidRequest(f"the body must be JSON with {fields}: {error}") from None


def told(record: KeyRecord, key: str) -> dict[str, object]:
    """A new key: the only answer that ever has it."""
    return {**msgspec.structs.asdict(record), "key": key}
