"""Connections to the hosts that programs want to reach, if the policy allows it."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cloche.config.sections import parse_addresses
from cloche.egress.door import EgressConnection, SandboxEgress
from cloche.egress.rules import Address, Destination, PolicyDenied
from cloche.egress.streams import EgressRefusal, TransferOverLimit, connected_streams
from cloche.egress.streams import Streams as Streams

# Resolves names on the host, once for each connection: the checked address is the one connected to.

ResolveName = Callable[[str], Awaitable[list[Address]]]

RESOLVER_THREADS = 64  # at most, each for one lookup: one can take long, and cannot be ended
HOSTS_FILE = "/etc/hosts"


class NameUnresolved(Exception):
    """No address is known for a name."""


class Resolver:
    """Resolves names. `hosts` take precedence over this host's own resolver."""

    def __init__(self, hosts: Mapping[str, str]):
        self._hosts = {
            name.lower().removesuffix("."): [ipaddress.ip_address(each) for each in parse_addresses(text)]
            for name, text in hosts.items()
        }
        self._room = asyncio.Semaphore(RESOLVER_THREADS)

    async def __call__(self, name: str) -> list[Address]:
        """Raises NameUnresolved."""
        known = self._hosts.get(name)
        if known is not None:
            return known
        async with self._room:
            return await _resolve_in_thread(name)


