"""A sandbox's network in OpenSandbox's words, as a policy of ours, and back. Pure; raises InvalidRequest.

OpenSandbox's rules are asked in their order and have no ports; what none matches is decided by the default.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from cloche import errors
from cloche.api.opensandbox.replies import Json
from cloche.model import Struct
from cloche.network_policy import Action, NetworkPolicy, NetworkRule, parse_pattern

EVERYTHING = "*:*"


class Rule(Struct):
    action: str = ""
    target: str = ""


class Network(Struct):
    """A policy. The names are OpenSandbox's."""

    defaultAction: str | None = None
    egress: list[Rule] | None = None


def policy_of(asked: Network) -> NetworkPolicy:
    """What is left out denies."""
    allows = _action(asked.defaultAction, "networkPolicy.defaultAction") == "allow"
    rules = rules_of(asked.egress or (), "networkPolicy.egress")
    return NetworkPolicy(rules=rules, allow=(EVERYTHING,) if allows else ())


def policy_unasked(bound: NetworkPolicy) -> NetworkPolicy | None:
    """Of a sandbox for which nothing was said: OpenSandbox allows it everything, here that is what `bound` does."""
    return NetworkPolicy(allow=(EVERYTHING,)) if bound.allow else None


def rules_of(asked: Iterable[Rule], where: str) -> tuple[NetworkRule, ...]:
    """Of two with the same target the first counts."""
    return _first_of_each(_rule(rule, f"{where}[{at}]") for at, rule in enumerate(asked))


def merged(policy: NetworkPolicy, rules: tuple[NetworkRule, ...]) -> NetworkPolicy:
    """`policy` with these rules before its own, whose targets they take over. Its default and its secrets stay."""
    own, default = _parts(policy)
    return NetworkPolicy(rules=_first_of_each(chain(rules, own)), allow=default, secrets=policy.secrets)


def without(policy: NetworkPolicy, targets: Iterable[str]) -> NetworkPolicy:
    """`policy` without the rules for these targets. One that it has no rule for is no mistake."""
    own, default = _parts(policy)
    names = {target.strip().lower() for target in targets}
    kept = tuple(rule for rule in own if _target(rule).lower() not in names)
    return NetworkPolicy(rules=kept, allow=default, secrets=policy.secrets)


def status(policy: NetworkPolicy, bound: NetworkPolicy) -> Json:
    """What is answered to who asks for a policy, or has changed it."""
    own, default = _parts(policy)
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
            "egress": [{"action": rule.action, "target": _target(rule)} for rule in own],
        },
    }


def _action(given: str | None, where: str) -> Action:
    match (given or "deny").strip().lower():
        case "allow":
            return "allow"
        case "deny" | "":
            return "deny"
    raise errors.InvalidRequest(f"{where}: an action is allow or deny, not {str(given)[:80]!r}")


def _rule(asked: Rule, where: str) -> NetworkRule:
    action, target = _action(asked.action, f"{where}.action"), asked.target.strip()
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


def _parts(policy: NetworkPolicy) -> tuple[tuple[NetworkRule, ...], tuple[str, ...]]:
    """The rules, and behind them what allows everything else, if anything does."""
    rules = policy.ordered
    if rules and rules[-1].action == "allow" and parse_pattern(rules[-1].host).name == "*":
        return rules[:-1], (rules[-1].host,)
    return rules, ()


def _target(rule: NetworkRule) -> str:
    host = rule.host.removesuffix(":*")
    return host.strip("[]") if host.endswith("]") else host


def _first_of_each(rules: Iterable[NetworkRule]) -> tuple[NetworkRule, ...]:
    found: dict[str, NetworkRule] = {}
    for rule in rules:
        found.setdefault(_target(rule).lower(), rule)
    return tuple(found.values())
