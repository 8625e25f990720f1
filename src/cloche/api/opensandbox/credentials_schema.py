"""OpenSandbox's credential vaults: credentials, which are never shown, and their destinations. Pure.

Cloche binds credentials to hosts, over TLS. OpenSandbox's further restrictions, to ports, methods or paths,
are refused, and so are unknown fields: a credential is never sent to an unintended destination.

Raises InvalidRequest, Conflict.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from typing import TypeVar

from cloche import errors
from cloche.api.dialect import Conflict, Json, UnsupportedField
from cloche.model import Struct
from cloche.network_policy import (
    MAX_SECRET_BYTES,
    MAX_SECRETS,
    NetworkPolicy,
    Secret,
    check_policy_size,
    first_unused_secret,
    parse_pattern,
)

DEFAULT_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")  # what a binding is for that names none
ALL_PATHS = ("/*", "*")
MAX_NAME_LETTERS = 256  # letters
ACCEPTED_PORTS: tuple[list[int] | None, ...] = ([443], [], None)  # the first is what clients send that are given none


class CredentialSource(Struct, forbid_unknown_fields=True):
    value: str
    type: str = "inline"

    def __repr__(self) -> str:  # it ends up in logs and tracebacks
        return "CredentialSource(value=...)"


class VaultCredential(Struct, forbid_unknown_fields=True):
    name: str
    source: CredentialSource


class BindingMatch(Struct, forbid_unknown_fields=True):
    hosts: list[str]
    schemes: list[str] | None = None
    ports: list[int] | None = None
    methods: list[str] | None = None
    paths: list[str] | None = None


class BindingHeader(Struct, forbid_unknown_fields=True):
    name: str
    credential: str


class BindingAuth(Struct, forbid_unknown_fields=True):
    type: str
    credential: str = ""
    name: str = ""
    headers: list[BindingHeader] | None = None


class CredentialBinding(Struct, forbid_unknown_fields=True):
    name: str
    match: BindingMatch
    auth: BindingAuth


class CredentialChanges(Struct, forbid_unknown_fields=True):
    add: list[VaultCredential] | None = None
    replace: list[VaultCredential] | None = None
    delete: list[str] | None = None


class BindingChanges(Struct, forbid_unknown_fields=True):
    add: list[CredentialBinding] | None = None
    replace: list[CredentialBinding] | None = None
    delete: list[str] | None = None


class CreateVaultBody(Struct, forbid_unknown_fields=True):
    credentials: list[VaultCredential]
    bindings: list[CredentialBinding]


class VaultMutation(Struct, forbid_unknown_fields=True):
    expectedRevision: int | None = None
    credentials: CredentialChanges | None = None
    bindings: BindingChanges | None = None


N = TypeVar("N", VaultCredential, CredentialBinding)


class CredentialVault(Struct):
    """A vault, kept in memory only."""

    revision: int
    credentials: dict[str, VaultCredential]
    bindings: dict[str, CredentialBinding]
    revisions: dict[str, int] = {}  # in which credentials came


def create_vault(message: CreateVaultBody) -> CredentialVault:
    empty = CredentialVault(revision=0, credentials={}, bindings={})
    return _apply_changes(empty, CredentialChanges(add=message.credentials), BindingChanges(add=message.bindings))


def apply_mutation(vault: CredentialVault, mutation: VaultMutation) -> CredentialVault:
    """Applies all changes, or none."""
    if mutation.expectedRevision not in (None, vault.revision):
        raise Conflict(f"expectedRevision {mutation.expectedRevision} does not match current revision {vault.revision}")
    return _apply_changes(vault, mutation.credentials or CredentialChanges(), mutation.bindings or BindingChanges())


def secrets_from_vault(vault: CredentialVault | None) -> tuple[Secret, ...]:
    """The secrets that the proxy adds for the vault's bindings."""
    if vault is None:
        return ()
    return tuple(
        Secret(domain=_normalize_host(host), header=header, value=value)
        for binding in vault.bindings.values()
        for header, value in _headers_for_binding(binding, vault.credentials)
        for host in binding.match.hosts
    )


