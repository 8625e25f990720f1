"""What a client says of a sandbox's network in E2B's words, as a policy of ours, and a policy in E2B's words. Pure.

E2B's rules: the internet is there unless it is declined; what is allowed comes before what is denied; ports do not
matter. What stands here for the internet is what this host's operator allows: its bound.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cloche import errors
from cloche.api.e2b.replies import NotOffered
from cloche.model import Struct
from cloche.network_policy import (
    MAX_RULES,
    REDACTED,
    Action,
    NetworkPolicy,
    NetworkRule,
    Secret,
    parse_pattern,
    with_secrets,
)

ALL_TRAFFIC = "0.0.0.0/0"
MAX_RULE_DOMAINS, MAX_RULE_HEADERS = 10, 20  # E2B's
PORT_VARIABLE = "${PORT}"
DOMAINS_NEED_DENIAL = (
    "When specifying allowed domains in allow out, you must include 'ALL_TRAFFIC' in deny out to block all other "
    "traffic."
)
_ABSENT = {
    "dnsServers": "the server looks up names itself",
    "egressProxy": "what leaves a sandbox goes through the server's own proxy",
    "httpsPorts": "programs inside are spoken to in plain HTTP",
}
_PLACEHOLDER = "${e2b."
_HOST = re.compile(r"([A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(:[0-9]{1,5})?")


class Transform(Struct):
    headers: dict[str, str] | None = None


class Rule(Struct):
    transform: Transform | None = None


class Network(Struct):
    """Of a creation, or of an update, which knows fewer of them. The names are E2B's."""

    allowPublicTraffic: bool | None = None
    allowOut: list[str] | None = None
    denyOut: list[str] | None = None
    dnsServers: list[str] | None = None
    egressProxy: dict[str, Any] | None = None
    maskRequestHost: str | None = None
    httpsPorts: list[int] | None = None
    rules: dict[str, list[Rule]] | None = None
    allow_internet_access: bool | None = None


class Egress(Struct):
    """What a sandbox may reach, as it was asked for."""

    allow: tuple[str, ...] = ()  # patterns
    deny: tuple[str, ...] = ()
    everything: bool = False  # allowed by name, before anything is denied
    internet: bool = True  # what is neither allowed nor denied
    secrets: tuple[Secret, ...] = ()


def egress(asked: Network | None, internet: bool | None = None) -> Egress:
    """Raises InvalidRequest as E2B does, and NotOffered."""
    network = asked or Network()
    for name, why in _ABSENT.items():
        if getattr(network, name):
            raise NotOffered(f"network.{name} is not possible on this server: {why}; leave it out")
    allow, deny = network.allowOut or [], network.denyOut or []
    _check_sizes(network)
    _check_entries(allow, deny)
    return Egress(
        allow=tuple(_pattern(entry) for entry in allow if entry not in (ALL_TRAFFIC, "*")),
        deny=tuple(_pattern(entry) for entry in deny if entry != ALL_TRAFFIC),
        everything=ALL_TRAFFIC in allow or "*" in allow,
        internet=internet is not False and ALL_TRAFFIC not in deny,
        secrets=tuple(_secrets(network.rules or {})),
    )


def policy_of(asked: Egress, bound: NetworkPolicy) -> NetworkPolicy:
    """The same in our words. The internet is what `bound` allows; what was named may be outside of it.

    A rule for a host that is not allowed is none, as in E2B.
    """
    allowed, denied, internet = _rules("allow", asked.allow), _rules("deny", asked.deny), _rules("allow", bound.allow)
    if asked.everything:
        rules = (*allowed, *internet)
    elif asked.internet and internet:
        rules = (*allowed, *denied, *internet)
    else:  # where no rule fits it is denied anyway
        rules = allowed
    return with_secrets(NetworkPolicy(rules=rules), asked.secrets)


def shown(policy: NetworkPolicy) -> dict[str, Any]:
    """A policy in E2B's words; without the values of what is added to requests."""
    allowed, denied = _hosts(policy, "allow"), _hosts(policy, "deny")
    internet = has_internet(policy)
    lists = {
        "allowOut": [host for host in allowed if host != "*"],
        "denyOut": denied if internet else [*denied, ALL_TRAFFIC],
        "rules": _shown_rules(policy.secrets),
    }
    return {name: value for name, value in lists.items() if value}


def has_internet(policy: NetworkPolicy) -> bool:
    """Whether it allows what it does not name."""
    return "*" in _hosts(policy, "allow")


