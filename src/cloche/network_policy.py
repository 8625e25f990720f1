"""Network policies of sandboxes: rules, and secrets that the proxy adds. Values and their validation.

A pattern is `HOST` or `HOST:PORTS`. HOST is a name (`pypi.org`), all names below one (`*.example.com`, which
is not `example.com` itself), an address or a network (`192.0.2.7`, `2001:db8::/32`; with ports
`[2001:db8::1]:443`), or `*` for everything. PORTS is a number, a span (`8000-8100`) or `*`. Without ports an
allowing rule means 80 and 443, and a denying one all.
"""

from __future__ import annotations

import ipaddress
import re
import time
from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgspec

from cloche import errors
from cloche.structs import Struct

RuleAction = Literal["allow", "deny"]
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network
PortRanges = tuple[tuple[int, int], ...]

MAX_RULES = 1000
MAX_SECRETS = 100
MAX_SECRET_BYTES = 16 << 10
MAX_SECRETS_BYTES = 64 << 10  # all of a policy: each answer is searched for each of them
REDACTED = "***"  # stands for a secret's value wherever one is shown
WEB_PORTS: PortRanges = ((80, 80), (443, 443))
ALL_PORTS: PortRanges = ((1, 65535),)

_HOST_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST_NAME = re.compile(rf"{_HOST_LABEL}(\.{_HOST_LABEL})*")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
# Variables by which programs find themselves, each other, the proxy, and the trusted authorities.
_RESERVED_VARIABLES = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|PWD|OLDPWD|TERM|TZ|LANG|LANGUAGE|TMPDIR|TEMP|TMP|IFS|ENV|CDPATH|EDITOR|PAGER"
    r"|NODE_(OPTIONS|PATH|EXTRA_CA_CERTS|USE_ENV_PROXY|TLS_REJECT_UNAUTHORIZED)|(SSL|REQUESTS|CURL)_C(ERT|A)_\w+"
    r"|PIP_CERT|AWS_CA_BUNDLE|GIT_SSL_\w+|\w+_PROXY|(LD|LC|XDG|BASH|PYTHON|CLOCHE)_\w*|PYTHON\w*|BASH\w*|VIRTUAL_ENV"
)
# Headers that say where a request goes, where it ends, or how its answer comes: not a secret's to decide.
FRAMING_HEADERS = frozenset(
    "host content-length transfer-encoding connection keep-alive proxy-connection proxy-authorization upgrade te "
    "trailer expect accept-encoding".split()
)


class HostPattern(NamedTuple):
    """A parsed pattern. Exactly one of `name` and `network` is given; `name` is "*" for everything."""

    name: str | None
    below: bool  # `*.name`: the names below it, and not it
    network: IpNetwork | None
    ports: PortRanges | None  # None: none were given

    def has_name(self, name: str) -> bool:
        """Whether it matches a host of that name, in lower case. A pattern of addresses matches none."""
        if self.name is None:
            return False
        return self.name == "*" or (name.endswith(f".{self.name}") if self.below else name == self.name)


def parse_pattern(text: object) -> HostPattern:
    """Parses a pattern of hosts. Raises InvalidRequest that names the problem."""
    if not isinstance(text, str):
        raise errors.InvalidRequest(f"a pattern of hosts must be a string such as 'pypi.org', not {text!r:.100}")
    host, ports = _split_ports(text.strip().lower()) if "://" not in text else (text, None)
    if host == "*":
        return HostPattern("*", False, None, ports)
    network = _parse_network(host)
    if network is not None:
        return HostPattern(None, False, network, ports)
    below, name = host.startswith("*."), host.removeprefix("*.").removesuffix(".")
    if not _HOST_NAME.fullmatch(name) or len(name) > 253 or name.rpartition(".")[2].isdigit():
        raise errors.InvalidRequest(
            f"{text[:300]!r} is not a pattern of hosts: use a name like pypi.org, *.example.com, an address or network "
            "like 192.0.2.0/24, or * for all, with :PORT after it where it is not 80 or 443; no scheme and no path"
        )
    return HostPattern(name, below, None, ports)


