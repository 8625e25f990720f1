"""The networks of all sandboxes: who may reach what, within what the operator allows, and the proxy that sees to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloche import errors
from cloche.engine.network import PROXY_ENV
from cloche.engine.sandbox import Sandbox
from cloche.model import SandboxSpec, Template
from cloche.network_config import Network, Packages
from cloche.network_policy import NetworkPolicy, first_outside

if TYPE_CHECKING:  # loaded with the first sandbox that has a network
    from cloche.egress.egress import Egress


class Networks:
    def __init__(self, config: Network, packages: Packages):
        self._config = config
        self._packages = packages
        self._egress: Egress | None = None

    @property
    def bound(self) -> NetworkPolicy:
        """What no sandbox of this host may go beyond."""
        return self._config.bound

    def policy_for(self, spec: SandboxSpec, template: Template) -> NetworkPolicy:
        """What a new sandbox may reach: what is asked for, else its template's, else this host's default.

        Raises as `check` does.
        """
        if spec.network is not None:
            self.check(spec.network)
            return spec.network
        if template.network is not None:
            return template.network
        return NetworkPolicy(allow=self._config.default)

    def check(self, policy: NetworkPolicy) -> None:
        """Raises InvalidRequest for what the operator of this host allows to no sandbox."""
        if policy.allows_something and not self.bound.allow:
            raise errors.InvalidRequest(
                "sandboxes of this host have no network but loopback: its operator can allow some with network.allow"
            )
        if (outside := first_outside(policy, self.bound)) is not None:
            raise errors.InvalidRequest(
                f"the operator of this host allows no sandbox to reach {outside}: ask for less, or have it added to "
                "network.allow"
            )

    def wants_door(self, policy: NetworkPolicy) -> bool:
        """Whether a sandbox of that policy has anywhere to go."""
        return policy.allows_something or self._packages.enabled

    async def open(self, sandbox: Sandbox) -> None:
        """The sandbox is ended where it cannot be opened. Raises Gone."""
        try:
            await sandbox.network.open(self._proxy(), sandbox=sandbox.id, owner=sandbox.spec.owner)
        except BaseException:
            await sandbox.kill("its network could not be opened")
            raise

    async def replace(self, sandbox: Sandbox, policy: NetworkPolicy) -> None:
        """From now on the sandbox may reach what `policy` says. Raises as `check` and `SandboxNetwork.open` do."""
        self.check(policy)
        sandbox.check_running()
        if self.wants_door(policy):
            await sandbox.network.open(self._proxy(), sandbox=sandbox.id, owner=sandbox.spec.owner)
        if policy.allows_something and not sandbox.network.policy.allows_something:
            sandbox.add_env(PROXY_ENV)
        sandbox.network.replace(policy)

    async def aclose(self) -> None:
        if self._egress is not None:
            await self._egress.aclose()

    def _proxy(self) -> Egress:
        from cloche.egress.egress import Egress

        if self._egress is None:
            self._egress = Egress(self._config, self._packages)
        return self._egress
