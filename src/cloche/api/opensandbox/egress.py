"""Network policies and credential vaults of running sandboxes: by the lifecycle API, and at the sidecar's port.

The port of OpenSandbox's egress sidecar is served by this server. As execd, it takes a token of the sandbox's
own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from cloche import errors
from cloche.api.dialect import Conflict, decode_json_body, dialect_route, json_reply
from cloche.api.http import Dialect, Handler
from cloche.api.opensandbox import credentials_schema as vaults
from cloche.api.opensandbox import network_schema as wire
from cloche.api.opensandbox.context import OpenSandboxContext, error_reply
from cloche.api.opensandbox.credentials_schema import CredentialVault
from cloche.api.opensandbox.lifecycle_schema import EGRESS_PORT
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.network_policy import NetworkPolicy

EGRESS_PATH = f"/sandboxes/{{id}}/proxy/{EGRESS_PORT}"
EMPTY_BODIES = (b"", b"null", b"{}")

T = TypeVar("T")
SandboxResolver = Callable[[Request], Awaitable[Sandbox]]
PolicyChange = Callable[[NetworkPolicy], NetworkPolicy]


def egress_routes(api: OpenSandboxContext) -> list[BaseRoute]:
    plane = OpenSandboxEgress(api)
    return [
        *CredentialVaults(api, plane).routes,
        *plane.routes("/sandboxes/{id}/networkpolicy", api.sandbox, api),
        *plane.routes(f"{EGRESS_PATH}/policy", plane.enter, plane),
    ]


class OpenSandboxEgress:
    def __init__(self, api: OpenSandboxContext):
        self._api = api
        self._networks = api.engine.networks
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        if isinstance(error, errors.Unauthenticated):
            return error_reply(401, "UNAUTHORIZED", str(error))
        if isinstance(error, errors.NotFound) and not isinstance(error, errors.SandboxNotFound):
            return error_reply(404, "SANDBOX::NOT_FOUND", str(error))  # of its vault
        return self._api.render_error(error, request)

    def routes(self, path: str, enter: SandboxResolver, dialect: Dialect) -> list[BaseRoute]:
        handlers = {
            "GET": self.get,
            "POST": self.replace,
            "PUT": self.replace,
            "PATCH": self.patch,
            "DELETE": self.delete,
        }
        return [dialect_route(dialect, method, path, partial(handler, enter)) for method, handler in handlers.items()]

    async def enter(self, request: Request) -> Sandbox:
        """The sandbox, by its own egress token. Raises Unauthenticated, SandboxNotFound, Gone."""
        return await self._api.sandbox_by_token(request, "egress")

    async def get(self, enter: SandboxResolver, request: Request) -> Response:
        return self._policy_response((await enter(request)).network.policy)

    async def replace(self, enter: SandboxResolver, request: Request) -> Response:
        """Replaces the policy. An empty body denies everything."""
        sandbox = await enter(request)
        policy = wire.policy_from_body(await self._api.decoded(request, _decode_policy))
        return await self._change_policy(
            sandbox, lambda now: NetworkPolicy(rules=policy.rules, allow=policy.allow, secrets=now.secrets)
        )

    async def patch(self, enter: SandboxResolver, request: Request) -> Response:
        sandbox = await enter(request)
        rules = wire.rules_from_body(
            _require_not_empty(await self._api.json_body(request, list[wire.OpenSandboxRule])), "rules"
        )
        return await self._change_policy(sandbox, lambda now: wire.merge_rules(now, rules))

    async def delete(self, enter: SandboxResolver, request: Request) -> Response:
        sandbox = await enter(request)
        targets = _require_not_empty(await self._api.json_body(request, list[str]))
        return await self._change_policy(sandbox, lambda now: wire.remove_rules(now, targets))

    def lock(self, sandbox: Sandbox) -> asyncio.Lock:
        """The lock for changes of this sandbox: each change sees the result of the previous one."""
        return self._locks.setdefault(sandbox.id, asyncio.Lock())  # there while a request holds it

    async def _change_policy(self, sandbox: Sandbox, change: PolicyChange) -> Response:
        async with self.lock(sandbox):
            await self._networks.replace(sandbox, change(sandbox.network.policy))
            return self._policy_response(sandbox.network.policy)

    def _policy_response(self, policy: NetworkPolicy) -> Response:
        return json_reply(wire.encode_policy_status(policy, self._networks.bound))


def _decode_policy(body: bytes) -> wire.OpenSandboxNetworkBody:
    if body.strip() in EMPTY_BODIES:
        return wire.OpenSandboxNetworkBody()
    return decode_json_body(body, wire.OpenSandboxNetworkBody)


def _require_not_empty(items: list[T]) -> list[T]:
    if not items:
        raise errors.InvalidRequest("the request's body is an empty array: give at least one")
    return items


# The credential vault of a sandbox, at the same port.

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
            return vaults.create_vault(asked)

        asked = await self._authorized_body(request, vaults.CreateVaultBody)
        return json_reply(vaults.encode_vault(_require_vault(await self._change_vault(request, make))), 201)

    async def get(self, request: Request) -> Response:
        return json_reply(vaults.encode_vault(await self._require_request_vault(request)))

    async def patch(self, request: Request) -> Response:
        asked = await self._authorized_body(request, vaults.VaultMutation)
        changed = await self._change_vault(request, lambda vault: vaults.apply_mutation(_require_vault(vault), asked))
        return json_reply(vaults.encode_vault(_require_vault(changed)))

    async def delete(self, request: Request) -> Response:
        await self._change_vault(request, lambda vault: _require_vault(vault) and None)
        return Response(status_code=204)

    async def list(self, request: Request) -> Response:
        kind, shown = _listed_kind_of(request), vaults.encode_vault(await self._require_request_vault(request))
        return json_reply({"revision": shown["revision"], kind: shown[kind]})

    async def find(self, request: Request) -> Response:
        kind, name = _listed_kind_of(request), request.path_params["name"]
        for each in vaults.encode_vault(await self._require_request_vault(request))[kind]:
            if each["name"] == name:
                return json_reply(each)
        raise errors.NotFound(f"there is no {kind.removesuffix('s')} {name[:100]!r}")

    def _vault_route(self, method: str, path: str, handler: Handler) -> Route:
        return dialect_route(self._egress, method, VAULT_PATH + path, handler)

    async def _authorized_body(self, request: Request, kind: type[T]) -> T:
        """The body, read only after the token was checked."""
        await self._egress.enter(request)
        return await self._api.json_body(request, kind)

    async def _require_request_vault(self, request: Request) -> CredentialVault:
        return _require_vault(self._api.states.of((await self._egress.enter(request)).id).vault)

    async def _change_vault(self, request: Request, change: VaultChange) -> CredentialVault | None:
        sandbox = await self._egress.enter(request)
        async with self._egress.lock(sandbox):
            state = self._api.states.of(sandbox.id)
            vault = change(state.vault)
            policy = vaults.replace_vault_secrets(sandbox.network.policy, state.vault, vault)
            await self._api.engine.networks.replace(sandbox, policy)
            state.vault = vault
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