def replace_vault_secrets(
    policy: NetworkPolicy, before: CredentialVault | None, after: CredentialVault | None
) -> NetworkPolicy:
    """`policy` with the secrets of one vault replaced by those of another. Raises InvalidRequest.

    Secrets are sent only to hosts that a rule allows by name.
    """
    gone = secrets_from_vault(before)
    kept = tuple(each for each in policy.secrets if each not in gone)
    named = tuple(rule for rule in policy.ordered if parse_pattern(rule.host).name != "*")
    useless = first_unused_secret(NetworkPolicy(rules=named, secrets=secrets_from_vault(after)))
    if useless is not None:
        raise errors.InvalidRequest(
            f"{useless.domain} is not covered by a rule of the network policy that allows it by name: add one first"
        )
    return NetworkPolicy(
        rules=policy.rules, allow=policy.allow, deny=policy.deny, secrets=(*kept, *secrets_from_vault(after))
    )


def encode_vault(vault: CredentialVault) -> Json:
    """The vault, without the values of its credentials."""
    return {
        "revision": vault.revision,
        "credentials": [
            {"name": name, "sourceType": "inline", "revision": vault.revisions[name]}
            for name in sorted(vault.credentials)
        ],
        "bindings": [_encode_binding(each, vault.revision) for _, each in sorted(vault.bindings.items())],
    }


def _encode_binding(binding: CredentialBinding, revision: int) -> Json:
    match = binding.match
    return {
        "name": binding.name,
        "revision": revision,
        "match": {
            "schemes": ["https"],
            "ports": [443],
            "hosts": [_normalize_host(host) for host in match.hosts],
            "methods": match.methods or list(DEFAULT_METHODS),
            "paths": match.paths or ["/*"],
        },
        "auth": {"type": binding.auth.type, **({"name": binding.auth.name} if binding.auth.type == "apiKey" else {})},
    }


# -- changing


def _apply_changes(vault: CredentialVault, credentials: CredentialChanges, bindings: BindingChanges) -> CredentialVault:
    new, other = credentials.add or (), credentials.replace or ()
    for each in (*new, *other):
        _check_credential(each)
    kept = _merge_named_items("credential", vault.credentials, new, other, credentials.delete or ())
    if len(kept) > MAX_SECRETS:
        raise errors.InvalidRequest(f"a credential vault can have {MAX_SECRETS} credentials")
    came = {**vault.revisions, **dict.fromkeys((each.name for each in (*new, *other)), vault.revision + 1)}
    mutated = CredentialVault(
        revision=vault.revision + 1,
        credentials=kept,
        bindings=_merge_named_items(
            "binding", vault.bindings, bindings.add or (), bindings.replace or (), bindings.delete or ()
        ),
        revisions={name: came[name] for name in kept},
    )
    _check_secret_count(mutated.bindings.values())
    for binding in mutated.bindings.values():
        _check_binding(binding, mutated.credentials)
    _check_overlaps(mutated.bindings.values())
    return mutated


def _merge_named_items(
    kind: str, kept: Mapping[str, N], add: Iterable[N], replace: Iterable[N], delete: Iterable[str]
) -> dict[str, N]:
    found = dict(kept)
    for name in delete:
        if found.pop(name, None) is None:
            raise errors.InvalidRequest(f"{kind} {name[:100]!r} does not exist")
    for each in replace:
        if each.name not in found:
            raise errors.InvalidRequest(f"{kind} {each.name[:100]!r} does not exist")
        found[each.name] = each
    for each in add:
        if each.name in found or not each.name.strip() or len(each.name) > MAX_NAME_LETTERS:
            raise errors.InvalidRequest(
                f"{kind} {each.name[:100]!r}: give it a name that no other has, of {MAX_NAME_LETTERS} letters at most"
            )
        found[each.name] = each
    return found


