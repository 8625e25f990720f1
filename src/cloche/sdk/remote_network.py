"""The network of a sandbox on a server."""

from __future__ import annotations

from urllib.parse import quote

from cloche import errors
from cloche.network_policy import NetworkPolicy
from cloche.protocol import requests, responses
from cloche.sdk.network_log import NetworkLog
from cloche.sdk.remote_server import Server


class RemoteNetwork:
    def __init__(self, server: Server, id: str):
        self._server = server
        self._path = f"/sandboxes/{quote(id, safe='')}/network"

    async def policy(self) -> NetworkPolicy:
        return _policy(await self._server.ask("GET", self._path, responses.NetworkInfo))

    async def log(self) -> NetworkLog:
        logged: responses.NetworkLogged = await self._server.ask("GET", f"{self._path}/log", responses.NetworkLogged)
        return NetworkLog(logged.entries, logged.dropped)

    async def set(self, policy: NetworkPolicy, *, keep_secrets: bool) -> NetworkPolicy:
        asked = requests.asked_of(policy)
        body = requests.SetNetwork(
            allow=asked.allow,
            deny=asked.deny,
            rules=asked.rules,
            secrets=None if keep_secrets else requests.secrets_asked(policy),
        )
        return _policy(await self._server.ask("PUT", self._path, responses.NetworkInfo, body=body))


def _policy(info: responses.NetworkInfo) -> NetworkPolicy:
    try:
        return requests.policy_told(info)
    except errors.InvalidRequest as error:
        raise responses.not_ours(error) from None