def _split_ports(text: str) -> tuple[str, PortRanges | None]:
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if bracket and (not rest or rest.startswith(":")):
            return host, _parse_ports(text, rest[1:]) if rest else None
    if text.count(":") == 1:
        host, _, ports = text.partition(":")
        return host, _parse_ports(text, ports)
    return text, None


def _parse_ports(text: str, ports: str) -> PortRanges:
    if ports == "*":
        return ALL_PORTS
    first, _, last = ports.partition("-")
    spans = first.isdecimal() and (last or first).isdecimal() and len(ports) <= 11
    if not spans or not 0 < int(first) <= int(last or first) < 65536:
        raise errors.InvalidRequest(f"{text[:300]!r} has no ports that exist: use :443, :8000-8100 or :*")
    return ((int(first), int(last or first)),)


def _parse_network(host: str) -> IpNetwork | None:
    try:
        found = ipaddress.ip_network(host, strict=False)
    except ValueError:
        return None
    return _unmap_ipv4(found) if isinstance(found, ipaddress.IPv6Network) else found


def _unmap_ipv4(network: ipaddress.IPv6Network) -> IpNetwork:
    """IPv4 in IPv6 notation becomes IPv4, as do the addresses that it is compared with."""
    mapped = network.network_address.ipv4_mapped
    if mapped is None or network.prefixlen < 96:
        return network
    return ipaddress.IPv4Network((mapped, network.prefixlen - 96))


class NetworkRule(Struct):
    """Allows or denies the hosts that match a pattern."""

    action: RuleAction
    host: str  # a pattern

    def __post_init__(self) -> None:
        parse_pattern(self.host)


class Secret(Struct):
    """A secret that the proxy adds to requests to `domain`; no program in the sandbox ever sees it.

    With `header`, that header has `value` in every request. With `name`, the sandbox has an environment variable
    of that name which holds a placeholder, `$NAME`, and where a request's headers hold the placeholder they get
    the value.
    """

    domain: str
    value: str
    header: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        pattern = parse_pattern(self.domain)
        if pattern.name in (None, "*") or pattern.ports is not None:
            raise errors.InvalidRequest(
                f"a secret is for one domain such as api.example.com or *.example.com, not {self.domain[:300]!r}"
            )
        if (self.header is None) == (self.name is None):
            raise errors.InvalidRequest(
                f"the secret for {self.domain} needs either a header that it is sent in, or a name for its placeholder"
            )
        # Neither is quoted: a client that mixes the fields up has the value in one of them.
        if self.header is not None and (not _HEADER.fullmatch(self.header) or self.header.lower() in FRAMING_HEADERS):
            raise errors.InvalidRequest(
                f"the header of the secret for {self.domain} must be the name of one that a secret can be sent in, "
                "such as Authorization"
            )
        if self.name is not None and not _VARIABLE.fullmatch(self.name):
            raise errors.InvalidRequest(
                f"the name of the secret for {self.domain} must be that of an environment variable: letters, digits, _"
            )
        if self.name is not None and _RESERVED_VARIABLES.fullmatch(self.name.upper()):
            raise errors.InvalidRequest(
                f"the name of the secret for {self.domain} is that of a variable that controls how programs run, or "
                "their trust, such as PATH: use another, such as API_TOKEN"
            )
        _check_secret_value(self.domain, self.value)

    def is_for(self, host: str) -> bool:
        """Whether requests to the host of that name, in lower case, get it."""
        return parse_pattern(self.domain).has_name(host)

    def __repr__(self) -> str:  # it ends up in logs and tracebacks
        return f"Secret(domain={self.domain!r}, header={self.header!r}, name={self.name!r}, value=...)"

    def __rich_repr__(self) -> list[tuple[str, object]]:  # rich's tracebacks show it instead
        return [("domain", self.domain), ("header", self.header), ("name", self.name)]


def _check_secret_value(domain: str, value: str) -> None:
    fits = value.isascii() and all(" " <= letter <= "~" or letter == "\t" for letter in value)
    if not value.strip() or not fits or len(value) > MAX_SECRET_BYTES:
        raise errors.InvalidRequest(
            f"the value of the secret for {domain} cannot be in a header: use 1 to {MAX_SECRET_BYTES} printable ASCII "
            "characters, without line breaks"
        )


