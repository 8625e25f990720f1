"""Which rules decide: on what was tried, and on what somebody wonders about. Loads the proxy's rulebooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cloche.api.console.network import Row
from cloche.config.sections import Network
from cloche.egress.rules import Destination, Rule, Rulebook, Rulebooks, parse, parse_authority
from cloche.egress.streams import Refusal
from cloche.network_policy import NetworkPolicy

DEFAULT_PORTS = {"http": 80, "ws": 80}  # of URLs; that of others is 443


class Opinion(NamedTuple):
    """On a place that somebody wonders about."""

    allowed: bool
    there: str  # as it was understood; empty where it is no place
    why: str  # it is not
    own: str  # the rule of the sandbox that decides
    bound: str  # that of the operator
    is_name: bool  # which is looked up before anything is connected to


class Deciders:
    """The rules of sandboxes as they are now, taken apart once for a page."""

    def __init__(self, policies: Mapping[str, NetworkPolicy], bound: NetworkPolicy):
        self._policies = policies
        self._bound = Rulebook(bound, "operator")
        self._own: dict[str, Rulebook] = {}

    def rule(self, row: Row) -> str:
        """By which what was let through is let through now; empty where that cannot be said."""
        if row.sandbox not in self._policies or not row.host or not row.port:
            return ""
        if row.sandbox not in self._own:
            self._own[row.sandbox] = Rulebook(self._policies[row.sandbox], "sandbox")
        try:
            asked = parse(row.host, row.port)
        except Refusal:
            return ""
        own, bound = self._own[row.sandbox].rule_for(asked), self._bound.rule_for(asked)
        still = own is not None and own.allows and bound is not None and bound.allows
        return _shown(own) if still else ""


def opinion(place: str, policy: NetworkPolicy, config: Network) -> Opinion:
    """Whether a sandbox of that policy may go there, before anything is looked up."""
    try:
        asked = _destination(place)
    except Refusal as refusal:
        return Opinion(False, "", str(refusal), "", "", False)
    own, bound = (_rule(Rulebook(each, ""), asked) for each in (policy, config.bound))
    try:
        Rulebooks(policy, config.bound, config.internal_ranges).check(asked)
    except Refusal as refusal:
        return Opinion(False, str(asked), str(refusal), own, bound, asked.address is None)
    return Opinion(True, str(asked), "", own, bound, asked.address is None)


def _destination(place: str) -> Destination:
    """Of a host, a host with a port, or a URL. Raises BadDestination."""
    scheme, separator, rest = place.partition("://")
    bare = (rest if separator else place).partition("/")[0].rpartition("@")[2]
    return parse_authority(bare, DEFAULT_PORTS.get(scheme.lower(), 443) if separator else 443)


def _rule(book: Rulebook, asked: Destination) -> str:
    return _shown(book.rule_for(asked))


def _shown(rule: Rule | None) -> str:
    return "no rule allows it" if rule is None else f"{'allow' if rule.allows else 'deny'} {rule.text}"
