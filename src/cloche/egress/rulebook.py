"""What policies say about a destination: the sandbox's own, the operator's, and addresses that nobody may reach."""

from __future__ import annotations

import ipaddress
import tomllib
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import NamedTuple

from cloche.egress.destination import Address, Destination, plain
from cloche.egress.own_addresses import is_own
from cloche.egress.refusal import Refusal
from cloche.network_policy import ALL_PORTS, WEB_PORTS, Network, NetworkPolicy, NetworkRule, Pattern, parse_pattern


class Denied(Refusal):
    """A policy does not allow it, or nobody may go there."""

    phrase = "Denied by network policy"


class Rule(NamedTuple):
    """A rule, taken apart."""

    allows: bool
    text: str
    pattern: Pattern
    ports: tuple[tuple[int, int], ...]

    def has_port(self, port: int) -> bool:
        return any(first <= port <= last for first, last in self.ports)

    def has_name(self, name: str) -> bool:
        return self.pattern.has_name(name)

    def has_address(self, address: Address) -> bool:
        network = self.pattern.network
        return network is not None and network.version == address.version and address in network


def _rule(rule: NetworkRule) -> Rule:
    pattern, allows = parse_pattern(rule.host), rule.action == "allow"
    return Rule(allows, rule.host, pattern, pattern.ports or (WEB_PORTS if allows else ALL_PORTS))


class Rulebook:
    """One policy. The first rule that matches decides; where none does it is denied."""

    def __init__(self, policy: NetworkPolicy, whose: str):
        self._rules = [_rule(rule) for rule in policy.ordered]
        self._whose = whose

    def check(self, asked: Destination) -> None:
        """Whether it may be tried at all, before anything is looked up. Raises Denied."""
        rule = self.rule_for(asked)
        if rule is None:
            raise Denied(f"{asked} is not allowed by the {self._whose}")
        if not rule.allows:
            raise Denied(f"{asked} is denied by the {self._whose}: {rule.text}")

    def rule_for(self, asked: Destination) -> Rule | None:
        """The one that decides; None where there is none, which is a denial."""
        matching = (each for each in self._rules if each.has_port(asked.port) and self._matches(each, asked))
        return next(matching, None)

    def check_address(self, asked: Destination, address: Address) -> None:
        """Whether a name that was allowed may lead there: a network that is denied first may not be. Raises Denied."""
        for rule in self._rules:
            if not rule.has_port(asked.port):
                continue
            if self._matches(rule, asked) or (rule.allows and rule.has_address(address)):
                return
            if rule.has_address(address):
                raise Denied(f"{asked.host} leads to what is denied by the {self._whose}: {rule.text}")

    def _matches(self, rule: Rule, asked: Destination) -> bool:
        if asked.address is None:
            return rule.has_name(asked.host)
        return rule.pattern.name == "*" or rule.has_address(asked.address)


class Rulebooks:
    """Both that count for a sandbox. Its own can be replaced while it runs."""

    def __init__(self, own: NetworkPolicy, bound: NetworkPolicy, internal: Sequence[Network] = ()):
        self._bound = Rulebook(bound, "operator's network policy")
        self._internal = tuple(internal)
        self.replace(own)

    def replace(self, own: NetworkPolicy) -> None:
        self._own = Rulebook(own, "sandbox's network policy")

    def check(self, asked: Destination) -> None:
        """Raises Denied."""
        self._own.check(asked)
        self._bound.check(asked)
        if asked.address is not None:
            self._check_place(asked, asked.address)

    def reachable(self, asked: Destination, found: Iterable[Address]) -> list[Address]:
        """Those of a name's addresses that may be connected to. Raises Denied where none may be."""
        allowed, why = [], f"{asked.host} has no address"
        for address in map(plain, found):
            try:
                self._own.check_address(asked, address)
                self._bound.check_address(asked, address)
                self._check_place(asked, address)
            except Denied as denied:
                why = str(denied)
            else:
                allowed.append(address)
        if not allowed:
            raise Denied(why)
        return allowed

    def check_again(self, asked: Destination, reached: Address | None) -> None:
        """As both, for what was let through before. Raises Denied."""
        self.check(asked)
        if reached is not None and asked.address is None:
            self.reachable(asked, [reached])

    def _check_place(self, asked: Destination, address: Address) -> None:
        if any(address.version == each.version and address in each for each in self._internal):
            return
        leads = "is" if asked.address is not None else "leads to"  # not where: names of a network are its own
        for network, reason in FORBIDDEN:
            if address.version == network.version and address in network:
                raise Denied(f"{asked.host} {leads} no public address: {reason}")
        if is_own(address):
            raise Denied(f"{asked.host} {leads} an address of this host itself")


def _forbidden() -> list[tuple[Network, str]]:
    text = resources.files("cloche.egress").joinpath("forbidden.toml").read_text("utf-8")
    return [(ipaddress.ip_network(network), reason) for network, reason in tomllib.loads(text)["networks"].items()]


FORBIDDEN = _forbidden()
