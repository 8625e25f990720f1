"""The credential vault of a sandbox, at the port of OpenSandbox's egress sidecar."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cloche import errors
from cloche.api.http import Edge, Handler
from cloche.api.opensandbox import credentials_schema as wire
from cloche.api.opensandbox.context import Desk
from cloche.api.opensandbox.credentials_schema import Vault
from cloche.api.opensandbox.lifecycle_schema import EGRESS_PORT, decode
from cloche.api.opensandbox.replies import Conflict, json_reply

if TYPE_CHECKING:
    from cloche.api.opensandbox.egress import Egress

BASE = f"/sandboxes/{{id}}/proxy/{EGRESS_PORT}/credential-vault"

Change = Callable[[Vault | None], Vault | None]


class Vaults:
    """They are in memory only, and go with their sandboxes."""

    def __init__(self, desk: Desk, egress: Egress):
        self._desk = desk
        self._egress = egress
        self.routes = [
            self._route("POST", "", self.create),
            self._route("GET", "", self.get),
            self._route("PATCH", "", self.patch),
            self._route("DELETE", "", self.delete),
            self._route("GET", "/{kind:str}", self.list),
            self._route("GET", "/{kind:str}/{name:path}", self.find),
        ]

    async def create(self, request: Request) -> Response:
        def make(vault: Vault | None) -> Vault:
            if vault is not None:
                raise Conflict("credential vault already exists: change it, or delete it first")
            return wire.created(asked)

        asked = decode(await self._body(request), wire.NewVault)
        return json_reply(wire.shown(_there(await self._change(request, make))), 201)

    async def get(self, request: Request) -> Response:
        return json_reply(wire.shown(await self._found(request)))

    async def patch(self, request: Request) -> Response:
        asked = decode(await self._body(request), wire.Mutation)
        changed = await self._change(request, lambda vault: wire.changed(_there(vault), asked))
        return json_reply(wire.shown(_there(changed)))

    async def delete(self, request: Request) -> Response:
        await self._change(request, lambda vault: _there(vault) and None)
        return Response(status_code=204)

    async def list(self, request: Request) -> Response:
        kind, shown = _kind(request), wire.shown(await self._found(request))
        return json_reply({"revision": shown["revision"], kind: shown[kind]})

    async def find(self, request: Request) -> Response:
        kind, name = _kind(request), request.path_params["name"]
        for each in wire.shown(await self._found(request))[kind]:
            if each["name"] == name:
                return json_reply(each)
        raise errors.NotFound(f"there is no {kind.removesuffix('s')} {name[:100]!r}")

    def _route(self, method: str, path: str, handler: Handler) -> Route:
        return Route(BASE + path, Edge(self._egress, handler), methods=[method])

    async def _body(self, request: Request) -> bytes:
        """Of somebody who may: nobody else's is read."""
        await self._egress.enter(request)
        return await self._desk.body(request)

    async def _found(self, request: Request) -> Vault:
        return _there(self._desk.known.of((await self._egress.enter(request)).id).vault)

    async def _change(self, request: Request, change: Change) -> Vault | None:
        sandbox = await self._egress.enter(request)
        async with self._egress.lock(sandbox):
            known = self._desk.known.of(sandbox.id)
            vault = change(known.vault)
            policy = wire.with_vault(sandbox.network.policy, known.vault, vault)
            await self._desk.engine.networks.replace(sandbox, policy)
            known.vault = vault
            return vault


def _there(vault: Vault | None) -> Vault:
    if vault is None:
        raise errors.NotFound("the sandbox has no credential vault: POST one first")
    return vault


def _kind(request: Request) -> str:
    kind: str = request.path_params["kind"]
    if kind not in ("credentials", "bindings"):
        raise errors.NotFound("a credential vault has credentials and bindings")
    return kind
