"""The networks of all sandboxes: who may reach what, within what the operator allows, and the proxy that sees to it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cloche import errors
from cloche.config.sections import Network, Packages
from cloche.engine.sandboxes.network import environment_of
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import SandboxSpec, Template
from cloche.network_policy import NetworkPolicy, first_outside, useless_secret

if TYPE_CHECKING:  # loaded with the first sandbox that has a network
    from cloche.egress import Egress


class Networks:
    """`sealed`: whether sandboxes have walls that a policy could open a door in."""

    def __init__(self, config: Network, packages: Packages, directory: Path, *, sealed: bool = True):
        self._config = config
        self._packages = packages
        self._directory = directory  # where packages are kept
        self._sealed = sealed
        self._default = NetworkPolicy(allow=config.default)
        self._egress: Egress | None = None

    @property
    def sealed(self) -> bool:
        return self._sealed

    @property
    def egress(self) -> Egress | None:
        """None where no sandbox has had a network yet."""
        return self._egress

    @property
    def bound(self) -> NetworkPolicy:
        """What no sandbox of this host may go beyond."""
        return self._config.bound

    def policy_for(self, spec: SandboxSpec, template: Template) -> NetworkPolicy:
        """What a new sandbox may reach: what is asked for, else its template's, else this host's default.

        Raises as `check` does.
        """
        if not self._sealed:
            return self._unsealed(spec.network or template.network)
        if spec.network is not None:
            self.check(spec.network)
            return spec.network
        if template.network is not None:
            return template.network
        return self._default

    def _unsealed(self, policy: NetworkPolicy | None) -> NetworkPolicy:
        """Programs without walls have the network of the host, whatever a policy says: so none that allows is taken.

        One that allows nothing is what clients send who know nothing of backends, and no less true than none.
        """
        if policy is not None and policy.allows_something:
            raise errors.InvalidRequest(
                "no network policy can be enforced here: this host's backend has no walls, and programs use the host's "
                "own network; leave the policy out, or use the backend namespaces"
            )
        return NetworkPolicy()

    def check(self, policy: NetworkPolicy) -> None:
        """Raises InvalidRequest for what the operator of this host allows to no sandbox."""
        if not self._sealed:
            self._unsealed(policy)
        if policy.allows_something and not self.bound.allow:
            raise errors.InvalidRequest(
                "sandboxes of this host have no network but loopback: its operator can allow some with network.allow"
            )
        if (outside := first_outside(policy, self.bound)) is not None:
            raise errors.InvalidRequest(
                f"the operator of this host allows no sandbox to reach {outside}: ask for less, or have it added to "
                "network.allow (without ports, 80 and 443 are meant)"
            )
        self._check_secrets(policy)

    def _check_secrets(self, policy: NetworkPolicy) -> None:
        if (useless := useless_secret(policy)) is not None:
            raise errors.InvalidRequest(
                f"the secret for {useless.domain} is of no use: {useless.domain} is not allowed; add it to what the "
                "policy allows"
            )
        if (useless := useless_secret(msgspec.structs.replace(self.bound, secrets=policy.secrets))) is not None:
            raise errors.InvalidRequest(
                f"the secret for {useless.domain} is of no use: the operator of this host allows no sandbox to reach it"
            )

    def wants_door(self, policy: NetworkPolicy) -> bool:
        """Whether a sandbox of that policy has anywhere to go."""
        return self.always_open or (self._sealed and policy.allows_something)

    @property
    def always_open(self) -> bool:
        """Whether every sandbox has a door: there is something at it for each of them."""
        return self._sealed and self._packages.enabled

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
        await sandbox.network.vouch(policy)
        known, env = environment_of(sandbox.network.policy), environment_of(policy)
        if env.items() - known.items() or policy.secrets:  # whom to trust is read once by some, such as Node.js
            sandbox.add_env(env)
        sandbox.network.replace(policy)

    async def aclose(self) -> None:
        if self._egress is not None:
            await self._egress.aclose()

    def _proxy(self) -> Egress:
        from cloche.egress import Egress

        if self._egress is None:
            self._egress = Egress(self._config, self._packages, self._directory)
        return self._egress
