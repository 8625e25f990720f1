"""What a program says at the door: CONNECT, plain HTTP, SOCKS5, or a request to the door itself."""

from __future__ import annotations

import ipaddress
from asyncio import IncompleteReadError
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from cloche.egress import forward, http1, streams
from cloche.egress.connect import Dialler
from cloche.egress.door import Visit, patience
from cloche.egress.http1 import BadRequest, Head
from cloche.egress.rules import BadDestination, Destination, parse, parse_authority
from cloche.egress.streams import Refusal
from cloche.egress.tunnel import Tunnel

if TYPE_CHECKING:
    from cloche.egress.interception import Interception

# SOCKS5, as far as it opens connections: RFC 1928, no authentication, CONNECT.

VERSION = 5
OLD_VERSION = 4
SOCKS_ESTABLISHED = streams.socks_reply(0)
_NO_AUTHENTICATION, _NONE_ACCEPTABLE = 0, 255
_CONNECT = 1
_IPV4, _NAME, _IPV6 = 1, 3, 4


class BadSocks(Refusal):
    """What came is not SOCKS5."""

    socks_code = 1


class NotSupported(BadSocks):
    """A command that is not CONNECT."""

    socks_code = 7


class UnknownAddress(BadSocks):
    """An address of a kind that does not exist."""

    socks_code = 8


async def hear(visit: Visit) -> Destination:
    """Where a program wants to go, when its first byte was the version's. Raises Refusal."""
    visit.attempt.protocol = "socks"
    visit.say_no = streams.in_silence
    try:
        await _greet(visit)
        visit.say_no = streams.in_socks
        return await _request(visit)
    except IncompleteReadError:
        raise BadSocks("the SOCKS request breaks off") from None


async def _greet(visit: Visit) -> None:
    count = (await visit.reader.readexactly(1))[0]
    if _NO_AUTHENTICATION not in await visit.reader.readexactly(count):
        visit.say_no = lambda _: bytes((VERSION, _NONE_ACCEPTABLE))
        raise BadSocks("SOCKS5 is served without authentication only")
    visit.writer.write(bytes((VERSION, _NO_AUTHENTICATION)))


async def _request(visit: Visit) -> Destination:
    version, command, reserved, kind = await visit.reader.readexactly(4)
    if version != VERSION or reserved != 0:
        raise BadSocks("the SOCKS request is not one of version 5")
    host = await _host(visit, kind)
    port = int.from_bytes(await visit.reader.readexactly(2), "big")
    visit.attempt.host = host
    asked = parse(host, port)
    visit.attempt.asked = asked
    if command != _CONNECT:
        raise NotSupported("of SOCKS5 only CONNECT is served")
    return asked


async def _host(visit: Visit, kind: int) -> str:
    if kind == _IPV4:
        return str(ipaddress.IPv4Address(await visit.reader.readexactly(4)))
    if kind == _IPV6:
        return str(ipaddress.IPv6Address(await visit.reader.readexactly(16)))
    if kind != _NAME:
        raise UnknownAddress("the SOCKS request has an address of an unknown kind")
    raw = await visit.reader.readexactly((await visit.reader.readexactly(1))[0])
    if not raw.isascii():
        raise BadDestination("the name of the host is not ASCII: names of other letters are written xn--...")
    return raw.decode()


HTTP_ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"

ServePackages = Callable[[Visit, Head], Awaitable[None]]


class NotServed(Refusal):
    status = 404


class Proxy:
    """`packages` answers what is asked of the door itself: None where it has nothing of its own."""

    def __init__(self, dialler: Dialler, packages: ServePackages | None):
        self._dialler = dialler
        self._packages = packages
        self._interception: Interception | None = None

    async def attend(self, visit: Visit) -> None:
        """Until the connection has had its answer. What it does not get it is told."""
        try:
            heard = await self._hear(visit)
            if isinstance(heard, Destination):
                await Tunnel(visit, heard, self._dialler, self._intercept, SOCKS_ESTABLISHED).run()
            elif heard is not None:
                await self._answer(visit, heard)
        except Refusal as why:
            await visit.refuse(why)

    async def _hear(self, visit: Visit) -> Head | Destination | None:
        async with patience(visit):
            first = await visit.reader.read(1)
            if not first:
                return None
            if first[0] == VERSION:
                return await hear(visit)
            if first[0] == OLD_VERSION:
                visit.attempt.protocol, visit.say_no = "socks", streams.in_old_socks
                raise BadSocks("of SOCKS only version 5 is served: use socks5h://")
            return await http1.read_head(visit.reader, first)

    async def _answer(self, visit: Visit, head: Head) -> None:
        if head.method == "CONNECT":
            visit.attempt.protocol, visit.attempt.host = "connect", head.target
            await Tunnel(visit, _goal_of_connect(head), self._dialler, self._intercept, HTTP_ESTABLISHED).run()
        elif head.target.startswith("/"):
            await self._of_its_own(visit, head)
        else:
            await self._plain(visit, head)

    async def _of_its_own(self, visit: Visit, head: Head) -> None:
        visit.attempt.protocol = "package"
        if self._packages is None:
            raise NotServed(
                "this is a proxy, and has no pages of its own: packages can be had here where the operator sets "
                "packages.enabled"
            )
        await self._packages(visit, head)

    async def _intercept(self, visit: Visit, asked: Destination, said: bytes) -> None:
        """TLS to a host that gets secrets. `said` is what the program has said of it."""
        if self._interception is None:
            from cloche.egress.interception import Interception

            self._interception = Interception(self._dialler)
        await self._interception.intercept(visit, asked, said)

    async def _plain(self, visit: Visit, head: Head) -> None:
        visit.attempt.protocol = "http"
        asked, path = forward.split_target(head.target)
        visit.attempt.asked = asked
        forward.check_host(head, asked)
        head.body_length  # noqa: B018  # what can be read in two ways is refused before anybody is spoken to
        far = await self._dialler.connect(visit, asked)
        await forward.Exchange(visit, head, asked, far).run(path)
        visit.attempt.end("allowed")


def _goal_of_connect(head: Head) -> Destination:
    """Raises BadRequest, BadDestination."""
    asked = parse_authority(head.target, None)
    if head.all("transfer-encoding") or head.one("content-length") not in (None, "0"):
        raise BadRequest("CONNECT has no body")
    if head.one("host") is not None:
        forward.check_host(head, asked)
    return asked
