"""The sections of the configuration: one class for each table."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec

from cloche import errors
from cloche.config.bounds import MibOrMore, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section
from cloche.model import GIB, KIB, MIB
from cloche.network_policy import IpNetwork as AddressRange
from cloche.network_policy import NetworkPolicy, parse_pattern
from cloche.structs import Struct

# `[audit]`: configuration of the audit log.


class AuditConfig(Section):
    """The audit log of a server: see `cloche.engine.operations.audit`."""

    enabled: bool = True
    days: PositiveFloat = 90.0  # that a line is kept
    max_bytes: MibOrMore = 1 * GIB  # of all files: beyond it, the oldest go before their time


# `[capacity]`: how much a host takes on at once.


class CapacityConfig(Section):
    """Limits of a host. Beyond them requests wait, queued per owner, and are refused after a time."""

    # at once, those that are paused with their memory counted; 0: as many as there is room for
    sandboxes: NonNegativeInt = 0
    # that run at once, also those that wait for something; 0: 64 for each core, 256 or more
    executions: NonNegativeInt = 0
    memory_reserve_bytes: NonNegativeInt = 256 * MIB  # no sandbox begins where this host has less memory left
    queued: NonNegativeInt = 1000  # requests that wait for a place, in all
    queued_per_owner: NonNegativeInt = 250
    queue_seconds: NonNegativeFloat = 30.0  # that one waits


# `[disk]`: how much disk space templates and leftovers may use where nothing else bounds it.


class DiskConfig(Section):
    """Settings of garbage collection: see `engine/operations/gc.py`."""

    template_versions: PositiveInt = 5  # of one name that are kept, though nothing uses them
    template_days: PositiveFloat = 30.0  # for which a version that nothing uses is kept in any case
    collect_hours: PositiveFloat = 1.0  # between two collections


# `[kept]` and `[history]`: how much of sandboxes is kept.


class RetentionLimits(Section):
    """Limits, for each owner, on paused sandboxes and snapshots."""

    paused_seconds: PositiveFloat = 30 * 86400.0  # after which a paused sandbox is given up
    paused: NonNegativeInt = 200  # sandboxes
    paused_bytes: NonNegativeInt = 20 * GIB  # of the files of all of them
    snapshots: NonNegativeInt = 100
    snapshot_bytes: NonNegativeInt = 20 * GIB  # of all together


class HistoryLimits(Section):
    """Limits on the memory for executed cells with their outputs."""

    sandbox_bytes: NonNegativeInt = 8 * MIB  # of each sandbox: the oldest make room
    bytes: NonNegativeInt = 256 * MIB  # of all of them: beyond that, each that needs more has an even share


# `[mcp]`: limits for clients of the Model Context Protocol.


class McpConfig(Section):
    """`/mcp`: see `cloche.mcp`."""

    idle_seconds: PositiveFloat = 1800.0  # without a request, after which a session and its sandboxes end
    sessions_per_owner: PositiveInt = 64
    origins: tuple[str, ...] = ()  # of web pages that may speak to it, like https://inspector.example.com


# `[open_terminal]`: workspaces of Open Terminal's clients.


class TerminalPolicy(Struct, forbid_unknown_fields=True):
    """What workspaces under `/p/NAME/` are made of."""

    template: str = ""  # empty: that of the section
    allow: tuple[str, ...] | None = None  # hosts, within those of the operator; None: the default of this host

    def __post_init__(self) -> None:
        _check_patterns("open_terminal.policies", self.allow or ())


class OpenTerminalConfig(Section):
    """Workspaces of Open Terminal's clients: `/open-terminal`."""

    template: str = "python"
    idle_minutes: PositiveFloat = 60.0  # after which a workspace is paused
    info: str = ""  # about the environment, for models
    policies: dict[str, TerminalPolicy] = {}  # by the name in `/p/NAME/`


# `[quotas]`: default quotas of each owner and of each key. None is as much as the host has.


def check_quota_amount(name: str, amount: float | None) -> None:
    """Raises InvalidRequest unless it is None, or a number that can be a quota."""
    if amount is None:
        return
    if not 0 <= amount < float("inf"):
        raise errors.InvalidRequest(f"the quota {name} must be a number, 0 or more, not {amount}")
    if name == "lifetime_seconds" and amount < 1:
        raise errors.InvalidRequest(f"the quota {name} must be 1 or more, not {amount}")


class KeyQuota(Struct):
    """The quota of one key: at most as much as its owner's."""

    sandboxes: int | None = None  # that have a cell: those that run, and those that are paused with their memory
    executions_per_minute: int | None = None  # of code, and starts of commands and terminals
    cpu_seconds_per_hour: float | None = None  # of all programs in sandboxes, also in the background
    memory_bytes: int | None = None  # that the sandboxes which have a cell may use, by their limits
    lifetime_seconds: float | None = None  # of each sandbox

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            check_quota_amount(name, getattr(self, name))


class Quota(KeyQuota):
    """The quota of one owner, for all keys together."""

    stored_bytes: int | None = None  # of all that outlasts sandboxes


