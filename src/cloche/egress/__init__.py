"""The egress proxy: on the host, it lets through the connections that a sandbox's policy allows, and logs
them all.

A sandbox has a network namespace of its own with loopback only. Its init binds a listener there and hands it
over; this package accepts on it, on the host. So nothing forwards inside, and no process of the sandbox is in
between.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from cloche.config.sections import NetworkConfig, PackagesConfig
from cloche.egress.connect import Dialler, ResolveName, Resolver
from cloche.egress.door import ConnectionLimiter, EgressConnection, SandboxEgress
from cloche.egress.http1 import HttpHead
from cloche.egress.journal import EgressCounters, NetworkJournal
from cloche.egress.proxy import ProxyDispatcher
from cloche.network_policy import NetworkPolicy

if TYPE_CHECKING:
    from cloche.egress.packages.index import PackageIndex

# The egress proxy of one host process: it opens and closes the egress of each sandbox.


class EgressProxy:
    """The proxy. `directory` is where packages are kept. `resolve` is for tests that change where names lead."""

    def __init__(
        self,
        config: NetworkConfig,
        packages: PackagesConfig,
        directory: Path | None = None,
        resolve: ResolveName | None = None,
    ):
        self.counters = EgressCounters()
        self._config = config
        self._packages = packages
        self._crowd = ConnectionLimiter(min(config.connections_total, _room_for_connections()))
        self._resolve = resolve or Resolver(config.hosts)
        self._dialler = Dialler(self._resolve)
        self._directory = directory
        self._index: PackageIndex | None = None
        serves_packages = packages.enabled and directory is not None
        self._proxy = ProxyDispatcher(self._dialler, self._serve_packages if serves_packages else None)
        self._doors: weakref.WeakSet[SandboxEgress] = weakref.WeakSet()

    def open(self, listener: socket.socket, policy: NetworkPolicy, *, sandbox: str, owner: str) -> SandboxEgress:
        """The egress of one sandbox at that listener, which it takes over."""
        journal = NetworkJournal(sandbox, owner, self._config.log_entries, self.counters)
        door = SandboxEgress(listener, policy, self._config, journal, self._crowd, self._proxy.attend)
        self._doors.add(door)
        return door

    @property
    def connections(self) -> int:
        """The number of open connections of all sandboxes."""
        return self._crowd.count

    @property
    def package_files(self) -> dict[str, int]:
        """How many package files were requested: `hit` and `miss` of the cache."""
        return self._index.opened_files if self._index is not None else {}

    async def _serve_packages(self, visit: EgressConnection, head: HttpHead) -> None:
        if self._index is None and self._directory is not None:
            from cloche.egress.packages.index import PackageIndex

            self._index = PackageIndex(self._packages, self._config, self._resolve, self._directory)
        if self._index is not None:
            await self._index.serve(visit, head)

    async def aclose(self) -> None:
        """Closes the egress of every sandbox."""
        await asyncio.gather(*(door.aclose() for door in list(self._doors)))
        if self._index is not None:
            await self._index.aclose()
        await self._dialler.aclose()


def _room_for_connections() -> int:
    """Each takes two descriptors of this process, which needs half of them for everything else."""
    return max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
