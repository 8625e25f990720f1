"""The host that a program names, in any spelling, as one thing: a lower-case name, or an address."""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import NamedTuple

from cloche.egress.refusal import Refusal

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_NUMBER = r"(0x[0-9a-f]*|[0-9]+)"
_NUMERIC = re.compile(_NUMBER)
_NUMBERS = re.compile(rf"{_NUMBER}(\.{_NUMBER}){{0,3}}")  # the C library overlooks what follows on a space


_SHOWABLE = re.compile(r"[0-9A-Za-z._:%\[\]-]{1,300}")


def is_showable(host: str) -> bool:
    """Whether it may be in a log. With anything in it that no host has it could be a path, or a password."""
    return _SHOWABLE.fullmatch(host) is not None


def shown(host: str) -> str:
    return repr(host) if is_showable(host) else "what was named"


class BadDestination(Refusal):
    """What was named is no host and port."""

    status, socks_code = 400, 1


class Destination(NamedTuple):
    host: str  # a name, or an address in its usual spelling
    port: int
    address: Address | None  # where an address was named

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse(host: str, port: int) -> Destination:
    """Raises BadDestination. Whatever a resolver could take for an address is an address here."""
    if not 0 < port < 65536:
        raise BadDestination(f"{port} is not a port")
    if not host.isascii():  # some letters are others in lower case
        raise BadDestination("the name of the host is not ASCII: names of other letters are written xn--...")
    bare = host.lower().removesuffix(".")
    address = _address(bare)
    if address is not None:
        return Destination(str(address), port, address)
    if len(bare) > 253 or not _NAME.fullmatch(bare):
        raise BadDestination(f"{shown(host)} is not the name of a host")
    return Destination(bare, port, None)


def parse_authority(text: str, default_port: int | None) -> Destination:
    """`host:port`, `[v6]:port` or, with a default, `host`. Raises BadDestination."""
    host, colon, port = text.rpartition(":")
    if text.startswith("[") and text.endswith("]"):
        host, colon = text, ""
    elif not colon:
        host = text
    if not colon and default_port is None:
        raise BadDestination(f"{shown(text)} names no port")
    if colon and not (port.isascii() and port.isdecimal() and len(port) <= 5):
        raise BadDestination(f"{shown(text)} names no port that exists")
    number = int(port) if colon else default_port or 0
    if host.startswith("[") and host.endswith("]"):
        address = _six(host[1:-1])
        return parse(str(address), number)
    if ":" in host:
        raise BadDestination(f"{shown(text)} is not a host and a port: write [ADDRESS]:PORT for IPv6")
    return parse(host, number)


def _address(host: str) -> Address | None:
    """None where it is a name. Numbers are addresses, as the C library would have it: decimal, octal, hex, short."""
    if ":" in host:
        return _six(host)
    if not _NUMERIC.fullmatch(host.rpartition(".")[2]):
        return None
    try:
        if _NUMBERS.fullmatch(host):
            return ipaddress.IPv4Address(socket.inet_aton(host))
    except OSError:
        pass
    raise BadDestination(f"{shown(host)} is neither a name nor an address")


def _six(text: str) -> Address:
    try:
        found = ipaddress.IPv6Address(text)
    except ValueError:
        raise BadDestination(f"{shown(text)} is not an IPv6 address") from None
    if found.scope_id is not None:
        raise BadDestination(f"{shown(text)} is an address of one link only")
    return plain(found)


def plain(address: Address) -> Address:
    """An IPv4 address as such, also where it is written as one of IPv6."""
    return (address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else address
