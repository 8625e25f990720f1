"""What a sandbox may reach, and what its programs tried."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from cloche.api.native.door import Door, body_of, reply
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.network_policy import NetworkPolicy, with_secrets
from cloche.protocol import requests, responses


class Network:
    def __init__(self, door: Door):
        self._door = door

    async def get(self, request: Request) -> Response:
        return _described(await self._door.sandbox(request))

    async def replace(self, request: Request) -> Response:
        sandbox = await self._door.sandbox(request)
        asked = await body_of(request, requests.SetNetwork)
        await self._door.engine.networks.replace(sandbox, _policy(asked, sandbox.network.policy))
        return _described(sandbox)

    async def log(self, request: Request) -> Response:
        network = (await self._door.sandbox(request)).network
        return reply(responses.NetworkLogged(entries=network.log, dropped=network.dropped))


def _policy(asked: requests.SetNetwork, present: NetworkPolicy) -> NetworkPolicy:
    """Secrets that nobody speaks of stay: their values cannot be read to be sent again."""
    policy = requests.policy_asked(asked, asked.secrets or ())
    return policy if asked.secrets is not None else with_secrets(policy, present.secrets)


def _described(sandbox: Sandbox) -> Response:
    return reply(requests.info_of(sandbox.network.policy))
