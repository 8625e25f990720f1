"""`[network]` and `[packages]`: what the operator of a host lets sandboxes reach, whatever their clients ask for."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from cloche import errors
from cloche.model import GIB, MIB
from cloche.network_policy import Network as AddressRange
from cloche.network_policy import NetworkPolicy, parse_pattern
from cloche.structs import Struct


class Network(Struct):
    """The most that a sandbox may be allowed, what one gets that asks for nothing, and limits."""

    allow: tuple[str, ...] = ()  # nothing: sandboxes have loopback only, whatever they ask for
    deny: tuple[str, ...] = ()  # comes before `allow`
    default: tuple[str, ...] = ()  # what a sandbox is allowed that asks for nothing, within the above
    internal: tuple[str, ...] = ()  # private addresses and networks that may be reached nevertheless
    hosts: dict[str, str] = {}  # name -> address, or addresses with commas between: as in /etc/hosts
    connections: int = 128  # of one sandbox at once
    connections_total: int = 2048  # of all of them
    lookups: int = 8  # of names, of one sandbox at once
    request_seconds: float = 30.0  # for a program to say what it wants, once it has connected
    connect_seconds: float = 15.0  # to resolve a name and connect
    idle_seconds: float = 300.0  # of a connection on which nothing moves
    connection_seconds: float = 3600.0
    sandbox_bytes: int = 10 * GIB  # to and fro, in a sandbox's whole life
    log_entries: int = 1000  # of a sandbox's network log; the oldest make room

    def __post_init__(self) -> None:
        for key in ("allow", "deny", "default"):
            _check_patterns(f"network.{key}", getattr(self, key))
        for pattern in self.internal:
            _range("network.internal", pattern)
        for name, addresses in self.hosts.items():
            _check_host(name, addresses)
        for key in ("connections", "connections_total", "connect_seconds", "idle_seconds", "connection_seconds"):
            check_positive(f"network.{key}", getattr(self, key))
        for key in ("sandbox_bytes", "log_entries", "lookups", "request_seconds"):
            check_positive(f"network.{key}", getattr(self, key))

    @property
    def bound(self) -> NetworkPolicy:
        """What no sandbox may go beyond."""
        return NetworkPolicy(allow=self.allow, deny=self.deny)

    @property
    def internal_ranges(self) -> tuple[AddressRange, ...]:
        return tuple(_range("network.internal", each) for each in self.internal)


class Packages(Struct):
    """The package indexes that `pip`, `uv` and `npm` inside sandboxes can install from, with or without a network."""

    enabled: bool = False
    pypi: tuple[str, ...] = ()  # index URLs; none: those of this host's own pip configuration
    npm: str = ""  # the registry's URL; empty: that of this host's own npm configuration
    allow: tuple[str, ...] = ("*",)  # names of packages, with * where wanted; pypi:NAME and npm:NAME are of one kind
    deny: tuple[str, ...] = ()  # comes before `allow`
    cache_bytes: int = 5 * GIB  # kept on this host and shared; what was used longest ago makes room
    file_bytes: int = 512 * MIB  # of one wheel or tarball
    index_seconds: float = 600.0  # for which an index page is not asked for again
    requests_per_minute: int = 3000  # of one sandbox
    sandbox_bytes: int = 8 * GIB  # that one sandbox may take

    def __post_init__(self) -> None:
        for key in ("cache_bytes", "file_bytes", "requests_per_minute", "sandbox_bytes"):
            check_positive(f"packages.{key}", getattr(self, key))
        if not 0 <= self.index_seconds < float("inf"):
            raise errors.InvalidRequest(f"packages.index_seconds must be a number of seconds, not {self.index_seconds}")
        for url in (*self.pypi, *filter(None, (self.npm,))):
            _check_index(url)
        for pattern in (*self.allow, *self.deny):
            _check_package(pattern)


def _check_index(url: str) -> None:
    """The URL is not repeated: it can have a password in it."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("https", "http") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        known = False
    if not known:
        raise errors.InvalidRequest(
            "packages: the URL of an index begins with https:// and the name of a host, such as "
            "https://pypi.org/simple/ for packages.pypi and https://registry.npmjs.org/ for packages.npm"
        )


def _check_package(pattern: str) -> None:
    kind, colon, name = pattern.strip().rpartition(":")
    if not name or " " in name or (colon and kind.lower() not in ("pypi", "npm")):
        raise errors.InvalidRequest(
            f"packages: {pattern[:200]!r} is not a pattern of packages: use a name, * for many, and pypi: or npm: "
            "before it where only one kind is meant"
        )


def check_positive(key: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise errors.InvalidRequest(f"{key} must be a positive number, not {value}")


def _check_patterns(key: str, patterns: tuple[str, ...]) -> None:
    if isinstance(patterns, str):  # a list of letters to Python, and never what is meant
        raise errors.InvalidRequest(f"{key} is a list of patterns: write [{patterns[:300]!r}]")
    for pattern in patterns:
        try:
            parse_pattern(pattern)
        except errors.InvalidRequest as error:
            raise errors.InvalidRequest(f"{key}: {error}") from None


def _range(key: str, text: str) -> AddressRange:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise errors.InvalidRequest(f"{key}: {text!r} is neither an address nor a network like 10.1.0.0/16") from None


def _check_host(name: str, addresses: str) -> None:
    pattern = parse_pattern(name)
    if pattern.name in (None, "*") or pattern.below or pattern.ports:
        raise errors.InvalidRequest(f"network.hosts: {name!r} must be the whole name of a host")
    addresses_of(addresses)


def addresses_of(text: str) -> list[str]:
    """The addresses of a value of `network.hosts`. Raises InvalidRequest."""
    try:
        return [str(ipaddress.ip_address(each.strip())) for each in text.split(",")]
    except ValueError:
        raise errors.InvalidRequest(f"network.hosts: {text!r} must be addresses with commas between") from None
