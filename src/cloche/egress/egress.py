"""The egress proxy of one host process: it opens doors, and closes them."""

from __future__ import annotations

import socket

from cloche.egress.dialling import Dialler
from cloche.egress.door import Crowd, Door
from cloche.egress.journal import Journal
from cloche.egress.proxy import Proxy
from cloche.egress.resolver import Resolve, Resolver
from cloche.network_config import Network, Packages
from cloche.network_policy import NetworkPolicy


class Egress:
    """`resolve` is for tests, whose names change where they lead."""

    def __init__(self, config: Network, packages: Packages, resolve: Resolve | None = None):
        self._config = config
        self._packages = packages
        self._crowd = Crowd(config.connections_total)
        self._resolver = Resolver(config.hosts)
        self._proxy = Proxy(Dialler(resolve or self._resolver))

    def open(self, listener: socket.socket, policy: NetworkPolicy, *, sandbox: str, owner: str) -> Door:
        """A door at that listener, which it takes over."""
        journal = Journal(sandbox, owner, self._config.log_entries)
        return Door(listener, policy, self._config, journal, self._crowd, self._proxy.attend)

    async def aclose(self) -> None:
        self._resolver.close()
