"""Decides whether a destination is allowed: by the sandbox's policy, the operator's, and the forbidden
addresses.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
import struct
import tomllib
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import NamedTuple

from cloche.egress.streams import EgressRefusal
from cloche.network_policy import (
    ALL_PORTS,
    WEB_PORTS,
    HostPattern,
    IpNetwork,
    NetworkPolicy,
    NetworkRule,
    parse_pattern,
)

# The host that a program names, in any spelling, as one value: a lower-case name, or an address.

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_NUMBER = r"(0x[0-9a-f]*|[0-9]+)"
_NUMERIC = re.compile(_NUMBER)
_NUMBERS = re.compile(rf"{_NUMBER}(\.{_NUMBER}){{0,3}}")  # the C library ignores text after a space


_SHOWABLE = re.compile(r"[0-9A-Za-z._:%\[\]-]{1,300}")


def is_showable(host: str) -> bool:
    """Whether it may be in a log. With anything in it that no host has it could be a path, or a password."""
    return _SHOWABLE.fullmatch(host) is not None


def show_host(host: str) -> str:
    return repr(host) if is_showable(host) else "the named host"


class InvalidDestination(EgressRefusal):
    """The text is no host and port."""

    status, socks_code = 400, 1


class Destination(NamedTuple):
    host: str  # a name, or an address in its usual spelling
    port: int
    address: Address | None  # where an address was named

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_destination(host: str, port: int) -> Destination:
    """The destination of a host and a port. Raises InvalidDestination. Any text that a resolver could take for
    an address is an address here.
    """
    if not 0 < port < 65536:
        raise InvalidDestination(f"{port} is not a port")
    if not host.isascii():  # some letters are others in lower case
        raise InvalidDestination("the name of the host is not ASCII: names of other letters are written xn--...")
    bare = host.lower().removesuffix(".")
    address = _parse_address(bare)
    if address is not None:
        return Destination(str(address), port, address)
    if len(bare) > 253 or not _NAME.fullmatch(bare):
        raise InvalidDestination(f"{show_host(host)} is not the name of a host")
    return Destination(bare, port, None)


def parse_authority(text: str, default_port: int | None) -> Destination:
    """`host:port`, `[v6]:port` or, with a default, `host`. Raises InvalidDestination."""
    host, colon, port = text.rpartition(":")
    if text.startswith("[") and text.endswith("]"):
        host, colon = text, ""
    elif not colon:
        host = text
    if not colon and default_port is None:
        raise InvalidDestination(f"{show_host(text)} names no port")
    if colon and not (port.isascii() and port.isdecimal() and len(port) <= 5):
        raise InvalidDestination(f"{show_host(text)} names no port that exists")
    number = int(port) if colon else default_port or 0
    if host.startswith("[") and host.endswith("]"):
        address = _parse_ipv6(host[1:-1])
        return parse_destination(str(address), number)
    if ":" in host:
        raise InvalidDestination(f"{show_host(text)} is not a host and a port: write [ADDRESS]:PORT for IPv6")
    return parse_destination(host, number)


def _parse_address(host: str) -> Address | None:
    """The address, or None for a name. Numbers are addresses, as in the C library: decimal, octal, hex, short."""
    if ":" in host:
        return _parse_ipv6(host)
    if not _NUMERIC.fullmatch(host.rpartition(".")[2]):
        return None
    try:
        if _NUMBERS.fullmatch(host):
            return ipaddress.IPv4Address(socket.inet_aton(host))
    except OSError:
        pass
    raise InvalidDestination(f"{show_host(host)} is neither a name nor an address")


def _parse_ipv6(text: str) -> Address:
    try:
        found = ipaddress.IPv6Address(text)
    except ValueError:
        raise InvalidDestination(f"{show_host(text)} is not an IPv6 address") from None
    if found.scope_id is not None:
        raise InvalidDestination(f"{show_host(text)} is an address of one link only")
    return unmapped_address(found)


def unmapped_address(address: Address) -> Address:
    """An IPv4 address as such, also where it is written as one of IPv6."""
    return (address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else address


# The host's own addresses, public ones among them: its services listen there, too.

# Of <linux/rtnetlink.h>.
_NETLINK_ROUTE = 0
_NEW_ROUTE, _GET_ROUTE = 24, 26
_REQUEST = 1
_DESTINATION = 1
_LOCAL, _ANYCAST = 2, 4
_ERROR = 2
_NO_WAY = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_HEADER, _ROUTE, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=8BI"), struct.Struct("=HH")
_KIND_AT = _HEADER.size + 7


def is_own_address(address: Address) -> bool:
    """Whether the kernel has that address now, as addresses come and go. Nothing is sent, and nothing waits.

    An address that another device translates to one of this host is not known to it, and is not its own here.
    """
    try:
        return _route_is_local(address)
    except OSError:  # some containers have no routing socket
        return _connects_from(address)


def _route_is_local(address: Address) -> bool:
    """Whether the way there ends in this host. Raises OSError."""
    target = _ATTRIBUTE.pack(_ATTRIBUTE.size + len(address.packed), _DESTINATION) + address.packed
    message = _ROUTE.pack(_address_family(address), address.max_prefixlen, 0, 0, 0, 0, 0, 0, 0) + target
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, _NETLINK_ROUTE) as kernel:
        kernel.send(_HEADER.pack(_HEADER.size + len(message), _GET_ROUTE, _REQUEST, 1, 0) + message)
        reply = kernel.recv(4096)  # it is there as soon as the question was taken
    kind = _HEADER.unpack_from(reply)[1]
    if kind == _ERROR:
        number = -struct.unpack_from("=i", reply, _HEADER.size)[0]
        if number in _NO_WAY:
            return False
        raise OSError(number, os.strerror(number))
    return kind == _NEW_ROUTE and reply[_KIND_AT] in (_LOCAL, _ANYCAST)


def _connects_from(address: Address) -> bool:
    """Whether a connection to that address comes from it, as with most of a host's own. Where that cannot be
    found out, as when there are no descriptors left, it counts as one.
    """
    try:
        with socket.socket(_address_family(address), socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as asking:
            asking.connect((str(address), 9))
            return bool(asking.getsockname()[0] == str(address))
    except OSError as error:
        return error.errno not in _NO_WAY


def _address_family(address: Address) -> socket.AddressFamily:
    return socket.AF_INET6 if address.version == 6 else socket.AF_INET


class PolicyDenied(EgressRefusal):
    """A policy does not allow the destination, or its address is forbidden for all sandboxes."""

    phrase = "Denied by network policy"


class EgressRule(NamedTuple):
    """A parsed rule."""

    allows: bool
    text: str
    pattern: HostPattern
    ports: tuple[tuple[int, int], ...]

    def has_port(self, port: int) -> bool:
        return any(first <= port <= last for first, last in self.ports)

    def has_name(self, name: str) -> bool:
        return self.pattern.has_name(name)

    def has_address(self, address: Address) -> bool:
        network = self.pattern.network
        return network is not None and network.version == address.version and address in network


def _parse_rule(rule: NetworkRule) -> EgressRule:
    pattern, allows = parse_pattern(rule.host), rule.action == "allow"
    return EgressRule(allows, rule.host, pattern, pattern.ports or (WEB_PORTS if allows else ALL_PORTS))


class PolicyRules:
    """One policy. The first rule that matches decides; where none does it is denied."""

    def __init__(self, policy: NetworkPolicy, origin: str):
        self._rules = [_parse_rule(rule) for rule in policy.ordered]
        self._origin = origin

    def check(self, destination: Destination) -> None:
        """Whether it may be tried at all, before anything is looked up. Raises PolicyDenied."""
        rule = self.rule_for(destination)
        if rule is None:
            raise PolicyDenied(f"{destination} is not allowed by the {self._origin}")
        if not rule.allows:
            raise PolicyDenied(f"{destination} is denied by the {self._origin}: {rule.text}")

    def rule_for(self, destination: Destination) -> EgressRule | None:
        """The rule that decides; None where there is none, which is a denial."""
        matching = (
            each for each in self._rules if each.has_port(destination.port) and self._rule_matches(each, destination)
        )
        return next(matching, None)

    def check_address(self, destination: Destination, address: Address) -> None:
        """Whether a name that was allowed may lead there: a network that is denied first may not be. Raises
        PolicyDenied.
        """
        for rule in self._rules:
            if not rule.has_port(destination.port):
                continue
            if self._rule_matches(rule, destination) or (rule.allows and rule.has_address(address)):
                return
            if rule.has_address(address):
                raise PolicyDenied(
                    f"{destination.host} resolves to an address denied by the {self._origin}: {rule.text}"
                )

    def _rule_matches(self, rule: EgressRule, destination: Destination) -> bool:
        if destination.address is None:
            return rule.has_name(destination.host)
        return rule.pattern.name == "*" or rule.has_address(destination.address)


class SandboxRules:
    """Both policies of a sandbox. Its own can be replaced while it runs."""

    def __init__(self, own: NetworkPolicy, bound: NetworkPolicy, internal: Sequence[IpNetwork] = ()):
        self._bound = PolicyRules(bound, "operator's network policy")
        self._internal = tuple(internal)
        self.replace(own)

    def replace(self, own: NetworkPolicy) -> None:
        self._own = PolicyRules(own, "sandbox's network policy")

    def check(self, destination: Destination) -> None:
        """Raises PolicyDenied."""
        self._own.check(destination)
        self._bound.check(destination)
        if destination.address is not None:
            self._check_forbidden(destination, destination.address)

    def allowed_addresses(self, destination: Destination, found: Iterable[Address]) -> list[Address]:
        """The addresses of a name that may be connected to. Raises PolicyDenied where none may be."""
        allowed, why = [], f"{destination.host} has no address"
        for address in map(unmapped_address, found):
            try:
                self._own.check_address(destination, address)
                self._bound.check_address(destination, address)
                self._check_forbidden(destination, address)
            except PolicyDenied as denied:
                why = str(denied)
            else:
                allowed.append(address)
        if not allowed:
            raise PolicyDenied(why)
        return allowed

    def check_again(self, destination: Destination, reached: Address | None) -> None:
        """Checks the destination and the address of an open connection. Raises PolicyDenied."""
        self.check(destination)
        if reached is not None and destination.address is None:
            self.allowed_addresses(destination, [reached])

    def _check_forbidden(self, destination: Destination, address: Address) -> None:
        if any(address.version == each.version and address in each for each in self._internal):
            return
        leads = "is" if destination.address is not None else "leads to"  # not where: names of a network are its own
        for network, reason in FORBIDDEN_NETWORKS:
            if address.version == network.version and address in network:
                raise PolicyDenied(f"{destination.host} {leads} no public address: {reason}")
        if is_own_address(address):
            raise PolicyDenied(f"{destination.host} {leads} an address of this host itself")


def _load_forbidden() -> list[tuple[IpNetwork, str]]:
    text = resources.files("cloche.egress").joinpath("forbidden.toml").read_text("utf-8")
    return [(ipaddress.ip_network(network), reason) for network, reason in tomllib.loads(text)["networks"].items()]


FORBIDDEN_NETWORKS = _load_forbidden()
