"""Where the host itself goes for packages: to the indexes that its operator chose, and else to public addresses."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cloche.egress.destination import Address, BadDestination, parse
from cloche.egress.own_addresses import is_own
from cloche.egress.packages.problems import OutOfReach
from cloche.egress.resolver import Resolve, Unresolved
from cloche.egress.rulebook import FORBIDDEN
from cloche.network_policy import Network


class Reach:
    """`chosen` are hosts and ports of configured indexes, which may be anywhere; what their pages name may not be."""

    def __init__(self, resolve: Resolve, chosen: Collection[tuple[str, int]], internal: Sequence[Network] = ()):
        self._resolve = resolve
        self._chosen = frozenset(chosen)
        self._internal = tuple(internal)

    async def addresses(self, host: str, port: int) -> list[Address]:
        """Those that may be connected to, one at least. Raises OutOfReach."""
        try:
            asked = parse(host, port)
            found = [asked.address] if asked.address is not None else await self._resolve(asked.host)
        except (BadDestination, Unresolved):
            raise OutOfReach(f"{host} has no address") from None
        if (host, port) not in self._chosen:
            found = [address for address in found if self._is_public(address)]
        if not found:
            raise OutOfReach(
                f"the index names files at {host}:{port}, which is in a network of this host's own: its operator can "
                "allow that with network.internal"
            )
        return found

    def _is_public(self, address: Address) -> bool:
        if any(address.version == each.version and address in each for each in self._internal):
            return True
        near = any(address.version == network.version and address in network for network, _ in FORBIDDEN)
        return not near and not is_own(address)
