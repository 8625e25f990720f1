"""SOCKS5, as far as it opens connections: RFC 1928, no authentication, CONNECT."""

from __future__ import annotations

import ipaddress
from asyncio import IncompleteReadError

from cloche.egress import refusal
from cloche.egress.destination import BadDestination, Destination, parse
from cloche.egress.refusal import Refusal
from cloche.egress.visit import Visit

VERSION = 5
OLD_VERSION = 4
ESTABLISHED = refusal.socks_reply(0)
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
    visit.say_no = refusal.in_silence
    try:
        await _greet(visit)
        visit.say_no = refusal.in_socks
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
