"""Network policies, read and changed while a sandbox runs: by the lifecycle API, and at the sidecar's port.

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
from starlette.routing import BaseRoute

from cloche import errors
from cloche.api.dialect import decode_json_body, dialect_route, json_reply
from cloche.api.http import Dialect
from cloche.api.opensandbox import network_schema as wire
from cloche.api.opensandbox.context import OpenSandboxContext
from cloche.api.opensandbox.credentials import CredentialVaults
from cloche.api.opensandbox.lifecycle_schema import EGRESS_PORT
from cloche.api.opensandbox.replies import error_reply
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
        sandbox, body = await enter(request), await self._api.body(request)
        asked = (
            wire.OpenSandboxNetworkBody()
            if body.strip() in EMPTY_BODIES
            else decode_json_body(body, wire.OpenSandboxNetworkBody)
        )
        policy = wire.policy_from_body(asked)
        return await self._change_policy(
            sandbox, lambda now: NetworkPolicy(rules=policy.rules, allow=policy.allow, secrets=now.secrets)
        )

    async def patch(self, enter: SandboxResolver, request: Request) -> Response:
        sandbox = await enter(request)
        rules = wire.rules_from_body(
            _require_not_empty(decode_json_body(await self._api.body(request), list[wire.OpenSandboxRule])), "rules"
        )
        return await self._change_policy(sandbox, lambda now: wire.merge_rules(now, rules))

    async def delete(self, enter: SandboxResolver, request: Request) -> Response:
        sandbox = await enter(request)
        targets = _require_not_empty(decode_json_body(await self._api.body(request), list[str]))
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


def _require_not_empty(items: list[T]) -> list[T]:
    if not items:
        raise errors.InvalidRequest("the request's body is an empty array: give at least one")
    return items
