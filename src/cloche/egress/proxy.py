"""Reads a program's first request and dispatches it: CONNECT, plain HTTP, SOCKS5, or a request to the proxy
itself.
"""

from __future__ import annotations

import ipaddress
from asyncio import IncompleteReadError
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from cloche.egress import forward, http1, streams
from cloche.egress.connect import Dialler
from cloche.egress.door import EgressConnection, request_deadline
from cloche.egress.http1 import BadRequest, HttpHead
from cloche.egress.rules import Destination, InvalidDestination, parse_authority, parse_destination
from cloche.egress.streams import EgressRefusal
from cloche.egress.tunnel import EgressTunnel

if TYPE_CHECKING:
    from cloche.egress.interception import TlsInterception

# The SOCKS5 server side, as far as it opens connections: RFC 1928, no authentication, CONNECT.

SOCKS_VERSION = 5
OLD_SOCKS_VERSION = 4
SOCKS_ESTABLISHED = streams.socks_reply(0)
_NO_AUTHENTICATION, _NONE_ACCEPTABLE = 0, 255
_CONNECT = 1
_IPV4, _NAME, _IPV6 = 1, 3, 4


class BadSocksRequest(EgressRefusal):
    """The request is not SOCKS5."""

    socks_code = 1


class UnsupportedSocksCommand(BadSocksRequest):
    """A command that is not CONNECT."""

    socks_code = 7


class UnknownSocksAddress(BadSocksRequest):
    """An address of a kind that does not exist."""

    socks_code = 8


async def read_socks_request(visit: EgressConnection) -> Destination:
    """The destination of a program's request, after its first byte, the version. Raises EgressRefusal."""
    visit.attempt.protocol = "socks"
    visit.say_no = streams.silent_refusal
    try:
        await _read_greeting(visit)
        visit.say_no = streams.socks_refusal
        return await _read_connect(visit)
    except IncompleteReadError:
        raise BadSocksRequest("the SOCKS request breaks off") from None


async def _read_greeting(visit: EgressConnection) -> None:
    count = (await visit.reader.readexactly(1))[0]
    if _NO_AUTHENTICATION not in await visit.reader.readexactly(count):
        visit.say_no = lambda _: bytes((SOCKS_VERSION, _NONE_ACCEPTABLE))
        raise BadSocksRequest("SOCKS5 is served without authentication only")
    visit.writer.write(bytes((SOCKS_VERSION, _NO_AUTHENTICATION)))


async def _read_connect(visit: EgressConnection) -> Destination:
    version, command, reserved, kind = await visit.reader.readexactly(4)
    if version != SOCKS_VERSION or reserved != 0:
        raise BadSocksRequest("the SOCKS request is not one of version 5")
    host = await _read_host(visit, kind)
    port = int.from_bytes(await visit.reader.readexactly(2), "big")
    visit.attempt.host = host
    destination = parse_destination(host, port)
    visit.attempt.destination = destination
    if command != _CONNECT:
        raise UnsupportedSocksCommand("of SOCKS5 only CONNECT is served")
    return destination


async def _read_host(visit: EgressConnection, kind: int) -> str:
    if kind == _IPV4:
        return str(ipaddress.IPv4Address(await visit.reader.readexactly(4)))
    if kind == _IPV6:
        return str(ipaddress.IPv6Address(await visit.reader.readexactly(16)))
    if kind != _NAME:
        raise UnknownSocksAddress("the SOCKS request has an address of an unknown kind")
    raw = await visit.reader.readexactly((await visit.reader.readexactly(1))[0])
    if not raw.isascii():
        raise InvalidDestination("the name of the host is not ASCII: names of other letters are written xn--...")
    return raw.decode()


HTTP_ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"

ServePackages = Callable[[EgressConnection, HttpHead], Awaitable[None]]


class PageNotServed(EgressRefusal):
    status = 404


class ProxyDispatcher:
    """`packages` answers requests to the proxy itself: None where it has no pages."""

    def __init__(self, dialler: Dialler, packages: ServePackages | None):
        self._dialler = dialler
        self._packages = packages
        self._interception: TlsInterception | None = None

    async def attend(self, visit: EgressConnection) -> None:
        """Serves the connection until it has had its answer. A refusal is sent to the program."""
        try:
            request = await self._read_request(visit)
            if isinstance(request, Destination):
                await EgressTunnel(visit, request, self._dialler, self._intercept_tls, SOCKS_ESTABLISHED).run()
            elif request is not None:
                await self._dispatch_request(visit, request)
        except EgressRefusal as why:
            await visit.refuse(why)

    async def _read_request(self, visit: EgressConnection) -> HttpHead | Destination | None:
        async with request_deadline(visit):
            first = await visit.reader.read(1)
            if not first:
                return None
            if first[0] == SOCKS_VERSION:
                return await read_socks_request(visit)
            if first[0] == OLD_SOCKS_VERSION:
                visit.attempt.protocol, visit.say_no = "socks", streams.old_socks_refusal
                raise BadSocksRequest("of SOCKS only version 5 is served: use socks5h://")
            return await http1.read_head(visit.reader, first)

    async def _dispatch_request(self, visit: EgressConnection, head: HttpHead) -> None:
        if head.method == "CONNECT":
            visit.attempt.protocol, visit.attempt.host = "connect", head.target
            await EgressTunnel(
                visit, _connect_destination(head), self._dialler, self._intercept_tls, HTTP_ESTABLISHED
            ).run()
        elif head.target.startswith("/"):
            await self._serve_own_page(visit, head)
        else:
            await self._forward_plain(visit, head)

    async def _serve_own_page(self, visit: EgressConnection, head: HttpHead) -> None:
        visit.attempt.protocol = "package"
        if self._packages is None:
            raise PageNotServed(
                "this is a proxy, and has no pages of its own: packages can be had here where the operator sets "
                "packages.enabled"
            )
        await self._packages(visit, head)

    async def _intercept_tls(self, visit: EgressConnection, destination: Destination, said: bytes) -> None:
        """TLS to a host that gets secrets. `said` are the bytes of it that the program has sent."""
        if self._interception is None:
            from cloche.egress.interception import TlsInterception

            self._interception = TlsInterception(self._dialler)
        await self._interception.intercept_tls(visit, destination, said)

    async def _forward_plain(self, visit: EgressConnection, head: HttpHead) -> None:
        visit.attempt.protocol = "http"
        destination, path = forward.split_target(head.target)
        visit.attempt.destination = destination
        forward.check_host(head, destination)
        head.body_length  # noqa: B018  # an ambiguous head is refused before any connection is made
        far = await self._dialler.connect(visit, destination)
        await forward.ForwardedRequest(visit, head, destination, far).run(path)
        visit.attempt.end("allowed")


def _connect_destination(head: HttpHead) -> Destination:
    """Raises BadRequest, InvalidDestination."""
    destination = parse_authority(head.target, None)
    if head.all("transfer-encoding") or head.single_value("content-length") not in (None, "0"):
        raise BadRequest("CONNECT has no body")
    if head.single_value("host") is not None:
        forward.check_host(head, destination)
    return destination
