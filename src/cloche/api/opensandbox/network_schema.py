"""OpenSandbox's network policies, converted to our policies and back. Pure; raises InvalidRequest.

OpenSandbox applies its rules in order, without ports; the default decides unmatched targets.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from cloche import errors
from cloche.api.dialect import Json
from cloche.model import Struct
from cloche.network_policy import NetworkPolicy, NetworkRule, RuleAction, parse_pattern

EVERYTHING_PATTERN = "*:*"


class OpenSandboxRule(Struct):
    action: str = ""
    target: str = ""


class OpenSandboxNetworkBody(Struct):
    """A policy. The names are OpenSandbox's."""

    defaultAction: str | None = None
    egress: list[OpenSandboxRule] | None = None


def policy_from_body(message: OpenSandboxNetworkBody) -> NetworkPolicy:
    """The policy. An omitted default action denies."""
    allows = _parse_action(message.defaultAction, "networkPolicy.defaultAction") == "allow"
    rules = rules_from_body(message.egress or (), "networkPolicy.egress")
    return NetworkPolicy(rules=rules, allow=(EVERYTHING_PATTERN,) if allows else ())


def default_policy_within(bound: NetworkPolicy) -> NetworkPolicy | None:
    """The policy when none is requested: OpenSandbox allows everything, here everything within `bound`."""
    return NetworkPolicy(allow=(EVERYTHING_PATTERN,)) if bound.allow else None


def rules_from_body(asked: Iterable[OpenSandboxRule], where: str) -> tuple[NetworkRule, ...]:
    """The rules. Of two with the same target the first counts."""
    return _first_rule_per_target(_parse_rule(rule, f"{where}[{at}]") for at, rule in enumerate(asked))


def merge_rules(policy: NetworkPolicy, rules: tuple[NetworkRule, ...]) -> NetworkPolicy:
    """`policy` with these rules before its own, replacing those with the same targets.

    Default and secrets stay.
    """
    own, default = _rules_and_default(policy)
    return NetworkPolicy(rules=_first_rule_per_target(chain(rules, own)), allow=default, secrets=policy.secrets)


def remove_rules(policy: NetworkPolicy, targets: Iterable[str]) -> NetworkPolicy:
    """`policy` without the rules for these targets. A target without a rule is not an error."""
    own, default = _rules_and_default(policy)
    names = {target.strip().lower() for target in targets}
    kept = tuple(rule for rule in own if _target_of_rule(rule).lower() not in names)
    return NetworkPolicy(rules=kept, allow=default, secrets=policy.secrets)


def encode_policy_status(policy: NetworkPolicy, bound: NetworkPolicy) -> Json:
    """The response to a read or a change of a policy."""
    own, default = _rules_and_default(policy)
    mode = "enforcing" if own else "allow_all" if default else "deny_all"
    bounded = policy.allows_something and not any(parse_pattern(host).name == "*" for host in bound.allow)
    return {
        "status": "ok",
        "mode": mode,
        "enforcementMode": "proxy",
        **(
            {"reason": f"within what this server's operator allows: {', '.join(bound.allow)}"[:1000]} if bounded else {}
        ),
        "policy": {
            "defaultAction": "allow" if default else "deny",
            "egress": [{"action": rule.action, "target": _target_of_rule(rule)} for rule in own],
        },
    }


def _parse_action(given: str | None, where: str) -> RuleAction:
    match (given or "deny").strip().lower():
        case "allow":
            return "allow"
        case "deny" | "":
            return "deny"
    raise errors.InvalidRequest(f"{where}: an action is allow or deny, not {str(given)[:80]!r}")


def _parse_rule(rule: OpenSandboxRule, where: str) -> NetworkRule:
    action, target = _parse_action(rule.action, f"{where}.action"), rule.target.strip()
    host = f"[{target}]" if target.count(":") > 1 else target
    try:
        pattern = parse_pattern(host)
    except errors.InvalidRequest:
        pattern = None
    if pattern is None or pattern.name == "*" or pattern.ports is not None:
        raise errors.InvalidRequest(
            f"{where}.target: {target[:300]!r} is not a target: give a name like pypi.org, *.example.com, or an "
            "address or network like 192.0.2.0/24, without a port; for all of them there is defaultAction"
        )
    return NetworkRule(action=action, host=f"{host}:*")


def _rules_and_default(policy: NetworkPolicy) -> tuple[tuple[NetworkRule, ...], tuple[str, ...]]:
    """The rules, and the final rule that allows everything else, if any."""
    rules = policy.ordered
    if rules and rules[-1].action == "allow" and parse_pattern(rules[-1].host).name == "*":
        return rules[:-1], (rules[-1].host,)
    return rules, ()


def _target_of_rule(rule: NetworkRule) -> str:
    host = rule.host.removesuffix(":*")
    return host.strip("[]") if host.endswith("]") else host


def _first_rule_per_target(rules: Iterable[NetworkRule]) -> tuple[NetworkRule, ...]:
    found: dict[str, NetworkRule] = {}
    for rule in rules:
        found.setdefault(_target_of_rule(rule).lower(), rule)
    return tuple(found.values())
