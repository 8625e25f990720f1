"""What a sandbox may reach, read and changed while it runs: by the lifecycle API, and at the port of OpenSandbox's
egress sidecar, which is a door of this server. That one opens with a token of the sandbox's own, as execd does.
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
from cloche.api.auth import same
from cloche.api.http import Dialect, Edge
from cloche.api.opensandbox import network_schema as wire
from cloche.api.opensandbox.context import Desk
from cloche.api.opensandbox.credentials import Vaults
from cloche.api.opensandbox.lifecycle_schema import EGRESS_HEADER, EGRESS_PORT, decode
from cloche.api.opensandbox.replies import error_reply, json_reply
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.network_policy import NetworkPolicy

BASE = f"/sandboxes/{{id}}/proxy/{EGRESS_PORT}"
EMPTY = (b"", b"null", b"{}")

T = TypeVar("T")
Enter = Callable[[Request], Awaitable[Sandbox]]
Change = Callable[[NetworkPolicy], NetworkPolicy]


def routes(desk: Desk) -> list[BaseRoute]:
    plane = Egress(desk)
    return [
        *Vaults(desk, plane).routes,
        *plane.routes("/sandboxes/{id}/networkpolicy", desk.sandbox, desk),
        *plane.routes(f"{BASE}/policy", plane.enter, plane),
    ]


class Egress:
    def __init__(self, desk: Desk):
        self._desk = desk
        self._networks = desk.engine.networks
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        if isinstance(error, errors.Unauthenticated):
            return error_reply(401, "UNAUTHORIZED", str(error))
        if isinstance(error, errors.NotFound) and not isinstance(error, errors.SandboxNotFound):
            return error_reply(404, "SANDBOX::NOT_FOUND", str(error))  # of its vault
        return self._desk.render_error(error, request)

    def routes(self, path: str, enter: Enter, dialect: Dialect) -> list[BaseRoute]:
        handlers = {
            "GET": self.get,
            "POST": self.replace,
            "PUT": self.replace,
            "PATCH": self.patch,
            "DELETE": self.delete,
        }
        return [
            Route(path, Edge(dialect, partial(handler, enter)), methods=[method])
            for method, handler in handlers.items()
        ]

    async def enter(self, request: Request) -> Sandbox:
        """Whose token it is was said when it was given. Raises Unauthenticated, SandboxNotFound, Gone."""
        id = request.path_params["id"]
        if not same(request.headers.get(EGRESS_HEADER), self._desk.known.token(id, "egress")):
            raise errors.Unauthenticated(
                f"{EGRESS_HEADER} is missing or wrong: GET /sandboxes/ID/endpoints/{EGRESS_PORT} has it in `headers`"
            )
        return await self._desk.engine.find(id)

    async def get(self, enter: Enter, request: Request) -> Response:
        return self._said((await enter(request)).network.policy)

    async def replace(self, enter: Enter, request: Request) -> Response:
        """Nothing said denies everything."""
        sandbox, body = await enter(request), await self._desk.body(request)
        asked = wire.Network() if body.strip() in EMPTY else decode(body, wire.Network)
        policy = wire.policy_of(asked)
        return await self._changed(
            sandbox, lambda now: NetworkPolicy(rules=policy.rules, allow=policy.allow, secrets=now.secrets)
        )

    async def patch(self, enter: Enter, request: Request) -> Response:
        sandbox = await enter(request)
        rules = wire.rules_of(_some(decode(await self._desk.body(request), list[wire.Rule])), "rules")
        return await self._changed(sandbox, lambda now: wire.merged(now, rules))

    async def delete(self, enter: Enter, request: Request) -> Response:
        sandbox = await enter(request)
        targets = _some(decode(await self._desk.body(request), list[str]))
        return await self._changed(sandbox, lambda now: wire.without(now, targets))

    def lock(self, sandbox: Sandbox) -> asyncio.Lock:
        """Changes are made one after the other: each sees what the one before has done."""
        return self._locks.setdefault(sandbox.id, asyncio.Lock())  # there while somebody holds it

    async def _changed(self, sandbox: Sandbox, change: Change) -> Response:
        async with self.lock(sandbox):
            await self._networks.replace(sandbox, change(sandbox.network.policy))
            return self._said(sandbox.network.policy)

    def _said(self, policy: NetworkPolicy) -> Response:
        return json_reply(wire.status(policy, self._networks.bound))


def _some(items: list[T]) -> list[T]:
    if not items:
        raise errors.InvalidRequest("the request's body is an empty array: give at least one")
    return items