def _check_unique_secrets(secrets: tuple[Secret, ...]) -> None:
    seen = set()
    for secret in secrets:
        where = f"header {secret.header}" if secret.header is not None else f"name {secret.name}"
        key = (secret.domain.lower().removesuffix("."), where.lower() if secret.header is not None else where)
        if key in seen:
            raise errors.InvalidRequest(f"there are two secrets for {secret.domain} with the {where}: give one")
        seen.add(key)


def _check_secrets_size(secrets: tuple[Secret, ...]) -> None:
    if sum(len(value) for value in {secret.value for secret in secrets}) > MAX_SECRETS_BYTES:
        raise errors.InvalidRequest(
            f"the values of a policy's secrets can have {MAX_SECRETS_BYTES} bytes in all: give fewer, or shorter ones"
        )


def check_policy_size(rules: int, secrets: int) -> None:
    """Checks the number of rules and secrets before each is parsed. Raises InvalidRequest."""
    if rules > MAX_RULES:
        raise errors.InvalidRequest(f"a network policy can have {MAX_RULES} rules: use wildcards")
    if secrets > MAX_SECRETS:
        raise errors.InvalidRequest(f"a network policy can have {MAX_SECRETS} secrets")


def check_pattern_lists(allow: object, deny: object) -> None:
    """Raises InvalidRequest for a string: Python would take it as a list of letters."""
    for name, given in (("allow", allow), ("deny", deny)):
        if isinstance(given, str):
            raise errors.InvalidRequest(f"{name} is a list of patterns: write {name}=[{given[:300]!r}]")


class NetworkPolicy(Struct):
    """Which hosts a sandbox may reach. The default, nothing, is loopback only.

    The first rule that matches decides, and where none does it is denied: `rules` in their order, then `deny`, then
    `allow`.
    """

    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    rules: tuple[NetworkRule, ...] = ()
    secrets: tuple[Secret, ...] = ()

    def __post_init__(self) -> None:
        check_pattern_lists(self.allow, self.deny)
        check_policy_size(len(self.allow) + len(self.deny) + len(self.rules), len(self.secrets))
        for pattern in (*self.allow, *self.deny):
            parse_pattern(pattern)
        _check_unique_secrets(self.secrets)
        _check_secrets_size(self.secrets)

    @property
    def ordered(self) -> tuple[NetworkRule, ...]:
        """All rules in the order of their evaluation."""
        denied = (NetworkRule(action="deny", host=host) for host in self.deny)
        return (*self.rules, *denied, *(NetworkRule(action="allow", host=host) for host in self.allow))

    @property
    def allows_something(self) -> bool:
        return bool(self.allow) or any(rule.action == "allow" for rule in self.rules)

    def redacted(self) -> NetworkPolicy:
        """The same policy without the values of its secrets, for responses and for storage."""
        secrets = tuple(msgspec.structs.replace(each, value=REDACTED) for each in self.secrets)
        return msgspec.structs.replace(self, secrets=secrets)


def first_disallowed_pattern(policy: NetworkPolicy, bound: NetworkPolicy) -> str | None:
    """The first allowed pattern of `policy` that lies wholly outside `bound`, which has no `rules`."""
    allowed, denied = _allowed_patterns(bound), [parse_pattern(host) for host in bound.deny]
    asked = (rule.host for rule in policy.ordered if rule.action == "allow")
    return next((host for host in asked if not _is_pattern_within(parse_pattern(host), allowed, denied)), None)


def _is_pattern_within(pattern: HostPattern, allowed: list[HostPattern], denied: list[HostPattern]) -> bool:
    for each in allowed:
        narrow = _narrower_pattern(pattern, each)
        if narrow is None:
            continue
        ports = _common_ports(pattern.ports or WEB_PORTS, each.ports or WEB_PORTS)
        for denial in denied:
            if _contains_pattern(denial, narrow):
                ports = _without_ports(ports, denial.ports or ALL_PORTS)
        if ports:
            return True
    return False