# -- checking


def _check_credential(credential: VaultCredential) -> None:
    if credential.source.type != "inline" or not credential.source.value:
        raise errors.InvalidRequest(f"credential {credential.name[:100]!r}: its source is inline, with a value")
    if len(credential.source.value) > MAX_SECRET_BYTES:
        raise errors.InvalidRequest(f"credential {credential.name[:100]!r}: its value is over {MAX_SECRET_BYTES} bytes")


def _check_secret_count(bindings: Iterable[CredentialBinding]) -> None:
    """Runs before the bindings are checked, and compared with each other."""
    check_policy_size(0, sum(max(len(each.match.hosts), 1) * max(len(each.auth.headers or ()), 1) for each in bindings))


def _check_binding(binding: CredentialBinding, credentials: Mapping[str, VaultCredential]) -> None:
    where, match = f"binding {binding.name[:100]!r}", binding.match
    if not match.hosts:
        raise errors.InvalidRequest(f"{where}: match.hosts cannot be empty")
    if {each.lower() for each in match.schemes or ["https"]} != {"https"}:
        raise UnsupportedField(f"{where}: match.schemes: credentials are sent over https only")
    if match.ports not in ACCEPTED_PORTS:
        raise UnsupportedField(
            f"{where}: match.ports: credentials go to all ports that the policy allows; leave it out"
        )
    if not set(DEFAULT_METHODS) <= {each.upper() for each in match.methods or DEFAULT_METHODS}:
        raise UnsupportedField(f"{where}: match.methods: credentials go with all methods here; leave it out")
    if any(each not in ALL_PATHS for each in match.paths or ()):
        raise UnsupportedField(f"{where}: match.paths: credentials go with all paths of a host here; leave it out")
    try:
        for header, value in _headers_for_binding(binding, credentials):
            for host in match.hosts:
                Secret(domain=_normalize_host(host), header=header, value=value)
    except errors.InvalidRequest as error:  # its words never have the value
        raise errors.InvalidRequest(f"{where}: {error}") from None


def _check_overlaps(bindings: Iterable[CredentialBinding]) -> None:
    """Two bindings must not match the same host: it would get the credentials of both."""
    for one, other in combinations(bindings, 2):
        if any(
            _hosts_overlap(_normalize_host(host), _normalize_host(each))
            for host in one.match.hosts
            for each in other.match.hosts
        ):
            raise errors.InvalidRequest(
                f"bindings {one.name[:100]!r} and {other.name[:100]!r} can match the same request: give one host to one"
            )


def _hosts_overlap(one: str, other: str) -> bool:
    below, above = one.removeprefix("*"), other.removeprefix("*")
    wide = (one.startswith("*") and other.endswith(below)) or (other.startswith("*") and one.endswith(above))
    return one == other or wide


def _normalize_host(host: str) -> str:
    return host.strip().lower().removesuffix(".")


def _headers_for_binding(
    binding: CredentialBinding, credentials: Mapping[str, VaultCredential]
) -> Iterator[tuple[str, str]]:
    def value(name: str) -> str:
        if name not in credentials:
            raise errors.InvalidRequest(
                f"binding {binding.name[:100]!r} needs credential {name[:100]!r}, which is not there"
            )
        return credentials[name].source.value

    auth = binding.auth
    match auth.type:
        case "bearer":
            yield "Authorization", f"Bearer {value(auth.credential)}"
        case "basic":
            yield "Authorization", f"Basic {value(auth.credential)}"
        case "apiKey":
            yield auth.name, value(auth.credential)
        case "customHeaders" if auth.headers:
            yield from ((each.name, value(each.credential)) for each in auth.headers)
        case _:
            raise errors.InvalidRequest(
                f"auth.type: {auth.type[:80]!r} is none of bearer, basic, apiKey, and customHeaders with headers"
            )
