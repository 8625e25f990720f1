"""The networks of all sandboxes: policies within the operator's bounds, and the egress proxy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cloche import errors
from cloche.config.sections import NetworkConfig, PackagesConfig
from cloche.engine.sandboxes.endings import NETWORK_NOT_OPENED
from cloche.engine.sandboxes.network import network_environment
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import SandboxSpec, Template
from cloche.network_policy import NetworkPolicy, first_disallowed_pattern, first_unused_secret

if TYPE_CHECKING:  # loaded with the first sandbox that has a network
    from cloche.egress import EgressProxy


class Networks:
    """`sealed`: whether sandboxes have walls that a policy could open a door in."""

    def __init__(self, config: NetworkConfig, packages: PackagesConfig, directory: Path, *, sealed: bool = True):
        self._config = config
        self._packages = packages
        self._directory = directory  # where packages are kept
        self._sealed = sealed
        self._default = NetworkPolicy(allow=config.default)
        self._egress: EgressProxy | None = None

    @property
    def sealed(self) -> bool:
        return self._sealed

    @property
    def egress(self) -> EgressProxy | None:
        """None where no sandbox has had a network yet."""
        return self._egress

    @property
    def bound(self) -> NetworkPolicy:
        """The policy that no sandbox of this host may exceed."""
        return self._config.bound

    def policy_for(self, spec: SandboxSpec, template: Template) -> NetworkPolicy:
        """The policy of a new sandbox: the requested one, else its template's, else this host's default.

        Raises as `check` does.
        """
        if not self._sealed:
            return self._check_unsealed_policy(spec.network or template.network)
        if spec.network is not None:
            self.check(spec.network)
            return spec.network
        if template.network is not None:
            return template.network
        return self._default

    def _check_unsealed_policy(self, policy: NetworkPolicy | None) -> NetworkPolicy:
        """Refuses policies that allow anything: programs without walls have the network of the host anyway.

        One that allows nothing is accepted: clients that know nothing of backends send it, and it is no less true
        than none.
        """
        if policy is not None and policy.allows_something:
            raise errors.InvalidRequest(
                "no network policy can be enforced here: this host's backend has no walls, and programs use the host's "
                "own network; leave the policy out, or use the backend namespaces"
            )
        return NetworkPolicy()

    def check(self, policy: NetworkPolicy) -> None:
        """Raises InvalidRequest for a policy that exceeds the operator's bounds."""
        if not self._sealed:
            self._check_unsealed_policy(policy)
        if policy.allows_something and not self.bound.allow:
            raise errors.InvalidRequest(
                "sandboxes of this host have no network but loopback: its operator can allow some with network.allow"
            )
        if (outside := first_disallowed_pattern(policy, self.bound)) is not None:
            raise errors.InvalidRequest(
                f"the operator of this host allows no sandbox to reach {outside}: ask for less, or have it added to "
                "network.allow (without ports, 80 and 443 are meant)"
            )
        self._check_secrets(policy)

    def _check_secrets(self, policy: NetworkPolicy) -> None:
        if (useless := first_unused_secret(policy)) is not None:
            raise errors.InvalidRequest(
                f"the secret for {useless.domain} is of no use: {useless.domain} is not allowed; add it to the "
                "policy's allow list"
            )
        if (useless := first_unused_secret(msgspec.structs.replace(self.bound, secrets=policy.secrets))) is not None:
            raise errors.InvalidRequest(
                f"the secret for {useless.domain} is of no use: the operator of this host allows no sandbox to reach it"
            )

    def needs_door(self, policy: NetworkPolicy) -> bool:
        """Whether a sandbox of that policy can reach anything."""
        return self.is_always_open or (self._sealed and policy.allows_something)

    @property
    def is_always_open(self) -> bool:
        """Whether every sandbox has a door: each of them can install packages."""
        return self._sealed and self._packages.enabled

    async def open(self, sandbox: Sandbox) -> None:
        """Opens the sandbox's network; kills the sandbox where that fails. Raises Gone."""
        try:
            await sandbox.network.open(self._ensure_egress(), sandbox=sandbox.id, owner=sandbox.spec.owner)
        except BaseException:
            await sandbox.kill(NETWORK_NOT_OPENED)
            raise

    async def replace(self, sandbox: Sandbox, policy: NetworkPolicy) -> None:
        """Replaces the sandbox's policy. Raises as `check` and `SandboxNetwork.open` do."""
        self.check(policy)
        sandbox.check_running()
        if self.needs_door(policy):
            await sandbox.network.open(self._ensure_egress(), sandbox=sandbox.id, owner=sandbox.spec.owner)
        await sandbox.network.install_certificates(policy)
        known, env = network_environment(sandbox.network.policy), network_environment(policy)
        if env.items() - known.items() or policy.secrets:  # some, such as Node.js, read the trusted authorities once
            sandbox.add_env(env)
        sandbox.network.replace(policy)

    async def aclose(self) -> None:
        if self._egress is not None:
            await self._egress.aclose()

    def _ensure_egress(self) -> EgressProxy:
        from cloche.egress import EgressProxy

        if self._egress is None:
            self._egress = EgressProxy(self._config, self._packages, self._directory)
        return self._egress
