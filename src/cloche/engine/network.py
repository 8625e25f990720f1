"""A sandbox's network: its policy, its door, and the log of what went through it or did not."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

from cloche import errors
from cloche.engine.guest import Guest
from cloche.engine.listening import open_listener
from cloche.engine.trust import TRUST_ENV, write_bundle
from cloche.guest.paths import DOOR_PORT
from cloche.network_policy import NetworkEntry, NetworkPolicy

if TYPE_CHECKING:  # loaded where a sandbox has a network: most have none
    from cloche.egress import Egress
    from cloche.egress.authority import Authority
    from cloche.egress.door import Door

PROXY = f"http://127.0.0.1:{DOOR_PORT}"
NO_PROXY = "localhost,127.0.0.1,0.0.0.0,::1,cloche"  # no networks: many programs know only addresses
PROXY_ENV = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), PROXY),
    **dict.fromkeys(("ALL_PROXY", "all_proxy"), PROXY),  # httpx, with which many talk to models, fails at socks5h://
    **dict.fromkeys(("NO_PROXY", "no_proxy"), NO_PROXY),
    "NODE_USE_ENV_PROXY": "1",  # so that Node's own fetch heeds them
}


def environment_of(policy: NetworkPolicy) -> dict[str, str]:
    """What programs need to know of a network: where its door is, whom to trust, and the placeholders of secrets."""
    if not policy.allows_something:
        return {}
    placeholders = {secret.name: f"${secret.name}" for secret in policy.secrets if secret.name is not None}
    return {**placeholders, **PROXY_ENV, **TRUST_ENV}


class SandboxNetwork:
    """Where the policy allows nothing there need be no door. `listener`: the door's, where it was made in advance."""

    def __init__(self, guest: Guest, policy: NetworkPolicy, listener: socket.socket | None = None):
        self._guest = guest
        self._policy = policy
        self._listener = listener
        self._door: Door | None = None
        self._has_bundle = False
        self._closed = False
        self._opening = asyncio.Lock()

    @property
    def policy(self) -> NetworkPolicy:
        return self._policy

    @property
    def log(self) -> list[NetworkEntry]:
        """What programs have tried, the oldest first, and then what is still open."""
        return [] if self._door is None else self._door.log

    @property
    def dropped(self) -> int:
        """How many entries of the log made room for those that it has."""
        return 0 if self._door is None else self._door.journal.dropped

    @property
    def is_open(self) -> bool:
        return self._door is not None

    async def open(self, egress: Egress, *, sandbox: str, owner: str) -> None:
        """Raises InvalidRequest where a program inside has the door's port, Gone."""
        async with self._opening:
            if self._door is not None:
                return
            listener = self._listener or await make_listener(self._guest)
            self._listener = None
            if self._closed:  # the sandbox ended while its init answered
                listener.close()
                raise errors.SandboxLost("the sandbox ended before its network was opened")
            self._door = egress.open(listener, self._policy, sandbox=sandbox, owner=owner)
        await self.vouch(self._policy)

    async def vouch(self, policy: NetworkPolicy) -> None:
        """Has programs trust whom they must for that policy: with secrets, also the proxy. Raises NoSpace, Gone."""
        async with self._opening:
            if self._door is None or self._door.authority is not None or not policy.allows_something:
                return
            if policy.secrets:
                self._door.authority = await self._own_authority()
            elif not self._has_bundle:
                await write_bundle(self._guest)
            self._has_bundle = True

    async def _own_authority(self) -> Authority:
        from cloche.egress.authority import Authority

        authority = await asyncio.to_thread(Authority)
        await write_bundle(self._guest, authority.certificate_pem)
        return authority

    def replace(self, policy: NetworkPolicy) -> None:
        self._policy = policy
        if self._door is not None:
            self._door.replace(policy)

    def close(self) -> None:
        self._closed = True
        if self._listener is not None:
            self._listener.close()
        if self._door is not None:
            self._door.close()


async def make_listener(guest: Guest) -> socket.socket:
    """The listener of a sandbox's door, for us to accept on. Raises InvalidRequest where its port is taken, Gone."""
    try:
        return await open_listener(guest, DOOR_PORT)
    except errors.FileError:
        raise errors.InvalidRequest(
            f"a program in the sandbox listens on port {DOOR_PORT}, which its network needs: end it first"
        ) from None
