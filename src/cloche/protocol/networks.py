"""A network policy as it is asked for and told of, and as the engine has it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cloche.network_policy import REDACTED, NetworkPolicy, NetworkRule, Secret, check_counts
from cloche.protocol import asks, told


def asked_of(policy: NetworkPolicy) -> asks.NetworkAsked:
    """Without its secrets, which are asked for beside it."""
    rules = [asks.RuleAsked(action=each.action, host=each.host) for each in policy.rules]
    return asks.NetworkAsked(allow=list(policy.allow), deny=list(policy.deny), rules=rules)


def secrets_asked(policy: NetworkPolicy) -> list[asks.SecretAsked]:
    return [asks.SecretAsked(**msgspec.structs.asdict(each)) for each in policy.secrets]


def policy_asked(asked: asks.NetworkAsked | asks.SetNetwork, secrets: Sequence[asks.SecretAsked]) -> NetworkPolicy:
    """Raises InvalidRequest, which never has a secret's value in it."""
    check_counts(len(asked.allow) + len(asked.deny) + len(asked.rules), len(secrets))
    return NetworkPolicy(
        allow=tuple(asked.allow),
        deny=tuple(asked.deny),
        rules=tuple(NetworkRule(action=each.action, host=each.host) for each in asked.rules),
        secrets=tuple(Secret(**msgspec.structs.asdict(each)) for each in secrets),
    )


def info_of(policy: NetworkPolicy) -> told.NetworkInfo:
    secrets = [told.SecretInfo(domain=each.domain, header=each.header, name=each.name) for each in policy.secrets]
    return told.NetworkInfo(allow=list(policy.allow), deny=list(policy.deny), rules=list(policy.rules), secrets=secrets)


def policy_told(info: told.NetworkInfo) -> NetworkPolicy:
    """What is told of a policy, with something in the place of the values. Raises InvalidRequest for what is none."""
    secrets = (Secret(**msgspec.structs.asdict(each), value=REDACTED) for each in info.secrets)
    return NetworkPolicy(
        allow=tuple(info.allow), deny=tuple(info.deny), rules=tuple(info.rules), secrets=tuple(secrets)
    )
