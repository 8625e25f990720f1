"""What a sandbox may reach beside itself: rules, and secrets that are added on the way out. Values, and their checks.

A pattern is `HOST` or `HOST:PORTS`. HOST is a name (`pypi.org`), all names below one (`*.example.com`, which is not
`example.com` itself), an address or a network (`192.0.2.7`, `2001:db8::/32`; with ports `[2001:db8::1]:443`), or `*`
for everything. PORTS is a number, a span (`8000-8100`) or `*`. Without ports an allowing rule means 80 and 443, and a
denying one all.
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

Action = Literal["allow", "deny"]
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Ports = tuple[tuple[int, int], ...]

MAX_RULES = 1000
MAX_SECRETS = 100
MAX_SECRET_BYTES = 16 << 10
MAX_SECRETS_BYTES = 64 << 10  # all of a policy: whatever comes back is searched for each of them
REDACTED = "***"  # stands for a secret's value wherever one is shown
WEB_PORTS: Ports = ((80, 80), (443, 443))
ALL_PORTS: Ports = ((1, 65535),)

_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
# Variables by which programs find themselves, each other, the proxy, and whom to trust.
_STEERING = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|PWD|OLDPWD|TERM|TZ|LANG|LANGUAGE|TMPDIR|TEMP|TMP|IFS|ENV|CDPATH|EDITOR|PAGER"
    r"|NODE_(OPTIONS|PATH|EXTRA_CA_CERTS|USE_ENV_PROXY|TLS_REJECT_UNAUTHORIZED)|(SSL|REQUESTS|CURL)_C(ERT|A)_\w+"
    r"|PIP_CERT|AWS_CA_BUNDLE|GIT_SSL_\w+|\w+_PROXY|(LD|LC|XDG|BASH|PYTHON|CLOCHE)_\w*|PYTHON\w*|BASH\w*|VIRTUAL_ENV"
)
# Headers that say where a request goes, where it ends, or how its answer comes: not a secret's to decide.
FRAMING_HEADERS = frozenset(
    "host content-length transfer-encoding connection keep-alive proxy-connection proxy-authorization upgrade te "
    "trailer expect accept-encoding".split()
)


class Pattern(NamedTuple):
    """A pattern, taken apart. Exactly one of `name` and `network` is given; `name` is "*" for everything."""

    name: str | None
    below: bool  # `*.name`: what is below it, and not it
    network: Network | None
    ports: Ports | None  # None: none were given

    def has_name(self, name: str) -> bool:
        """Whether it is a host's, by that name in lower case. No pattern of addresses is."""
        if self.name is None:
            return False
        return self.name == "*" or (name.endswith(f".{self.name}") if self.below else name == self.name)


def parse_pattern(text: object) -> Pattern:
    """Raises InvalidRequest that says what is wrong with it."""
    if not isinstance(text, str):
        raise errors.InvalidRequest(f"a pattern of hosts must be a string such as 'pypi.org', not {text!r:.100}")
    host, ports = _split(text.strip().lower()) if "://" not in text else (text, None)
    if host == "*":
        return Pattern("*", False, None, ports)
    network = _network(host)
    if network is not None:
        return Pattern(None, False, network, ports)
    below, name = host.startswith("*."), host.removeprefix("*.").removesuffix(".")
    if not _NAME.fullmatch(name) or len(name) > 253 or name.rpartition(".")[2].isdigit():
        raise errors.InvalidRequest(
            f"{text[:300]!r} is not a pattern of hosts: use a name like pypi.org, *.example.com, an address or network "
            "like 192.0.2.0/24, or * for all, with :PORT after it where it is not 80 or 443; no scheme and no path"
        )
    return Pattern(name, below, None, ports)


def _split(text: str) -> tuple[str, Ports | None]:
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if bracket and (not rest or rest.startswith(":")):
            return host, _ports(text, rest[1:]) if rest else None
    if text.count(":") == 1:
        host, _, ports = text.partition(":")
        return host, _ports(text, ports)
    return text, None


def _ports(text: str, ports: str) -> Ports:
    if ports == "*":
        return ALL_PORTS
    first, _, last = ports.partition("-")
    spans = first.isdecimal() and (last or first).isdecimal() and len(ports) <= 11
    if not spans or not 0 < int(first) <= int(last or first) < 65536:
        raise errors.InvalidRequest(f"{text[:300]!r} has no ports that exist: use :443, :8000-8100 or :*")
    return ((int(first), int(last or first)),)


