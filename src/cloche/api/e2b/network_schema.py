"""E2B's network settings: requests converted to our policies, and policies to E2B's format. Pure.

E2B's rules: the internet is allowed unless declined; allow rules precede deny rules; ports do not matter.
"The internet" here is the set of hosts that this host's operator allows: the bound.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cloche import errors
from cloche.api.dialect import NotSupported
from cloche.model import Struct
from cloche.network_policy import (
    MAX_RULES,
    REDACTED,
    NetworkPolicy,
    NetworkRule,
    RuleAction,
    Secret,
    parse_pattern,
    with_usable_secrets,
)

ALL_TRAFFIC = "0.0.0.0/0"
MAX_RULE_DOMAINS, MAX_RULE_HEADERS = 10, 20  # E2B's
PORT_VARIABLE = "${PORT}"
DOMAINS_NEED_DENIAL = (
    "When specifying allowed domains in allow out, you must include 'ALL_TRAFFIC' in deny out to block all other "
    "traffic."
)
_UNSUPPORTED_FIELDS = {
    "dnsServers": "the server looks up names itself",
    "egressProxy": "what leaves a sandbox goes through the server's own proxy",
    "httpsPorts": "programs inside are spoken to in plain HTTP",
}
_PLACEHOLDER = "${e2b."
_HOST = re.compile(r"([A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(:[0-9]{1,5})?")


class E2bRuleTransform(Struct):
    headers: dict[str, str] | None = None


class E2bNetworkRule(Struct):
    transform: E2bRuleTransform | None = None


class E2bNetworkBody(Struct):
    """The network of a creation, or of an update, which has fewer fields. The names are E2B's."""

    allowPublicTraffic: bool | None = None
    allowOut: list[str] | None = None
    denyOut: list[str] | None = None
    dnsServers: list[str] | None = None
    egressProxy: dict[str, Any] | None = None
    maskRequestHost: str | None = None
    httpsPorts: list[int] | None = None
    rules: dict[str, list[E2bNetworkRule]] | None = None
    allow_internet_access: bool | None = None


class E2bEgressRequest(Struct):
    """The requested egress of a sandbox."""

    allow: tuple[str, ...] = ()  # patterns
    deny: tuple[str, ...] = ()
    everything: bool = False  # allowed by name, before anything is denied
    internet: bool = True  # what is neither allowed nor denied
    secrets: tuple[Secret, ...] = ()


def decode_egress_request(message: E2bNetworkBody | None, internet: bool | None = None) -> E2bEgressRequest:
    """The requested egress. Raises InvalidRequest as E2B does, and NotSupported."""
    network = message or E2bNetworkBody()
    for name, why in _UNSUPPORTED_FIELDS.items():
        if getattr(network, name):
            raise NotSupported(f"network.{name} is not possible on this server: {why}; leave it out")
    allow, deny = network.allowOut or [], network.denyOut or []
    _check_list_sizes(network)
    _check_list_entries(allow, deny)
    return E2bEgressRequest(
        allow=tuple(_to_host_pattern(entry) for entry in allow if entry not in (ALL_TRAFFIC, "*")),
        deny=tuple(_to_host_pattern(entry) for entry in deny if entry != ALL_TRAFFIC),
        everything=ALL_TRAFFIC in allow or "*" in allow,
        internet=internet is not False and ALL_TRAFFIC not in deny,
        secrets=tuple(_secrets_from_rules(network.rules or {})),
    )


def policy_from_request(request: E2bEgressRequest, bound: NetworkPolicy) -> NetworkPolicy:
    """The request as a policy. The internet is the part that `bound` allows; named hosts may lie outside of it.

    A rule for a host that is not allowed has no effect, as in E2B.
    """
    allowed, denied, internet = (
        _rules_from_patterns("allow", request.allow),
        _rules_from_patterns("deny", request.deny),
        _rules_from_patterns("allow", bound.allow),
    )
    if request.everything:
        rules = (*allowed, *internet)
    elif request.internet and internet:
        rules = (*allowed, *denied, *internet)
    else:  # where no rule fits it is denied anyway
        rules = allowed
    return with_usable_secrets(NetworkPolicy(rules=rules), request.secrets)


def encode_policy(policy: NetworkPolicy) -> dict[str, Any]:
    """A policy in E2B's format, without the values of injected headers."""
    allowed, denied = _hosts_with_action(policy, "allow"), _hosts_with_action(policy, "deny")
    internet = allows_internet(policy)
    lists = {
        "allowOut": [host for host in allowed if host != "*"],
        "denyOut": denied if internet else [*denied, ALL_TRAFFIC],
        "rules": _encode_secret_rules(policy.secrets),
    }
    return {name: value for name, value in lists.items() if value}