async def _resolve_in_thread(name: str) -> list[Address]:
    """Uses a daemon thread: the process would wait for one of a pool at its end."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[list[Address]] = loop.create_future()

    def look_up() -> None:
        try:
            addresses = _resolve_name(name)
        except NameUnresolved as error:
            tell(found.set_exception, error)
        else:
            tell(found.set_result, addresses)

    def tell(say: Callable[[Any], None], what: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(lambda: None if found.done() else say(what))

    threading.Thread(target=look_up, name="cloche-resolver", daemon=True).start()
    return await found


def _resolve_name(name: str) -> list[Address]:
    """Resolves exactly that name: `search` in resolv.conf would make another of it, which no rule has checked."""
    try:
        found = socket.getaddrinfo(f"{name}.", None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        if listed := _hosts_file_addresses(name):
            return listed
        raise NameUnresolved(f"{name} has no address: {getattr(error, 'strerror', None) or 'it is no name'}") from None
    addresses = dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found)
    return [ipaddress.ip_address(each) for each in addresses if "%" not in each]


def _hosts_file_addresses(name: str) -> list[Address]:
    """The addresses in /etc/hosts, in which names have no dot at their end."""
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


MAX_ADDRESSES = 8  # of one name that are tried
LOOKUPS_PER_OWNER = (
    RESOLVER_THREADS // 4
)  # of one owner's sandboxes at once: lookups that never end do not block other owners


class HostUnreachable(EgressRefusal):
    """The host is allowed, but does not answer."""

    status, socks_code = 502, 4
    verdict = "failed"
    phrase = "Host cannot be reached"


class HostNotFound(HostUnreachable):
    phrase = "Host not found"


class HostRefuses(HostUnreachable):
    """The host is there, and refuses."""

    socks_code = 5
    phrase = "Host refuses connections"


class HostTimedOut(HostUnreachable):
    status = 504
    phrase = "Host does not answer"


class TooManyLookups(HostTimedOut):
    """Too many names are looked up already."""

    phrase = "Too many lookups at once"


class Dialler:
    def __init__(self, resolve: ResolveName):
        self._resolve = resolve
        self._lookups: set[asyncio.Task[list[Address]]] = set()
        self._shares: weakref.WeakValueDictionary[str, asyncio.Semaphore] = weakref.WeakValueDictionary()

    async def connect(
        self, visit: EgressConnection, destination: Destination, tls: ssl.SSLContext | None = None
    ) -> Streams:
        """It ends with the visit. With `tls`, over TLS, and the server must prove to be that host.

        Raises PolicyDenied, TransferOverLimit, HostUnreachable.
        """
        self.check(visit, destination)
        limit_seconds = visit.door.config.connect_seconds
        try:
            async with asyncio.timeout(limit_seconds):
                addresses = (
                    [destination.address]
                    if destination.address is not None
                    else await self._look_up_addresses(visit.door, destination)
                )
                return await self._connect_first(visit, addresses[:MAX_ADDRESSES], destination, tls)
        except TimeoutError:
            raise HostTimedOut(f"{destination} did not answer within {limit_seconds:g} s") from None

    def check(self, visit: EgressConnection, destination: Destination) -> None:
        """Whether it may be tried, before anything is looked up. Raises PolicyDenied, TransferOverLimit."""
        visit.attempt.destination = destination
        visit.door.rulebooks.check(destination)
        visit.set_destination(destination)
        most = visit.door.config.sandbox_bytes
        if visit.door.moved_bytes >= most:
            raise TransferOverLimit(f"the sandbox has moved {most} bytes, which is all that it may")

    async def _look_up_addresses(self, door: SandboxEgress, destination: Destination) -> list[Address]:
        """A lookup cannot be ended, so that one which is not waited for any more still counts."""
        share = self._shares.setdefault(door.owner, asyncio.Semaphore(LOOKUPS_PER_OWNER))
        await _acquire_lookup(door, share)
        lookup = asyncio.ensure_future(self._resolve(destination.host))
        self._lookups.add(lookup)
        lookup.add_done_callback(lambda done: self._on_looked_up(done, door.lookups, share))
        try:
            found = await asyncio.shield(lookup)
        except NameUnresolved as error:
            raise HostNotFound(str(error)) from None
        return door.rulebooks.allowed_addresses(destination, found)

    def _on_looked_up(self, lookup: asyncio.Task[list[Address]], *used: asyncio.Semaphore) -> None:
        for each in used:
            each.release()
        self._lookups.discard(lookup)
        if not lookup.cancelled():
            lookup.exception()  # marks it as retrieved, also if no caller waits any more

    async def _connect_first(
        self,
        visit: EgressConnection,
        addresses: Sequence[Address],
        destination: Destination,
        tls: ssl.SSLContext | None,
    ) -> Streams:
        """The first that answers. Each has its share of the time, so that a dead one leaves some for the others."""
        share_seconds = visit.door.config.connect_seconds / len(addresses)
        failed: HostUnreachable = HostUnreachable(f"{destination.host} has no address")
        for address in addresses:
            try:
                async with asyncio.timeout(share_seconds):
                    return await _open_connection(visit, address, destination, tls)
            except TimeoutError:
                failed = HostTimedOut(f"{destination} did not answer within {share_seconds:g} s")
            except ConnectionRefusedError:
                failed = HostRefuses(f"{destination} refuses connections")
            except OSError as error:
                failed = HostUnreachable(f"{destination} cannot be reached: {_show_os_error(error)}")
        raise failed

    async def aclose(self) -> None:
        for lookup in self._lookups:
            lookup.cancel()


async def _acquire_lookup(door: SandboxEgress, share: asyncio.Semaphore) -> None:
    """Takes a lookup slot of the sandbox and of its owner, in half of the time, as the lookup takes some
    itself.

    Raises TooManyLookups.
    """
    try:
        async with asyncio.timeout(door.config.connect_seconds / 2):
            await door.lookups.acquire()
            try:
                await share.acquire()
            except BaseException:
                door.lookups.release()
                raise
    except TimeoutError:
        raise TooManyLookups(
            f"{door.config.lookups} names are being looked up for the sandbox, or {LOOKUPS_PER_OWNER} for its owner, "
            "which "
            "is all at once, and none was found in time"
        ) from None


async def _open_connection(
    visit: EgressConnection, address: Address, destination: Destination, tls: ssl.SSLContext | None
) -> Streams:
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    visit.set_address(address)
    try:
        await asyncio.get_running_loop().sock_connect(connection, (str(address), destination.port))
        reader, writer = await connected_streams(connection, tls, destination.host)
    except BaseException:
        connection.close()
        raise
    visit.arrived(connection, writer)
    return reader, writer


def _show_os_error(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not that host's: {error.verify_message}"
    return error.strerror or type(error).__name__


__all__ = ["Dialler", "HostTimedOut", "HostUnreachable", "PolicyDenied", "Streams"]