def _network(host: str) -> Network | None:
    try:
        found = ipaddress.ip_network(host, strict=False)
    except ValueError:
        return None
    return _plain(found) if isinstance(found, ipaddress.IPv6Network) else found


def _plain(network: ipaddress.IPv6Network) -> Network:
    """IPv4 that is written as IPv6 is IPv4: so are the addresses that it is compared with."""
    mapped = network.network_address.ipv4_mapped
    if mapped is None or network.prefixlen < 96:
        return network
    return ipaddress.IPv4Network((mapped, network.prefixlen - 96))


class NetworkRule(Struct):
    """Allows or denies what matches a pattern."""

    action: Action
    host: str  # a pattern

    def __post_init__(self) -> None:
        parse_pattern(self.host)


class Secret(Struct):
    """What the proxy adds to requests to `domain`, and no program inside ever sees.

    With `header`, that header has `value` in every request. With `name`, the sandbox has an environment variable of
    that name which holds a placeholder, `$NAME`, and where a request's headers hold the placeholder they get the value.
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
        # Neither is quoted: whoever mixes the fields up has the value in one of them.
        if self.header is not None and (not _HEADER.fullmatch(self.header) or self.header.lower() in FRAMING_HEADERS):
            raise errors.InvalidRequest(
                f"the header of the secret for {self.domain} must be the name of one that a secret can be sent in, "
                "such as Authorization"
            )
        if self.name is not None and not _VARIABLE.fullmatch(self.name):
            raise errors.InvalidRequest(
                f"the name of the secret for {self.domain} must be that of an environment variable: letters, digits, _"
            )
        if self.name is not None and _STEERING.fullmatch(self.name.upper()):
            raise errors.InvalidRequest(
                f"the name of the secret for {self.domain} is that of a variable which says how programs run, or whom "
                "they trust, such as PATH: use another, such as API_TOKEN"
            )
        _check_value(self.domain, self.value)

    def is_for(self, host: str) -> bool:
        """Whether the host of that name, in lower case, gets it."""
        return parse_pattern(self.domain).has_name(host)

    def __repr__(self) -> str:  # it ends up in logs and tracebacks
        return f"Secret(domain={self.domain!r}, header={self.header!r}, name={self.name!r}, value=...)"

    def __rich_repr__(self) -> list[tuple[str, object]]:  # rich's tracebacks show it instead
        return [("domain", self.domain), ("header", self.header), ("name", self.name)]


def _check_value(domain: str, value: str) -> None:
    fits = value.isascii() and all(" " <= letter <= "~" or letter == "\t" for letter in value)
    if not value.strip() or not fits or len(value) > MAX_SECRET_BYTES:
        raise errors.InvalidRequest(
            f"the value of the secret for {domain} cannot be in a header: use 1 to {MAX_SECRET_BYTES} printable ASCII "
            "characters, without line breaks"
        )


def _check_ambiguous(secrets: tuple[Secret, ...]) -> None:
    seen = set()
    for secret in secrets:
        where = f"header {secret.header}" if secret.header is not None else f"name {secret.name}"
        key = (secret.domain.lower().removesuffix("."), where.lower() if secret.header is not None else where)
        if key in seen:
            raise errors.InvalidRequest(f"there are two secrets for {secret.domain} with the {where}: give one")
        seen.add(key)


def _check_size(secrets: tuple[Secret, ...]) -> None:
    if sum(len(value) for value in {secret.value for secret in secrets}) > MAX_SECRETS_BYTES:
        raise errors.InvalidRequest(
            f"the values of a policy's secrets can have {MAX_SECRETS_BYTES} bytes in all: give fewer, or shorter ones"
        )


def check_counts(rules: int, secrets: int) -> None:
    """For whoever has many of them, before each is looked at. Raises InvalidRequest."""
    if rules > MAX_RULES:
        raise errors.InvalidRequest(f"a network policy can have {MAX_RULES} rules: use wildcards")
    if secrets > MAX_SECRETS:
        raise errors.InvalidRequest(f"a network policy can have {MAX_SECRETS} secrets")


def check_lists(allow: object, deny: object) -> None:
    """A string is a list of letters to Python, and never what is meant. Raises InvalidRequest."""
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
        check_lists(self.allow, self.deny)
        check_counts(len(self.allow) + len(self.deny) + len(self.rules), len(self.secrets))
        for pattern in (*self.allow, *self.deny):
            parse_pattern(pattern)
        _check_ambiguous(self.secrets)
        _check_size(self.secrets)

    @property
    def ordered(self) -> tuple[NetworkRule, ...]:
        """All of its rules, the one that is asked first at the front."""
        denied = (NetworkRule(action="deny", host=host) for host in self.deny)
        return (*self.rules, *denied, *(NetworkRule(action="allow", host=host) for host in self.allow))

    @property
    def allows_something(self) -> bool:
        return bool(self.allow) or any(rule.action == "allow" for rule in self.rules)

    def redacted(self) -> NetworkPolicy:
        """The same without the values of its secrets: for whoever asks, and for what is kept."""
        secrets = tuple(msgspec.structs.replace(each, value=REDACTED) for each in self.secrets)
        return msgspec.structs.replace(self, secrets=secrets)


def first_outside(policy: NetworkPolicy, bound: NetworkPolicy) -> str | None:
    """The first pattern that `policy` allows though nothing of it is within `bound`, which has no `rules`."""
    allowed, denied = _allowed(bound), [parse_pattern(host) for host in bound.deny]
    asked = (rule.host for rule in policy.ordered if rule.action == "allow")
    return next((host for host in asked if not _is_within(parse_pattern(host), allowed, denied)), None)


def _is_within(asked: Pattern, allowed: list[Pattern], denied: list[Pattern]) -> bool:
    for each in allowed:
        narrow = _narrower(asked, each)
        if narrow is None:
            continue
        ports = _common_ports(asked.ports or WEB_PORTS, each.ports or WEB_PORTS)
        for denial in denied:
            if _contains(denial, narrow):
                ports = _without_ports(ports, denial.ports or ALL_PORTS)
        if ports:
            return True
    return False


def _common_ports(some: Ports, others: Ports) -> Ports:
    spans = ((max(one[0], two[0]), min(one[1], two[1])) for one in some for two in others)
    return tuple(span for span in spans if span[0] <= span[1])


def _without_ports(some: Ports, others: Ports) -> Ports:
    for first, last in others:
        before = ((one, min(end, first - 1)) for one, end in some)
        after = ((max(one, last + 1), end) for one, end in some)
        some = tuple(span for span in (*before, *after) if span[0] <= span[1])
    return some


def useless_secret(policy: NetworkPolicy) -> Secret | None:
    """The first secret that `policy` has for a domain of which it allows nothing."""
    allowed = _allowed(policy)
    return next((each for each in policy.secrets if not _overlaps_one(each.domain, allowed)), None)


def without_secrets(policy: NetworkPolicy) -> NetworkPolicy:
    """The policy as it may be kept on a disk."""
    return msgspec.structs.replace(policy, secrets=())


def with_secrets(policy: NetworkPolicy, secrets: Iterable[Secret]) -> NetworkPolicy:
    """The policy with those of another that are of use in it."""
    allowed = _allowed(policy)
    kept = tuple(each for each in secrets if _overlaps_one(each.domain, allowed))
    return msgspec.structs.replace(policy, secrets=kept)


def _allowed(policy: NetworkPolicy) -> list[Pattern]:
    return [parse_pattern(rule.host) for rule in policy.ordered if rule.action == "allow"]


def _overlaps_one(host: str, patterns: list[Pattern]) -> bool:
    """Taking a pattern apart takes longer than comparing two: `host` is taken apart once."""
    asked = parse_pattern(host)
    return any(_overlap(asked, each) for each in patterns)


def _overlap(one: Pattern, other: Pattern) -> bool:
    return _narrower(one, other) is not None


def _narrower(one: Pattern, other: Pattern) -> Pattern | None:
    """What hosts of both match: of two patterns that have some in common, one has all of the other's."""
    if _contains(one, other):
        return other
    return one if _contains(other, one) else None


def _contains(wide: Pattern, narrow: Pattern) -> bool:
    if wide.name == "*":
        return True
    if wide.network is not None and narrow.network is not None:
        return _has_network(wide.network, narrow.network)
    if wide.name is None or narrow.name in (None, "*"):
        return False
    same = wide.name == narrow.name and wide.below == narrow.below
    return same or (wide.below and str(narrow.name).endswith(f".{wide.name}"))


def _has_network(wide: Network, narrow: Network) -> bool:
    if wide.version != narrow.version or wide.prefixlen > narrow.prefixlen:
        return False
    return narrow.network_address in wide


EntryVerdict = Literal["allowed", "denied", "failed", "open"]


class NetworkEntry(Struct):
    """One line of a sandbox's network log: something that a program tried, and what became of it.

    `open` is what goes on: its numbers are those of this moment.
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
