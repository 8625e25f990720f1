"""httpx2's transport, with addresses that were checked. What was checked is what is connected to."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from typing import Any

import httpcore2
import httpx2

from cloche.egress.packages.reach import Reach


class GuardedTransport(httpx2.AsyncHTTPTransport):
    def __init__(self, reach: Reach, context: ssl.SSLContext, limits: httpx2.Limits):
        super().__init__(verify=context, limits=limits, trust_env=False)
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=context,
            max_connections=limits.max_connections,
            max_keepalive_connections=limits.max_keepalive_connections,
            keepalive_expiry=limits.keepalive_expiry,
            network_backend=_Network(reach),
        )


class _Network(httpcore2.AnyIOBackend):
    def __init__(self, reach: Reach):
        self._reach = reach

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        addresses = await self._reach.addresses(host, port)  # raises OutOfReach, which nobody on the way knows
        for address in addresses[:-1]:
            try:
                return await super().connect_tcp(str(address), port, timeout, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout):
                continue
        return await super().connect_tcp(str(addresses[-1]), port, timeout, local_address, socket_options)
