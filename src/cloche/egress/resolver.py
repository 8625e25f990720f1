"""Names become addresses on the host, once for each connection: what was checked is what is connected to."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from cloche.config.sections import addresses_of
from cloche.egress.destination import Address

Resolve = Callable[[str], Awaitable[list[Address]]]

THREADS = 64  # at most, each for one lookup: one can take long, and cannot be ended
HOSTS_FILE = "/etc/hosts"


class Unresolved(Exception):
    """No address is known for a name."""


class Resolver:
    """`hosts` come before what this host's own resolver says."""

    def __init__(self, hosts: Mapping[str, str]):
        self._hosts = {
            name.lower().removesuffix("."): [ipaddress.ip_address(each) for each in addresses_of(text)]
            for name, text in hosts.items()
        }
        self._room = asyncio.Semaphore(THREADS)

    async def __call__(self, name: str) -> list[Address]:
        """Raises Unresolved."""
        known = self._hosts.get(name)
        if known is not None:
            return known
        async with self._room:
            return await _in_thread(name)


async def _in_thread(name: str) -> list[Address]:
    """The thread is nobody's concern any more when the process ends: a pool's would be waited for."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[list[Address]] = loop.create_future()

    def look_up() -> None:
        try:
            addresses = _look_up(name)
        except Unresolved as error:
            tell(found.set_exception, error)
        else:
            tell(found.set_result, addresses)

    def tell(say: Callable[[Any], None], what: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(lambda: None if found.done() else say(what))

    threading.Thread(target=look_up, name="cloche-resolver", daemon=True).start()
    return await found


def _look_up(name: str) -> list[Address]:
    """The name as it is: what `search` in resolv.conf would make of it is another, which no rule was asked about."""
    try:
        found = socket.getaddrinfo(f"{name}.", None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        if listed := _listed(name):
            return listed
        raise Unresolved(f"{name} has no address: {getattr(error, 'strerror', None) or 'it is no name'}") from None
    addresses = dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found)
    return [ipaddress.ip_address(each) for each in addresses if "%" not in each]


def _listed(name: str) -> list[Address]:
    """From the host's own list, in which names have no dot at their end."""
    try:
        lines = Path(HOSTS_FILE).read_text("utf-8", "replace").lower().splitlines()
    except OSError:
        return []
    entries = (line.partition("#")[0].split() for line in lines)
    found = [words[0] for words in entries if name in words[1:]]
    return [ipaddress.ip_address(each) for each in found if _is_address(each)]


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return "%" not in text
