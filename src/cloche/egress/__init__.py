"""The one door of a sandbox: a proxy on the host that lets through what its policy allows, and writes all of it down.

A sandbox has a network namespace of its own with loopback only. Its init binds a listener there and hands it over; this
package accepts on it, on the host. So there is nothing to forward inside, and no process of the sandbox in between.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from cloche.config.sections import Network, Packages
from cloche.egress.connect import Dialler, Resolve, Resolver
from cloche.egress.door import Crowd, Door, Visit
from cloche.egress.http1 import Head
from cloche.egress.journal import Journal, Tally
from cloche.egress.proxy import Proxy
from cloche.network_policy import NetworkPolicy

if TYPE_CHECKING:
    from cloche.egress.packages.index import PackageIndex

# The egress proxy of one host process: it opens doors, and closes them.


class Egress:
    """`directory` is where packages are kept. `resolve` is for tests, whose names change where they lead."""

    def __init__(
        self, config: Network, packages: Packages, directory: Path | None = None, resolve: Resolve | None = None
    ):
        self.tally = Tally()
        self._config = config
        self._packages = packages
        self._crowd = Crowd(min(config.connections_total, _room_for_connections()))
        self._resolve = resolve or Resolver(config.hosts)
        self._dialler = Dialler(self._resolve)
        self._directory = directory
        self._index: PackageIndex | None = None
        serves_packages = packages.enabled and directory is not None
        self._proxy = Proxy(self._dialler, self._serve_packages if serves_packages else None)
        self._doors: weakref.WeakSet[Door] = weakref.WeakSet()

    def open(self, listener: socket.socket, policy: NetworkPolicy, *, sandbox: str, owner: str) -> Door:
        """A door at that listener, which it takes over."""
        journal = Journal(sandbox, owner, self._config.log_entries, self.tally)
        door = Door(listener, policy, self._config, journal, self._crowd, self._proxy.attend)
        self._doors.add(door)
        return door

    @property
    def connections(self) -> int:
        """How many there are now, through all doors."""
        return self._crowd.count

    @property
    def package_files(self) -> dict[str, int]:
        """Those that were asked for: `hit` and `miss` of the cache."""
        return self._index.opened_files if self._index is not None else {}

    async def _serve_packages(self, visit: Visit, head: Head) -> None:
        if self._index is None and self._directory is not None:
            from cloche.egress.packages.index import PackageIndex

            self._index = PackageIndex(self._packages, self._config, self._resolve, self._directory)
        if self._index is not None:
            await self._index.serve(visit, head)

    async def aclose(self) -> None:
        """Closes every door that is open."""
        await asyncio.gather(*(door.aclose() for door in list(self._doors)))
        if self._index is not None:
            await self._index.aclose()
        await self._dialler.aclose()


def _room_for_connections() -> int:
    """Each takes two descriptors of this process, which needs half of them for everything else."""
    return max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
