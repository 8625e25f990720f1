"""A credential vault in OpenSandbox's words: credentials, which are never shown, and where they are sent. Pure.

Ours knows hosts, over TLS. What OpenSandbox could restrict further, to ports, methods or paths, is refused where it is
asked for, and so are fields that nobody knows: a credential is never sent where it was not meant to be.

Raises InvalidRequest, Conflict.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from typing import TypeVar

from cloche import errors
from cloche.api.opensandbox.replies import Conflict, Json, Unsupported
from cloche.model import Struct
from cloche.network_policy import (
    MAX_SECRET_BYTES,
    MAX_SECRETS,
    NetworkPolicy,
    Secret,
    check_counts,
    parse_pattern,
    useless_secret,
)

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")  # what a binding is for that names none
ALL_PATHS = ("/*", "*")
MAX_NAME = 256  # letters
PORTS: tuple[list[int] | None, ...] = ([443], [], None)  # the first is what clients send that are given none


class Source(Struct, forbid_unknown_fields=True):
    value: str
    type: str = "inline"

    def __repr__(self) -> str:  # it ends up in logs and tracebacks
        return "Source(value=...)"


class Credential(Struct, forbid_unknown_fields=True):
    name: str
    source: Source


class Match(Struct, forbid_unknown_fields=True):
    hosts: list[str]
    schemes: list[str] | None = None
    ports: list[int] | None = None
    methods: list[str] | None = None
    paths: list[str] | None = None


class Header(Struct, forbid_unknown_fields=True):
    name: str
    credential: str


class Auth(Struct, forbid_unknown_fields=True):
    type: str
    credential: str = ""
    name: str = ""
    headers: list[Header] | None = None


class Binding(Struct, forbid_unknown_fields=True):
    name: str
    match: Match
    auth: Auth


class CredentialChanges(Struct, forbid_unknown_fields=True):
    add: list[Credential] | None = None
    replace: list[Credential] | None = None
    delete: list[str] | None = None


class BindingChanges(Struct, forbid_unknown_fields=True):
    add: list[Binding] | None = None
    replace: list[Binding] | None = None
    delete: list[str] | None = None


class NewVault(Struct, forbid_unknown_fields=True):
    credentials: list[Credential]
    bindings: list[Binding]


class Mutation(Struct, forbid_unknown_fields=True):
    expectedRevision: int | None = None
    credentials: CredentialChanges | None = None
    bindings: BindingChanges | None = None


N = TypeVar("N", Credential, Binding)


class Vault(Struct):
    """As it is kept, in memory only."""

    revision: int
    credentials: dict[str, Credential]
    bindings: dict[str, Binding]
    revisions: dict[str, int] = {}  # in which credentials came


def created(asked: NewVault) -> Vault:
    empty = Vault(revision=0, credentials={}, bindings={})
    return _mutated(empty, CredentialChanges(add=asked.credentials), BindingChanges(add=asked.bindings))


def changed(vault: Vault, asked: Mutation) -> Vault:
    """All of it, or nothing."""
    if asked.expectedRevision not in (None, vault.revision):
        raise Conflict(f"expectedRevision {asked.expectedRevision} does not match current revision {vault.revision}")
    return _mutated(vault, asked.credentials or CredentialChanges(), asked.bindings or BindingChanges())


def secrets_of(vault: Vault | None) -> tuple[Secret, ...]:
    """What the proxy adds for its bindings."""
    if vault is None:
        return ()
    return tuple(
        Secret(domain=_host(host), header=header, value=value)
        for binding in vault.bindings.values()
        for header, value in _headers(binding, vault.credentials)
        for host in binding.match.hosts
    )


def with_vault(policy: NetworkPolicy, before: Vault | None, after: Vault | None) -> NetworkPolicy:
    """`policy` with the secrets of one vault instead of those of another. Raises InvalidRequest.

    What is sent is only sent where a rule allows that host by its name.
    """
    gone = secrets_of(before)
    kept = tuple(each for each in policy.secrets if each not in gone)
    named = tuple(rule for rule in policy.ordered if parse_pattern(rule.host).name != "*")
    useless = useless_secret(NetworkPolicy(rules=named, secrets=secrets_of(after)))
    if useless is not None:
        raise errors.InvalidRequest(
            f"{useless.domain} is not covered by a rule of the network policy that allows it by name: add one first"
        )
    return NetworkPolicy(rules=policy.rules, allow=policy.allow, deny=policy.deny, secrets=(*kept, *secrets_of(after)))


def shown(vault: Vault) -> Json:
    """Never with a value."""
    return {
        "revision": vault.revision,
        "credentials": [
            {"name": name, "sourceType": "inline", "revision": vault.revisions[name]}
            for name in sorted(vault.credentials)
        ],
        "bindings": [_shown_binding(each, vault.revision) for _, each in sorted(vault.bindings.items())],
    }


def _shown_binding(binding: Binding, revision: int) -> Json:
    match = binding.match
    return {
        "name": binding.name,
        "revision": revision,
        "match": {
            "schemes": ["https"],
            "ports": [443],
            "hosts": [_host(host) for host in match.hosts],
            "methods": match.methods or list(METHODS),
            "paths": match.paths or ["/*"],
        },
        "auth": {"type": binding.auth.type, **({"name": binding.auth.name} if binding.auth.type == "apiKey" else {})},
    }


# -- changing


def _mutated(vault: Vault, credentials: CredentialChanges, bindings: BindingChanges) -> Vault:
    new, other = credentials.add or (), credentials.replace or ()
    for each in (*new, *other):
        _check_credential(each)
    kept = _with_changes("credential", vault.credentials, new, other, credentials.delete or ())
    if len(kept) > MAX_SECRETS:
        raise errors.InvalidRequest(f"a credential vault can have {MAX_SECRETS} credentials")
    came = {**vault.revisions, **dict.fromkeys((each.name for each in (*new, *other)), vault.revision + 1)}
    mutated = Vault(
        revision=vault.revision + 1,
        credentials=kept,
        bindings=_with_changes(
            "binding", vault.bindings, bindings.add or (), bindings.replace or (), bindings.delete or ()
        ),
        revisions={name: came[name] for name in kept},
    )
    _check_count(mutated.bindings.values())
    for binding in mutated.bindings.values():
        _check_binding(binding, mutated.credentials)
    _check_overlaps(mutated.bindings.values())
    return mutated


def _with_changes(
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
        if each.name in found or not each.name.strip() or len(each.name) > MAX_NAME:
            raise errors.InvalidRequest(
                f"{kind} {each.name[:100]!r}: give it a name that no other has, of {MAX_NAME} letters at most"
            )
        found[each.name] = each
    return found


# -- checking


def _check_credential(asked: Credential) -> None:
    if asked.source.type != "inline" or not asked.source.value:
        raise errors.InvalidRequest(f"credential {asked.name[:100]!r}: its source is inline, with a value")
    if len(asked.source.value) > MAX_SECRET_BYTES:
        raise errors.InvalidRequest(f"credential {asked.name[:100]!r}: its value is over {MAX_SECRET_BYTES} bytes")


def _check_count(bindings: Iterable[Binding]) -> None:
    """Before each is looked at, and compared with all others."""
    check_counts(0, sum(max(len(each.match.hosts), 1) * max(len(each.auth.headers or ()), 1) for each in bindings))


def _check_binding(binding: Binding, credentials: Mapping[str, Credential]) -> None:
    where, match = f"binding {binding.name[:100]!r}", binding.match
    if not match.hosts:
        raise errors.InvalidRequest(f"{where}: match.hosts cannot be empty")
    if {each.lower() for each in match.schemes or ["https"]} != {"https"}:
        raise Unsupported(f"{where}: match.schemes: credentials are sent over https only")
    if match.ports not in PORTS:
        raise Unsupported(f"{where}: match.ports: credentials go to all ports that the policy allows; leave it out")
    if not set(METHODS) <= {each.upper() for each in match.methods or METHODS}:
        raise Unsupported(f"{where}: match.methods: credentials go with all methods here; leave it out")
    if any(each not in ALL_PATHS for each in match.paths or ()):
        raise Unsupported(f"{where}: match.paths: credentials go with all paths of a host here; leave it out")
    try:
        for header, value in _headers(binding, credentials):
            for host in match.hosts:
                Secret(domain=_host(host), header=header, value=value)
    except errors.InvalidRequest as error:  # its words never have the value
        raise errors.InvalidRequest(f"{where}: {error}") from None


def _check_overlaps(bindings: Iterable[Binding]) -> None:
    """A host that two would match would get the credentials of both."""
    for one, other in combinations(bindings, 2):
        if any(_overlap(_host(host), _host(each)) for host in one.match.hosts for each in other.match.hosts):
            raise errors.InvalidRequest(
                f"bindings {one.name[:100]!r} and {other.name[:100]!r} can match the same request: give one host to one"
            )


def _overlap(one: str, other: str) -> bool:
    below, above = one.removeprefix("*"), other.removeprefix("*")
    wide = (one.startswith("*") and other.endswith(below)) or (other.startswith("*") and one.endswith(above))
    return one == other or wide


def _host(host: str) -> str:
    return host.strip().lower().removesuffix(".")


def _headers(binding: Binding, credentials: Mapping[str, Credential]) -> Iterator[tuple[str, str]]:
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
