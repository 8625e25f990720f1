"""The host that a program names, in any spelling, as one thing: a lower-case name, or an address."""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import NamedTuple

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_NUMERIC = re.compile(r"(0x[0-9a-f]*|[0-9]+)")


class BadDestination(Exception):
    """What was named is no host and port."""


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
    bare = host.lower().removesuffix(".")
    address = _address(bare)
    if address is not None:
        return Destination(str(address), port, address)
    if len(bare) > 253 or not _NAME.fullmatch(bare):
        raise BadDestination(f"{host[:300]!r} is not the name of a host")
    return Destination(bare, port, None)


def parse_authority(text: str, default_port: int | None) -> Destination:
    """`host:port`, `[v6]:port` or, with a default, `host`. Raises BadDestination."""
    host, colon, port = text.rpartition(":")
    if text.startswith("[") and text.endswith("]"):
        host, colon = text, ""
    elif not colon:
        host = text
    if not colon and default_port is None:
        raise BadDestination(f"{text[:300]!r} names no port")
    if colon and not (port.isascii() and port.isdecimal() and len(port) <= 5):
        raise BadDestination(f"{text[:300]!r} names no port that exists")
    number = int(port) if colon else default_port or 0
    if host.startswith("[") and host.endswith("]"):
        address = _six(host[1:-1])
        return parse(str(address), number)
    if ":" in host:
        raise BadDestination(f"{text[:300]!r} is not a host and a port: write [ADDRESS]:PORT for IPv6")
    return parse(host, number)


def _address(host: str) -> Address | None:
    """None where it is a name. Numbers are addresses, as the C library would have it: decimal, octal, hex, short."""
    if ":" in host:
        return _six(host)
    if not _NUMERIC.fullmatch(host.rpartition(".")[2]):
        return None
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host)) if host.isascii() else None
    except OSError:
        raise BadDestination(f"{host[:300]!r} is neither a name nor an address") from None


def _six(text: str) -> Address:
    try:
        found = ipaddress.IPv6Address(text)
    except ValueError:
        raise BadDestination(f"{text[:300]!r} is not an IPv6 address") from None
    if found.scope_id is not None:
        raise BadDestination(f"{text[:300]!r} is an address of one link only")
    return found.ipv4_mapped or found
