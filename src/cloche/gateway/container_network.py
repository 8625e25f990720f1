"""A container's network: what a model is told of it, and how it is remembered when the container has expired."""

from __future__ import annotations

from cloche import errors
from cloche.model import KIB, SandboxInfo
from cloche.network_policy import NetworkPolicy, parse_pattern

NETWORK = "openai.network"  # in a sandbox's metadata: the hosts that were asked for, never a secret
MAX_LABEL = 8 * KIB  # the metadata of a sandbox may have twice that
MAX_TOLD = 30  # hosts that a model is told of


def hosts_of(policy: NetworkPolicy) -> tuple[str, ...]:
    """The patterns of the hosts that it allows."""
    return tuple(dict.fromkeys(rule.host for rule in policy.ordered if rule.action == "allow"))


def label_of(policy: NetworkPolicy) -> str:
    """What is remembered. What is too long for that is not."""
    label = ",".join(hosts_of(policy))
    return label if len(label) <= MAX_LABEL else ""


def remembered(info: SandboxInfo) -> NetworkPolicy | None:
    """What was asked for, but for the secrets: those are nowhere kept. None where nothing was.

    Another dialect may have written anything there: what makes no sense allows nothing.
    """
    label = info.metadata.get(NETWORK)
    if label is None:
        return None
    try:
        return NetworkPolicy(allow=tuple(filter(None, label.split(","))))
    except errors.InvalidRequest:
        return NetworkPolicy()


def told(policy: NetworkPolicy, *, packages: bool) -> str:
    """What a model should know before it writes code that fails."""
    hosts = hosts_of(policy)
    installs = "pip can install packages."
    if not hosts:
        return f"There is no internet access, but {installs}" if packages else "There is no internet access."
    return " ".join([_reach(hosts), *([installs] if packages else []), *_secrets_told(policy)])


def _reach(hosts: tuple[str, ...]) -> str:
    if any(parse_pattern(host).name == "*" for host in hosts):
        return "The internet can be reached by the proxy in HTTP_PROXY, as far as the operator of this host allows."
    shown = ", ".join(hosts[:MAX_TOLD]) + (f" and {len(hosts) - MAX_TOLD} more" if len(hosts) > MAX_TOLD else "")
    return f"Of the internet only these hosts can be reached, by the proxy in HTTP_PROXY: {shown}."


def _secrets_told(policy: NetworkPolicy) -> list[str]:
    named = [f"{secret.name} for {secret.domain}" for secret in policy.secrets if secret.name is not None]
    if not named:
        return []
    return [
        f"Environment variables stand for secrets: {', '.join(named)}. Send the variable's value as it is in a header "
        "of a request to that host: the secret takes its place on the way."
    ]