def host_mask(asked: Network | None) -> str | None:
    """What programs are told for a Host, with `${PORT}` for their port. Raises InvalidRequest."""
    mask = asked.maskRequestHost if asked is not None else None
    if not mask:
        return None
    if not mask.isascii():
        raise errors.InvalidRequest(f"mask request host '{mask[:300]}' is not ASCII. Please use ASCII characters only.")
    if not _HOST.fullmatch(mask.replace(PORT_VARIABLE, "65535")):
        raise errors.InvalidRequest(f"mask request host is not valid: {mask[:300]!r}")
    return mask


# -- lists


def _check_sizes(network: Network) -> None:
    """Before anything is looked at more closely."""
    if len(network.allowOut or ()) + len(network.denyOut or ()) > MAX_RULES:
        raise errors.InvalidRequest(f"network.allowOut and network.denyOut can have {MAX_RULES} entries: use wildcards")
    if len(network.rules or ()) > MAX_RULE_DOMAINS:
        raise errors.InvalidRequest(f"Network rules can have at most {MAX_RULE_DOMAINS} domains.")
    for domain, rules in (network.rules or {}).items():
        headers = sum(len(rule.transform.headers or ()) for rule in rules if rule.transform is not None)
        if headers > MAX_RULE_HEADERS:
            raise errors.InvalidRequest(f"Domain {domain[:300]!r} can have at most {MAX_RULE_HEADERS} headers.")


def _check_entries(allow: Iterable[str], deny: list[str]) -> None:
    for entry in deny:
        if not _is_address(entry):
            raise errors.InvalidRequest(f"invalid denied CIDR {entry[:300]}")
    for entry in allow:
        if _is_address(entry):
            continue
        if _network(entry) is not None:
            raise errors.InvalidRequest(f"invalid allowed address {entry[:300]}")
        if ALL_TRAFFIC not in deny:
            raise errors.InvalidRequest(DOMAINS_NEED_DENIAL)


def _is_address(entry: str) -> bool:
    """Whether it is an address or a network, and not the one that means none."""
    unspecified = ("0.0.0.0", "::")
    network = _network(entry)
    return entry == ALL_TRAFFIC or (network is not None and str(network.network_address) not in unspecified)


def _network(entry: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    if "%" in entry or "." in entry.partition("/")[2]:  # a zone, a mask: no CIDR
        return None
    try:
        return ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return None


def _pattern(entry: str) -> str:
    """An entry as a pattern of ours: for all ports, unless it has some, which E2B's entries do not."""
    bare = f"[{entry}]" if ":" in entry and _network(entry) is not None else entry
    return bare if parse_pattern(bare).ports is not None else f"{bare}:*"


def _rules(action: Action, patterns: Iterable[str]) -> tuple[NetworkRule, ...]:
    return tuple(NetworkRule(action=action, host=pattern) for pattern in patterns)


def _hosts(policy: NetworkPolicy, action: Action) -> list[str]:
    hosts = (rule.host.removesuffix(":*") for rule in policy.ordered if rule.action == action)
    return list(dict.fromkeys(host.strip("[]") if host.endswith("]") else host for host in hosts))


# -- headers that are added


def _secrets(rules: Mapping[str, list[Rule]]) -> Iterator[Secret]:
    for domain, transforms in rules.items():
        if not domain:
            raise errors.InvalidRequest("Rule domain must not be empty.")
        headers: dict[str, tuple[str, str]] = {}
        for rule in transforms:  # a later one has the last word
            given = rule.transform.headers if rule.transform is not None else None
            headers |= {name.lower(): (name, value) for name, value in (given or {}).items()}
        for name, value in headers.values():
            yield _secret(domain, name, value)


def _secret(domain: str, name: str, value: str) -> Secret:
    if _PLACEHOLDER in value:
        raise NotOffered(
            f"the value for header {name!r} in the rule for domain {domain!r} names something that E2B keeps: this "
            "server keeps no secrets and issues no identities; send the value itself"
        )
    if value == REDACTED:
        raise errors.InvalidRequest(
            f"the value for header {name!r} in the rule for domain {domain!r} is what the server shows in place of "
            "one; send the value itself"
        )
    try:
        return Secret(domain=domain.lower(), header=name, value=value)
    except errors.InvalidRequest as error:
        raise errors.InvalidRequest(f"network.rules: {error}") from None


def _shown_rules(secrets: Iterable[Secret]) -> dict[str, Any]:
    headers: dict[str, dict[str, str]] = {}
    for secret in secrets:
        if secret.header is not None:
            headers.setdefault(secret.domain, {})[secret.header] = REDACTED
    return {domain: [{"transform": {"headers": each}}] for domain, each in headers.items()}
