"""What callers may write about a network and its secrets, turned into a policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from cloche import errors
from cloche.network_policy import REDACTED, NetworkPolicy, Secret, check_lists

NetworkLike = NetworkPolicy | Mapping[str, Any] | Literal[False] | None
SecretsLike = Iterable[Secret | Mapping[str, str]] | None

_FIELDS = ("allow", "deny", "rules")


def network_of(network: NetworkLike, secrets: SecretsLike = None) -> NetworkPolicy | None:
    """The policy that a new sandbox is asked for; None where that is left to the template and the host.

    Raises InvalidRequest, which never has a secret's value in it.
    """
    if network is None:
        if secrets is not None and secrets_of(secrets):
            raise errors.InvalidRequest(
                "secrets need a network that allows their domains: give it too, like "
                'network={"allow": ["api.example.com"]}'
            )
        return None
    policy = policy_of(network)
    if secrets is not None:
        return msgspec.structs.replace(policy, secrets=secrets_of(secrets))
    if any(each.value == REDACTED for each in policy.secrets):
        raise errors.InvalidRequest("the values of a sandbox's secrets are not shown: give them anew, with secrets=")
    return policy


def changed(network: NetworkLike, secrets: SecretsLike) -> tuple[NetworkPolicy, bool]:
    """The policy that replaces another, and whether the other's secrets stay. Raises InvalidRequest.

    They stay where none are given, since nobody can read their values to give them again.
    """
    if network is None:
        raise errors.InvalidRequest("a policy is needed: {} or False for no network at all")
    policy = policy_of(network)
    if secrets is not None:
        return msgspec.structs.replace(policy, secrets=secrets_of(secrets)), False
    shown = all(each.value == REDACTED for each in policy.secrets)  # none, or those of a policy that was shown
    return (msgspec.structs.replace(policy, secrets=()), True) if shown else (policy, False)


def policy_of(network: NetworkPolicy | Mapping[str, Any] | Literal[False]) -> NetworkPolicy:
    if isinstance(network, NetworkPolicy):
        return network
    if network is False:
        return NetworkPolicy()
    if not isinstance(network, Mapping):
        raise errors.InvalidRequest(
            f"network must be a mapping like {{'allow': ['pypi.org']}}, False or None, not {network!r:.100}"
        )
    for name in network:
        if name not in _FIELDS:
            hint = "these go beside it, as secrets=[...]" if name == "secrets" else f"it has {', '.join(_FIELDS)}"
            raise errors.InvalidRequest(f"a network policy has no {name!r}: {hint}")
    check_lists(network.get("allow"), network.get("deny"))
    try:
        return msgspec.convert(dict(network), NetworkPolicy)
    except msgspec.ValidationError as error:
        raise errors.InvalidRequest(f"bad network policy: {error}") from None


def secrets_of(secrets: Iterable[Secret | Mapping[str, str]]) -> tuple[Secret, ...]:
    if isinstance(secrets, (str, bytes, Mapping)) or not isinstance(secrets, Iterable):
        raise errors.InvalidRequest("secrets must be a list of mappings, each with domain, value, and header or name")
    return tuple(map(_secret, secrets))


def _secret(given: Secret | Mapping[str, str]) -> Secret:
    if isinstance(given, Secret):
        return given
    if not isinstance(given, Mapping):
        raise errors.InvalidRequest("a secret must be a mapping with domain, value, and header or name")
    known = Secret.__struct_fields__
    for name in given:
        if name not in known:
            raise errors.InvalidRequest(f"a secret has no {name!r:.100}: it has {', '.join(known)}")
    try:
        return msgspec.convert(dict(given), Secret)
    except msgspec.ValidationError as error:
        raise errors.InvalidRequest(f"bad secret: {error}") from None