def _common_ports(some: PortRanges, others: PortRanges) -> PortRanges:
    spans = ((max(one[0], two[0]), min(one[1], two[1])) for one in some for two in others)
    return tuple(span for span in spans if span[0] <= span[1])


def _without_ports(some: PortRanges, others: PortRanges) -> PortRanges:
    for first, last in others:
        before = ((one, min(end, first - 1)) for one, end in some)
        after = ((max(one, last + 1), end) for one, end in some)
        some = tuple(span for span in (*before, *after) if span[0] <= span[1])
    return some


def first_unused_secret(policy: NetworkPolicy) -> Secret | None:
    """The first secret of `policy` for a domain that the policy does not allow at all."""
    allowed = _allowed_patterns(policy)
    return next((each for each in policy.secrets if not _overlaps_any_pattern(each.domain, allowed)), None)


def without_secrets(policy: NetworkPolicy) -> NetworkPolicy:
    """The policy in the form that may be stored on a disk."""
    return msgspec.structs.replace(policy, secrets=())


def with_usable_secrets(policy: NetworkPolicy, secrets: Iterable[Secret]) -> NetworkPolicy:
    """The policy with those secrets of another that it can use."""
    allowed = _allowed_patterns(policy)
    kept = tuple(each for each in secrets if _overlaps_any_pattern(each.domain, allowed))
    return msgspec.structs.replace(policy, secrets=kept)


def _allowed_patterns(policy: NetworkPolicy) -> list[HostPattern]:
    return [parse_pattern(rule.host) for rule in policy.ordered if rule.action == "allow"]


def _overlaps_any_pattern(host: str, patterns: list[HostPattern]) -> bool:
    """Parses `host` once: parsing takes longer than comparing two patterns."""
    pattern = parse_pattern(host)
    return any(_patterns_overlap(pattern, each) for each in patterns)


def _patterns_overlap(one: HostPattern, other: HostPattern) -> bool:
    return _narrower_pattern(one, other) is not None


def _narrower_pattern(one: HostPattern, other: HostPattern) -> HostPattern | None:
    """The intersection: of two overlapping patterns, one contains the other."""
    if _contains_pattern(one, other):
        return other
    return one if _contains_pattern(other, one) else None


def _contains_pattern(wide: HostPattern, narrow: HostPattern) -> bool:
    if wide.name == "*":
        return True
    if wide.network is not None and narrow.network is not None:
        return _contains_network(wide.network, narrow.network)
    if wide.name is None or narrow.name in (None, "*"):
        return False
    same = wide.name == narrow.name and wide.below == narrow.below
    return same or (wide.below and str(narrow.name).endswith(f".{wide.name}"))


def _contains_network(wide: IpNetwork, narrow: IpNetwork) -> bool:
    if wide.version != narrow.version or wide.prefixlen > narrow.prefixlen:
        return False
    return narrow.network_address in wide


EntryVerdict = Literal["allowed", "denied", "failed", "open"]


class NetworkEntry(Struct):
    """One line of a sandbox's network log: an attempted connection and its outcome.

    `open` is a connection in progress: its numbers are those of this moment.
    """

    at: float
    protocol: Literal["connect", "http", "socks", "package", "other"]
    host: str  # as far as it was understood
    port: int
    verdict: EntryVerdict
    reason: str = ""
    sent_bytes: int = 0  # by the program
    received_bytes: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        when = time.strftime("%H:%M:%S", time.localtime(self.at))
        moved = f"  sent {self.sent_bytes}, received {self.received_bytes} bytes in {self.seconds:.2f} s"
        there = f"{self.host}:{self.port}" if self.port else self.host
        why = f"  ({self.reason})" if self.reason else ""
        end = f"{moved if self.verdict in ('allowed', 'open') else ''}{why}"
        line = f"{when}  {self.verdict:<7}  {self.protocol:<7}  {there}{end}"
        # A host may be named by a program's own words: they cannot steer a terminal.
        return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in line)

    def __repr__(self) -> str:
        return f"<NetworkEntry {self}>"
