"""The network of a Sandbox and of an AsyncSandbox: its policy, and the log of its connections."""

from __future__ import annotations

from collections.abc import Awaitable

from cloche.network_policy import NetworkPolicy
from cloche.sdk import backend
from cloche.sdk.arguments import NetworkLike, SecretsLike, changed_policy
from cloche.sdk.backend import NetworkLog, Transport


class Network:
    """The network policy and log of a sandbox."""

    def __init__(self, transport: Transport, core: backend.BackendSandbox):
        self._transport = transport
        self._core = core

    @property
    def policy(self) -> NetworkPolicy:
        """The current policy. Secrets are shown without their values."""
        self._core.check_running()
        return self._transport.call(self._core.network.policy)

    def log(self) -> NetworkLog:
        """The connections that its programs tried, with their verdicts: the oldest first."""
        self._core.check_running()
        return self._transport.call(self._core.network.log)

    def set(self, network: NetworkLike, secrets: SecretsLike = None) -> NetworkPolicy:
        """Replaces the policy from now on and returns the new one; connections that it no longer allows end.

        Without `secrets` the present ones stay where their domains are still allowed; `[]` removes them. Raises
        InvalidRequest for a bad policy and for one that the host's operator does not allow; then nothing changes.
        """
        policy, keep = changed_policy(network, secrets)
        self._core.check_running()
        return self._transport.call(lambda: self._core.network.set(policy, keep_secrets=keep))


class AsyncNetwork:
    """The same, with `await`."""

    def __init__(self, transport: Transport, core: backend.BackendSandbox):
        self._transport = transport
        self._core = core

    @property
    def policy(self) -> Awaitable[NetworkPolicy]:
        """The current policy: `await box.network.policy`. Secrets are shown without their values."""
        self._core.check_running()
        return self._transport.acall(self._core.network.policy)

    async def log(self) -> NetworkLog:
        """The connections that its programs tried, with their verdicts: the oldest first."""
        self._core.check_running()
        return await self._transport.acall(self._core.network.log)

    async def set(self, network: NetworkLike, secrets: SecretsLike = None) -> NetworkPolicy:
        """As `Network.set`."""
        policy, keep = changed_policy(network, secrets)
        self._core.check_running()
        return await self._transport.acall(lambda: self._core.network.set(policy, keep_secrets=keep))
