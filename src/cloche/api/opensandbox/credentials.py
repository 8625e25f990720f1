"""The credential vault of a sandbox, at the port of OpenSandbox's egress sidecar."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cloche import errors
from cloche.api.dialect import Conflict, decode_json_body, dialect_route, json_reply
from cloche.api.http import Handler
from cloche.api.opensandbox import credentials_schema as wire
from cloche.api.opensandbox.context import OpenSandboxContext
from cloche.api.opensandbox.credentials_schema import CredentialVault
from cloche.api.opensandbox.lifecycle_schema import EGRESS_PORT

if TYPE_CHECKING:
    from cloche.api.opensandbox.egress import OpenSandboxEgress

VAULT_PATH = f"/sandboxes/{{id}}/proxy/{EGRESS_PORT}/credential-vault"

VaultChange = Callable[[CredentialVault | None], CredentialVault | None]


class CredentialVaults:
    """Vaults are kept in memory only, and end with their sandboxes."""

    def __init__(self, api: OpenSandboxContext, egress: OpenSandboxEgress):
        self._api = api
        self._egress = egress
        self.routes = [
            self._vault_route("POST", "", self.create),
            self._vault_route("GET", "", self.get),
            self._vault_route("PATCH", "", self.patch),
            self._vault_route("DELETE", "", self.delete),
            self._vault_route("GET", "/{kind:str}", self.list),
            self._vault_route("GET", "/{kind:str}/{name:path}", self.find),
        ]

    async def create(self, request: Request) -> Response:
        def make(vault: CredentialVault | None) -> CredentialVault:
            if vault is not None:
                raise Conflict("credential vault already exists: change it, or delete it first")
            return wire.create_vault(asked)

        asked = decode_json_body(await self._authorized_body(request), wire.CreateVaultBody)
        return json_reply(wire.encode_vault(_require_vault(await self._change_vault(request, make))), 201)

    async def get(self, request: Request) -> Response:
        return json_reply(wire.encode_vault(await self._require_request_vault(request)))

    async def patch(self, request: Request) -> Response:
        asked = decode_json_body(await self._authorized_body(request), wire.VaultMutation)
        changed = await self._change_vault(request, lambda vault: wire.apply_mutation(_require_vault(vault), asked))
        return json_reply(wire.encode_vault(_require_vault(changed)))

    async def delete(self, request: Request) -> Response:
        await self._change_vault(request, lambda vault: _require_vault(vault) and None)
        return Response(status_code=204)

    async def list(self, request: Request) -> Response:
        kind, shown = _listed_kind_of(request), wire.encode_vault(await self._require_request_vault(request))
        return json_reply({"revision": shown["revision"], kind: shown[kind]})

    async def find(self, request: Request) -> Response:
        kind, name = _listed_kind_of(request), request.path_params["name"]
        for each in wire.encode_vault(await self._require_request_vault(request))[kind]:
            if each["name"] == name:
                return json_reply(each)
        raise errors.NotFound(f"there is no {kind.removesuffix('s')} {name[:100]!r}")

    def _vault_route(self, method: str, path: str, handler: Handler) -> Route:
        return dialect_route(self._egress, method, VAULT_PATH + path, handler)

    async def _authorized_body(self, request: Request) -> bytes:
        """The body, read only after the token was checked."""
        await self._egress.enter(request)
        return await self._api.body(request)

    async def _require_request_vault(self, request: Request) -> CredentialVault:
        return _require_vault(self._api.known.of((await self._egress.enter(request)).id).vault)

    async def _change_vault(self, request: Request, change: VaultChange) -> CredentialVault | None:
        sandbox = await self._egress.enter(request)
        async with self._egress.lock(sandbox):
            known = self._api.known.of(sandbox.id)
            vault = change(known.vault)
            policy = wire.replace_vault_secrets(sandbox.network.policy, known.vault, vault)
            await self._api.engine.networks.replace(sandbox, policy)
            known.vault = vault
            return vault


def _require_vault(vault: CredentialVault | None) -> CredentialVault:
    if vault is None:
        raise errors.NotFound("the sandbox has no credential vault: POST one first")
    return vault


def _listed_kind_of(request: Request) -> str:
    kind: str = request.path_params["kind"]
    if kind not in ("credentials", "bindings"):
        raise errors.NotFound("a credential vault has credentials and bindings")
    return kind
