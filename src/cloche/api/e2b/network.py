"""The control plane: what a sandbox may reach, when it is made and while it runs."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from cloche.api.e2b.context import Desk
from cloche.api.e2b.network_schema import Egress, Network, egress, policy_of
from cloche.api.e2b.sandboxes_schema import decode
from cloche.engine.sandboxes.networks import Networks
from cloche.model import Template
from cloche.network_policy import NetworkPolicy


def routes(desk: Desk) -> list[BaseRoute]:
    return [desk.route("PUT", "/sandboxes/{id}/network", ControlNetwork(desk).replace)]


class ControlNetwork:
    def __init__(self, desk: Desk):
        self._desk = desk

    async def replace(self, request: Request) -> Response:
        """What is left out is as if nobody had ever asked for it."""
        sandbox = await self._desk.sandbox(request)
        asked = decode(await self._desk.body(request), Network)
        networks = self._desk.engine.networks
        await networks.replace(sandbox, bounded(egress(asked, asked.allow_internet_access), networks))
        return Response(status_code=204)


def policy_for(asked: Egress, template: Template, networks: Networks) -> NetworkPolicy | None:
    """For a new sandbox. None: nothing is asked for that its template, or the lack of walls, has not settled.

    Raises InvalidRequest.
    """
    settled = template.network is not None or not networks.sealed
    return None if asked == Egress() and settled else bounded(asked, networks)


def bounded(asked: Egress, networks: Networks) -> NetworkPolicy:
    """What was named must be something that the operator allows. Raises InvalidRequest."""
    if asked.secrets:
        networks.check(NetworkPolicy(allow=tuple(secret.domain for secret in asked.secrets)))
    return policy_of(asked, networks.bound)
