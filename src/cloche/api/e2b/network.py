"""The control plane's network policy: at creation and while the sandbox runs."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from cloche.api.e2b.context import E2bContext
from cloche.api.e2b.network_schema import E2bEgressRequest, E2bNetworkBody, decode_egress_request, policy_from_request
from cloche.engine.sandboxes.networks import Networks
from cloche.model import Template
from cloche.network_policy import NetworkPolicy


def network_routes(api: E2bContext) -> list[BaseRoute]:
    return [api.route("PUT", "/sandboxes/{id}/network", ControlNetwork(api).replace)]


class ControlNetwork:
    def __init__(self, api: E2bContext):
        self._api = api

    async def replace(self, request: Request) -> Response:
        """Replaces the whole policy: omitted fields get their defaults."""
        sandbox = await self._api.sandbox(request)
        message = await self._api.json_body(request, E2bNetworkBody)
        networks = self._api.engine.networks
        await networks.replace(
            sandbox, policy_within_bound(decode_egress_request(message, message.allow_internet_access), networks)
        )
        return Response(status_code=204)


def policy_for_new_sandbox(request: E2bEgressRequest, template: Template, networks: Networks) -> NetworkPolicy | None:
    """The policy of a new sandbox. None: the template, or the lack of isolation, already settles the request.

    Raises InvalidRequest.
    """
    settled = template.network is not None or not networks.sealed
    return None if request == E2bEgressRequest() and settled else policy_within_bound(request, networks)


def policy_within_bound(request: E2bEgressRequest, networks: Networks) -> NetworkPolicy:
    """The policy, limited to the hosts that the operator allows.

    Raises InvalidRequest for a named host outside of them.
    """
    if request.secrets:
        networks.check(NetworkPolicy(allow=tuple(secret.domain for secret in request.secrets)))
    return policy_from_request(request, networks.bound)