def allows_internet(policy: NetworkPolicy) -> bool:
    """Whether the policy allows hosts that it does not name."""
    return "*" in _hosts_with_action(policy, "allow")


def decode_host_mask(message: E2bNetworkBody | None) -> str | None:
    """The Host header for programs, with `${PORT}` for their port. Raises InvalidRequest."""
    mask = message.maskRequestHost if message is not None else None
    if not mask:
        return None
    if not mask.isascii():
        raise errors.InvalidRequest(f"mask request host '{mask[:300]}' is not ASCII. Please use ASCII characters only.")
    if not _HOST.fullmatch(mask.replace(PORT_VARIABLE, "65535")):
        raise errors.InvalidRequest(f"mask request host is not valid: {mask[:300]!r}")
    return mask


# -- lists


def _check_list_sizes(network: E2bNetworkBody) -> None:
    """Checks the list sizes before any other validation."""
    if len(network.allowOut or ()) + len(network.denyOut or ()) > MAX_RULES:
        raise errors.InvalidRequest(f"network.allowOut and network.denyOut can have {MAX_RULES} entries: use wildcards")
    if len(network.rules or ()) > MAX_RULE_DOMAINS:
        raise errors.InvalidRequest(f"Network rules can have at most {MAX_RULE_DOMAINS} domains.")
    for domain, rules in (network.rules or {}).items():
        headers = sum(len(rule.transform.headers or ()) for rule in rules if rule.transform is not None)
        if headers > MAX_RULE_HEADERS:
            raise errors.InvalidRequest(f"Domain {domain[:300]!r} can have at most {MAX_RULE_HEADERS} headers.")


def _check_list_entries(allow: Iterable[str], deny: list[str]) -> None:
    for entry in deny:
        if not _is_address(entry):
            raise errors.InvalidRequest(f"invalid denied CIDR {entry[:300]}")
    for entry in allow:
        if _is_address(entry):
            continue
        if _parse_ip_network(entry) is not None:
            raise errors.InvalidRequest(f"invalid allowed address {entry[:300]}")
        if ALL_TRAFFIC not in deny:
            raise errors.InvalidRequest(DOMAINS_NEED_DENIAL)


def _is_address(entry: str) -> bool:
    """Whether it is an address or a network, and not the unspecified one."""
    unspecified = ("0.0.0.0", "::")
    network = _parse_ip_network(entry)
    return entry == ALL_TRAFFIC or (network is not None and str(network.network_address) not in unspecified)


def _parse_ip_network(entry: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    if "%" in entry or "." in entry.partition("/")[2]:  # a zone, a mask: no CIDR
        return None
    try:
        return ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return None


def _to_host_pattern(entry: str) -> str:
    """An entry as one of our patterns: for all ports unless it has one, which E2B's entries do not."""
    bare = f"[{entry}]" if ":" in entry and _parse_ip_network(entry) is not None else entry
    return bare if parse_pattern(bare).ports is not None else f"{bare}:*"


def _rules_from_patterns(action: RuleAction, patterns: Iterable[str]) -> tuple[NetworkRule, ...]:
    return tuple(NetworkRule(action=action, host=pattern) for pattern in patterns)


def _hosts_with_action(policy: NetworkPolicy, action: RuleAction) -> list[str]:
    hosts = (rule.host.removesuffix(":*") for rule in policy.ordered if rule.action == action)
    return list(dict.fromkeys(host.strip("[]") if host.endswith("]") else host for host in hosts))


# -- headers that are added


def _secrets_from_rules(rules: Mapping[str, list[E2bNetworkRule]]) -> Iterator[Secret]:
    for domain, transforms in rules.items():
        if not domain:
            raise errors.InvalidRequest("Rule domain must not be empty.")
        headers: dict[str, tuple[str, str]] = {}
        for rule in transforms:  # a later one has the last word
            given = rule.transform.headers if rule.transform is not None else None
            headers |= {name.lower(): (name, value) for name, value in (given or {}).items()}
        for name, value in headers.values():
            yield _secret_from_header(domain, name, value)


def _secret_from_header(domain: str, name: str, value: str) -> Secret:
    if _PLACEHOLDER in value:
        raise NotSupported(
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


def _encode_secret_rules(secrets: Iterable[Secret]) -> dict[str, Any]:
    headers: dict[str, dict[str, str]] = {}
    for secret in secrets:
        if secret.header is not None:
            headers.setdefault(secret.domain, {})[secret.header] = REDACTED
    return {domain: [{"transform": {"headers": each}}] for domain, each in headers.items()}
