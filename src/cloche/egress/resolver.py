"""Names become addresses on the host, once for each connection: what was checked is what is connected to."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from cloche.egress.destination import Address
from cloche.network_config import addresses_of

Resolve = Callable[[str], Awaitable[list[Address]]]

THREADS = 16  # a lookup can take long, and cannot be ended


class Unresolved(Exception):
    """No address is known for a name."""


class Resolver:
    """`hosts` come before what this host's own resolver says."""

    def __init__(self, hosts: Mapping[str, str]):
        self._hosts = {
            name.lower().removesuffix("."): [ipaddress.ip_address(each) for each in addresses_of(text)]
            for name, text in hosts.items()
        }
        self._threads: ThreadPoolExecutor | None = None

    async def __call__(self, name: str) -> list[Address]:
        """Raises Unresolved."""
        known = self._hosts.get(name)
        if known is not None:
            return known
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, "cloche-resolver")
        return await asyncio.get_running_loop().run_in_executor(self._threads, _look_up, name)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def _look_up(name: str) -> list[Address]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Unresolved(f"{name} has no address: {error}") from None
    addresses = dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found)
    return [ipaddress.ip_address(each) for each in addresses if "%" not in each]