class QuotaDefaults(Struct):
    owner: Quota = Quota()
    key: KeyQuota = KeyQuota()


QUOTA_NAMES = Quota.__struct_fields__
"""Of all quotas."""


class QuotaOverride(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A quota of its own for an owner or a key: a number, or None for no limit but the host.

    Unset: the default.
    """

    sandboxes: int | msgspec.UnsetType | None = msgspec.UNSET
    executions_per_minute: int | msgspec.UnsetType | None = msgspec.UNSET
    cpu_seconds_per_hour: float | msgspec.UnsetType | None = msgspec.UNSET
    memory_bytes: int | msgspec.UnsetType | None = msgspec.UNSET
    lifetime_seconds: float | msgspec.UnsetType | None = msgspec.UNSET
    stored_bytes: int | msgspec.UnsetType | None = msgspec.UNSET

    def __post_init__(self) -> None:
        for name, amount in self.given().items():
            check_quota_amount(name, amount)

    def given(self) -> dict[str, float | None]:
        """The amounts that are set."""
        found = {name: getattr(self, name) for name in QUOTA_NAMES}
        return {name: amount for name, amount in found.items() if amount is not msgspec.UNSET}

    def __str__(self) -> str:
        """The form used in the logs."""
        given = {name: "unlimited" if amount is None else f"{amount:.15g}" for name, amount in self.given().items()}
        return " ".join(f"{name}={amount}" for name, amount in given.items()) or "default"

    def apply_to(self, default: KeyQuota) -> Quota:
        """The effective quota: `default` with these amounts in its place."""
        return Quota(**{**msgspec.structs.asdict(default), **self.given()})


# `[runs]`: limits on detached runs, which outlive their connections.


class RunsConfig(Section):
    """Detached runs: see `cloche.engine.executions.runs`."""

    events_bytes: Annotated[int, msgspec.Meta(ge=16 * KIB)] = 8 * MIB  # of one run's events: the oldest make room
    # of all runs of one owner: those that ended first make room
    owner_bytes: Annotated[int, msgspec.Meta(ge=16 * KIB)] = 64 * MIB
    per_owner: PositiveInt = 1000  # runs that are kept: the same
    at_once: PositiveInt = 64  # of one owner, those that wait for their turn counted
    kept_hours: PositiveFloat = 24.0  # after their end


class RunApisConfig(Section):
    """The run APIs: `/dify`, `/ragflow`, `/fastgpt`, `/sandboxfusion`, `/piston`."""

    template: str = "python"
    timeout_seconds: PositiveFloat = 60.0  # of a program without a limit in its request
    max_timeout_seconds: PositiveFloat = 300.0  # that a caller may ask for
    output_bytes: Annotated[int, msgspec.Meta(ge=KIB)] = 4 * MIB  # of stdout, and of stderr: head and tail


# `[volumes]`: limits on named volumes.


class VolumeLimits(Section):
    """Limits on named volumes, which are in memory while a sandbox has them, and on the disk otherwise."""

    bytes: MibOrMore = 1 * GIB  # that one can hold, of those that are made from now on
    per_owner: NonNegativeInt = 20


# `[[upstream]]`: the address of a server with models, and the API that it speaks.

_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_HEADER_VALUE = re.compile(r"[\x20-\x7e]*")
_OWN_HEADERS = frozenset({"connection", "content-length", "host", "transfer-encoding"})  # each request has its own


def _check_base_url(url: str) -> None:
    """Raises InvalidRequest without quoting the URL: it may hold a password."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port, or of brackets
        is_address = False
    if not is_address or not url.isprintable() or " " in url:
        raise errors.InvalidRequest("upstream.base_url must be a URL such as https://host/v1")
    if "@" in parts.netloc:
        raise errors.InvalidRequest("upstream.base_url cannot have a user and a password: use api_key, or headers")
    if "?" in url or "#" in url:
        raise errors.InvalidRequest(
            "upstream.base_url cannot have a query or a fragment: paths are added at its end. Azure needs none at "
            "https://NAME.openai.azure.com/openai/v1"
        )


class UpstreamConfig(Struct, forbid_unknown_fields=True):
    """A server with models. Requests for a model go to the first upstream with a pattern that matches its name."""

    models: tuple[str, ...]
    base_url: str
    api_key: str = ""  # "env:NAME" takes it from the environment
    api: Literal["responses", "chat"] = "chat"
    model: str = ""  # the name that is sent, if that is another
    vision: bool = True  # whether pictures that code shows go back to the model
    stream: bool = True  # whether the server can stream
    timeout_seconds: float = 600.0  # without a byte
    headers: dict[str, str] = {}  # sent with every request; here too "env:NAME" is possible

    def __post_init__(self) -> None:
        if not self.models:
            raise errors.InvalidRequest('upstream.models must have a pattern, such as "gpt-5*"')
        _check_base_url(self.base_url)
        for name, value in self.headers.items():
            if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
                raise errors.InvalidRequest(f"upstream.headers has {name!r}: its name or value is invalid in a header")
            if name.lower() in _OWN_HEADERS:
                raise errors.InvalidRequest(
                    f"upstream.headers has {name!r}, which each request has its own of: remove it"
                )
        if not 0 < self.timeout_seconds < float("inf"):
            raise errors.InvalidRequest(
                f"upstream.timeout_seconds must be a positive number, not {self.timeout_seconds}"
            )


# `[network]` and `[packages]`: the operator's bound on network access, above every client's request.


class NetworkConfig(Section):
    """The upper bound of every sandbox's policy, the default policy, and limits."""

    allow: tuple[str, ...] = ()  # nothing: sandboxes have loopback only, for any request
    deny: tuple[str, ...] = ()  # comes before `allow`
    default: tuple[str, ...] = ()  # for a sandbox without a policy, within the above
    internal: tuple[str, ...] = ()  # private addresses and networks that may be reached nevertheless
    hosts: dict[str, str] = {}  # name -> address, or addresses with commas between: as in /etc/hosts
    connections: PositiveInt = 128  # of one sandbox at once
    connections_total: PositiveInt = 2048  # of all of them
    lookups: PositiveInt = 8  # of names, of one sandbox at once
    request_seconds: PositiveFloat = 30.0  # for a program to send its request, once it has connected
    connect_seconds: PositiveFloat = 15.0  # to resolve a name and connect
    idle_seconds: PositiveFloat = 300.0  # of a connection on which nothing moves
    connection_seconds: PositiveFloat = 3600.0
    sandbox_bytes: PositiveInt = 10 * GIB  # to and fro, in a sandbox's whole life
    log_entries: PositiveInt = 1000  # of a sandbox's network log; the oldest make room

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("allow", "deny", "default"):
            _check_patterns(f"network.{key}", getattr(self, key))
        for pattern in self.internal:
            _parse_range("network.internal", pattern)
        for name, addresses in self.hosts.items():
            _check_host(name, addresses)

    @property
    def bound(self) -> NetworkPolicy:
        """The policy that no sandbox may exceed."""
        return NetworkPolicy(allow=self.allow, deny=self.deny)

    @property
    def internal_ranges(self) -> tuple[AddressRange, ...]:
        return tuple(_parse_range("network.internal", each) for each in self.internal)


class PackagesConfig(Section):
    """The package indexes that `pip`, `uv` and `npm` inside sandboxes can install from, with or without a network."""

    enabled: bool = False
    pypi: tuple[str, ...] = ()  # index URLs; none: those of this host's own pip configuration
    npm: str = ""  # the registry's URL; empty: that of this host's own npm configuration
    allow: tuple[str, ...] = ("*",)  # names of packages, with * where wanted; pypi:NAME and npm:NAME are of one kind
    deny: tuple[str, ...] = ()  # comes before `allow`
    cache_bytes: PositiveInt = 5 * GIB  # kept on this host and shared; the least recently used make room
    file_bytes: PositiveInt = 512 * MIB  # of one wheel or tarball
    index_seconds: NonNegativeFloat = 600.0  # for which an index page is not requested again
    requests_per_minute: PositiveInt = 3000  # of one sandbox
    sandbox_bytes: PositiveInt = 8 * GIB  # that one sandbox may take

    def __post_init__(self) -> None:
        super().__post_init__()
        for url in (*self.pypi, *filter(None, (self.npm,))):
            _check_index_url(url)
        for pattern in (*self.allow, *self.deny):
            _check_package_pattern(pattern)


def _check_index_url(url: str) -> None:
    """Raises InvalidRequest without quoting the URL: it can contain a password."""
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


def _check_package_pattern(pattern: str) -> None:
    kind, colon, name = pattern.strip().rpartition(":")
    if not name or " " in name or (colon and kind.lower() not in ("pypi", "npm")):
        raise errors.InvalidRequest(
            f"packages: {pattern[:200]!r} is not a pattern of packages: use a name, * for many, and pypi: or npm: "
            "before it where only one kind is meant"
        )


def _check_patterns(key: str, patterns: tuple[str, ...]) -> None:
    if isinstance(patterns, str):  # a list of letters to Python, and always a mistake
        raise errors.InvalidRequest(f"{key} is a list of patterns: write [{patterns[:300]!r}]")
    for pattern in patterns:
        try:
            parse_pattern(pattern)
        except errors.InvalidRequest as error:
            raise errors.InvalidRequest(f"{key}: {error}") from None


def _parse_range(key: str, text: str) -> AddressRange:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise errors.InvalidRequest(f"{key}: {text!r} is neither an address nor a network like 10.1.0.0/16") from None


def _check_host(name: str, addresses: str) -> None:
    pattern = parse_pattern(name)
    if pattern.name in (None, "*") or pattern.below or pattern.ports:
        raise errors.InvalidRequest(f"network.hosts: {name!r} must be the whole name of a host")
    parse_addresses(addresses)


def parse_addresses(text: str) -> list[str]:
    """The addresses of a value of `network.hosts`. Raises InvalidRequest."""
    try:
        return [str(ipaddress.ip_address(each.strip())) for each in text.split(",")]
    except ValueError:
        raise errors.InvalidRequest(f"network.hosts: {text!r} must be addresses with commas between") from None
