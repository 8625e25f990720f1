"""`network_policy`: the hosts that a container may reach, in OpenAI's format. Pure."""

from __future__ import annotations

from typing import Any

from cloche import errors
from cloche.api.openai.context import BadParameter, check_length, missing_parameter
from cloche.gateway.containers import MAX_LABEL_LENGTH, allowed_hosts
from cloche.network_policy import MAX_RULES, MAX_SECRETS, NetworkPolicy, Secret, parse_pattern

POLICY_TYPES = ("disabled", "allowlist")


def decode_network(value: Any, param: str) -> NetworkPolicy | None:
    """None where it is not set. Raises InvalidRequest in OpenAI's words."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise _wrong_type(param, "an object")
    if value.get("type") is None:
        raise missing_parameter(f"{param}.type")
    if value["type"] not in POLICY_TYPES:
        message = f"Invalid value: {str(value['type'])[:100]!r}. Supported values are: 'disabled' and 'allowlist'."
        raise BadParameter(message, f"{param}.type")
    if value["type"] == "disabled":
        return _no_network(value, param)
    allow = _decode_domains(value.get("allowed_domains"), f"{param}.allowed_domains")
    secrets = _decode_secrets(value.get("domain_secrets"), f"{param}.domain_secrets", allow)
    return NetworkPolicy(allow=allow, secrets=secrets)


def network_body(policy: NetworkPolicy) -> dict[str, Any]:
    """The policy as clients see it, without its secrets."""
    hosts = allowed_hosts(policy)
    return {"type": "allowlist", "allowed_domains": list(hosts)} if hosts else {"type": "disabled"}


def _no_network(value: dict[str, Any], param: str) -> NetworkPolicy:
    """Raises InvalidRequest for domains in a disabled policy: that is a mistake of the client."""
    for name in ("allowed_domains", "domain_secrets"):
        if value.get(name):
            raise BadParameter(f"Invalid '{param}.{name}': only the type 'allowlist' has it.", f"{param}.{name}")
    return NetworkPolicy()


def _decode_domains(value: Any, param: str) -> tuple[str, ...]:
    if value is None:
        raise missing_parameter(param)
    if not isinstance(value, list):
        raise _wrong_type(param, "an array of domains")
    if not value:
        message = f"Invalid '{param}': empty array. Expected an array with minimum length 1, but got an empty array."
        raise BadParameter(message, param, "empty_array")
    check_length(value, MAX_RULES, param)
    domains = tuple(dict.fromkeys(_decode_domain(each, f"{param}[{at}]") for at, each in enumerate(value)))
    if len(",".join(domains)) > MAX_LABEL_LENGTH:
        raise BadParameter(
            f"Invalid '{param}': {MAX_LABEL_LENGTH} characters at most in all of them. Use wildcards like "
            "*.example.com.",
            param,
            "string_above_max_length",
        )
    return domains


def _decode_domain(value: Any, param: str) -> str:
    """A name, or all below one; with a port after it where that is neither 80 nor 443, which OpenAI does not have."""
    if not isinstance(value, str):
        raise _wrong_type(param, "a domain")
    try:
        pattern = parse_pattern(value)
    except errors.InvalidRequest:
        pattern = None
    if pattern is None or pattern.name in (None, "*"):
        raise BadParameter(
            f"Invalid '{param}': {value[:100]!r} is not a domain. Expected a name like 'api.example.com', or "
            "'*.example.com' for all names below one: no URL, no address, and 'xn--..' for other than ASCII letters.",
            param,
        )
    return value.strip().lower()


def _decode_secrets(value: Any, param: str, domains: tuple[str, ...]) -> tuple[Secret, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise _wrong_type(param, "an array of secrets")
    check_length(value, MAX_SECRETS, param)
    secrets = tuple(_decode_secret(each, f"{param}[{at}]", domains) for at, each in enumerate(value))
    seen: set[tuple[str, str | None]] = set()
    for at, secret in enumerate(secrets):
        if (secret.domain, secret.name) in seen:
            message = f"Invalid '{param}[{at}].name': there are two secrets '{secret.name}' for {secret.domain}."
            raise BadParameter(message, f"{param}[{at}].name")
        seen.add((secret.domain, secret.name))
    return secrets


def _decode_secret(value: Any, param: str, domains: tuple[str, ...]) -> Secret:
    if not isinstance(value, dict):
        raise _wrong_type(param, "an object")
    for field in ("domain", "name", "value"):
        if value.get(field) is None:
            raise missing_parameter(f"{param}.{field}")
        if not isinstance(value[field], str):
            raise _wrong_type(f"{param}.{field}", "a string")
    domain = _decode_domain(value["domain"], f"{param}.domain")
    if domain not in {_without_port(each) for each in domains}:
        raise BadParameter(
            f"Invalid '{param}.domain': {domain[:100]!r} is not among 'allowed_domains'. Add it there, as it is here.",
            f"{param}.domain",
        )
    try:
        return Secret(domain=domain, name=value["name"], value=value["value"])
    except errors.InvalidRequest as error:  # its words never have the value
        field = "value" if "the value of" in str(error) else "name"
        raise BadParameter(f"Invalid '{param}.{field}': {error}.", f"{param}.{field}") from None


def _without_port(domain: str) -> str:
    return domain.partition(":")[0]


def _wrong_type(param: str, expected: str) -> BadParameter:
    return BadParameter(f"Invalid type for '{param}': expected {expected}.", param, "invalid_type")
