"""The network rules that decide on connections and on checked places. Loads the proxy's rulebooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cloche.api.console.network import NetworkRow
from cloche.config.sections import NetworkConfig
from cloche.egress.rules import Destination, EgressRule, PolicyRules, SandboxRules, parse_authority, parse_destination
from cloche.egress.streams import EgressRefusal
from cloche.network_policy import NetworkPolicy

DEFAULT_PORTS = {"http": 80, "ws": 80}  # of URLs; that of others is 443


class DestinationCheck(NamedTuple):
    """The decision on a destination that a visitor checks."""

    allowed: bool
    there: str  # as it was understood; empty where it is no place
    why: str  # it is not
    own: str  # the rule of the sandbox that decides
    bound: str  # that of the operator
    is_name: bool  # which is looked up before anything is connected to


class DecidingRules:
    """The current rules of sandboxes, parsed once for a page."""

    def __init__(self, policies: Mapping[str, NetworkPolicy], bound: NetworkPolicy):
        self._policies = policies
        self._bound = PolicyRules(bound, "operator")
        self._own: dict[str, PolicyRules] = {}

    def deciding_rule(self, row: NetworkRow) -> str:
        """The rule that allows this connection now; empty where there is none, or it is unknown."""
        if row.sandbox not in self._policies or not row.host or not row.port:
            return ""
        if row.sandbox not in self._own:
            self._own[row.sandbox] = PolicyRules(self._policies[row.sandbox], "sandbox")
        try:
            destination = parse_destination(row.host, row.port)
        except EgressRefusal:
            return ""
        own, bound = self._own[row.sandbox].rule_for(destination), self._bound.rule_for(destination)
        still = own is not None and own.allows and bound is not None and bound.allows
        return _describe_rule(own) if still else ""


def check_destination(place: str, policy: NetworkPolicy, config: NetworkConfig) -> DestinationCheck:
    """Whether a sandbox with that policy may connect, before anything is looked up."""
    try:
        destination = _parse_destination(place)
    except EgressRefusal as refusal:
        return DestinationCheck(False, "", str(refusal), "", "", False)
    own, bound = (_rule_text(PolicyRules(each, ""), destination) for each in (policy, config.bound))
    try:
        SandboxRules(policy, config.bound, config.internal_ranges).check(destination)
    except EgressRefusal as refusal:
        return DestinationCheck(False, str(destination), str(refusal), own, bound, destination.address is None)
    return DestinationCheck(True, str(destination), "", own, bound, destination.address is None)


def _parse_destination(place: str) -> Destination:
    """Parses a host, a host with a port, or a URL. Raises BadDestination."""
    scheme, separator, rest = place.partition("://")
    bare = (rest if separator else place).partition("/")[0].rpartition("@")[2]
    return parse_authority(bare, DEFAULT_PORTS.get(scheme.lower(), 443) if separator else 443)


def _rule_text(book: PolicyRules, destination: Destination) -> str:
    return _describe_rule(book.rule_for(destination))


def _describe_rule(rule: EgressRule | None) -> str:
    return "no rule allows it" if rule is None else f"{'allow' if rule.allows else 'deny'} {rule.text}"
