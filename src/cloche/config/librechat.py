"""`[librechat]` and `[librechat.jwt]`: limits for LibreChat's users, and the keys that verify their tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated

import msgspec

from cloche import errors
from cloche.config.bounds import KibOrMore, PositiveFloat, PositiveInt, Section

MIB = 1 << 20
JWT_ALGORITHMS = ("EdDSA", "RS256", "HS256")
HS256_KEY_ID = "hs256-dev"  # LibreChat's own name of such a key without a name
MAX_AGE_SECONDS, MAX_SKEW_SECONDS = 300, 30  # of the contract: no token is to be usable for longer
HS256_SECRET_BYTES = 32  # RFC 7518, 3.2: a shorter one can be guessed from one token

CODEAPI_VARIABLES: Mapping[str, str] = {
    "CODEAPI_JWT_JWKS_JSON": "librechat.jwt.jwks",
    "CODEAPI_JWT_PUBLIC_KEYS_DIR": "librechat.jwt.keys_dir",
    "CODEAPI_JWT_PUBLIC_KEY": "librechat.jwt.public_key",
    "CODEAPI_JWT_KEY_ID": "librechat.jwt.key_id",
    "CODEAPI_JWT_KID": "librechat.jwt.key_id",  # comes after the one above, so it wins, as it does there
    "CODEAPI_JWT_HS256_SECRET": "librechat.jwt.hs256_secret",
    "CODEAPI_JWT_HS256_KID": "librechat.jwt.hs256_key_id",
    "CODEAPI_JWT_ALLOWED_ALGS": "librechat.jwt.algorithms",
    "CODEAPI_JWT_ISSUER": "librechat.jwt.issuer",
    "CODEAPI_JWT_AUDIENCE": "librechat.jwt.audience",
    "CODEAPI_JWT_CLOCK_SKEW_SECONDS": "librechat.jwt.skew_seconds",
    "CODEAPI_JWT_MAX_TTL_SECONDS": "librechat.jwt.max_age_seconds",
    "CODEAPI_JWT_SINGLE_TENANT_ID": "librechat.jwt.tenant",
    "CODEAPI_TENANT_ISOLATION_STRICT": "librechat.jwt.strict_tenants",
}
"""Environment variables of LibreChat's own server, and our keys for the same. A `CLOCHE_*` variable wins."""

JWT_SECRET_KEYS = frozenset({"librechat.jwt.hs256_secret", "librechat.jwt.jwks", "librechat.jwt.public_key"})
"""A public key is none, but a private one is pasted in its place too easily."""

JWT_SECRET_VARIABLES = ("CODEAPI_JWT_HS256_SECRET", "CLOCHE_LIBRECHAT_JWT_HS256_SECRET")


def find_codeapi_variables(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(variable, key) of each set variable of LibreChat's own server; empty means unset, there as here."""
    return ((name, key) for name, key in CODEAPI_VARIABLES.items() if environ.get(name, "").strip())


def _check_algorithms(algorithms: tuple[str, ...]) -> None:
    unknown = [name for name in algorithms if name not in JWT_ALGORITHMS]
    if unknown or not algorithms:
        said = f"not {unknown[0][:40]!r}" if unknown else "at least one of them"
        raise errors.InvalidRequest(f"librechat.jwt.algorithms: {', '.join(JWT_ALGORITHMS)} are possible, {said}")


def _check_name(key: str, text: str) -> None:
    if not re.fullmatch(r"[\x21-\x7e]{1,256}", text):
        raise errors.InvalidRequest(f"{key} must be 1 to 256 printable ASCII characters without spaces")


class JwtConfig(Section):
    """Tokens that LibreChat mints for each of its users. They are accepted as soon as a key to check them is given."""

    jwks: str = ""  # a set of public keys: JSON, or the path of such a file
    keys_dir: str = ""  # a directory of public keys, PEM or JWK; a file's name without its ending is the key's id
    public_key: str = ""  # one public key: PEM, JWK, or the path of such a file
    key_id: str = ""  # the id of `public_key`
    hs256_secret: str = ""  # shared with LibreChat; only with "HS256" among `algorithms`
    hs256_key_id: str = ""  # empty: `key_id`, else hs256-dev
    algorithms: tuple[str, ...] = ("EdDSA", "RS256")
    issuer: str = "librechat"
    audience: str = "codeapi"
    tenant: str = "legacy"  # of users with a token that names none
    strict_tenants: bool = False  # whether a token must name its tenant
    owner: str = "librechat"  # of the sandboxes of these users
    # between a token's iat and exp
    max_age_seconds: Annotated[int, msgspec.Meta(ge=1, le=MAX_AGE_SECONDS)] = MAX_AGE_SECONDS
    # by which clocks may differ
    skew_seconds: Annotated[int, msgspec.Meta(ge=0, le=MAX_SKEW_SECONDS)] = MAX_SKEW_SECONDS

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_algorithms(self.algorithms)
        for name in ("issuer", "audience", "tenant", "owner"):
            _check_name(f"librechat.jwt.{name}", getattr(self, name))
        if self.public_key and not self.key_id:
            raise errors.InvalidRequest(
                "librechat.jwt.public_key needs librechat.jwt.key_id, the `kid` of LibreChat's tokens: CODEAPI_JWT_KID "
                "of LibreChat, which is lc-codeapi-2026-05 unless it was set"
            )
        self._check_secret()

    def _check_secret(self) -> None:
        listed = "HS256" in self.algorithms
        if listed and not self.hs256_secret:
            raise errors.InvalidRequest(
                "librechat.jwt.algorithms has HS256, which needs librechat.jwt.hs256_secret: give it, or remove HS256"
            )
        if self.hs256_secret and not listed:
            raise errors.InvalidRequest(
                "librechat.jwt.hs256_secret is used only with HS256 in librechat.jwt.algorithms "
                "(CODEAPI_JWT_ALLOWED_ALGS): add it there, or remove the secret"
            )
        if self.hs256_secret and len(self.hs256_secret.encode()) < HS256_SECRET_BYTES:
            raise errors.InvalidRequest(
                f"librechat.jwt.hs256_secret must have {HS256_SECRET_BYTES} bytes or more: a shorter one can be "
                "guessed. `openssl rand -hex 32` makes one"
            )

    @property
    def enabled(self) -> bool:
        """Whether there is a key to check tokens with."""
        return bool(self.jwks or self.keys_dir or self.public_key or self.hs256_secret)


class LibreChatConfig(Section):
    """Limits for one LibreChat, or for each of its users."""

    template: str = "python"
    python_state: bool = False  # whether Python variables last in a session, as its files do
    timeout_seconds: PositiveFloat = 120.0  # of a program without a limit in its request
    max_timeout_seconds: PositiveFloat = 300.0  # that a caller may ask for
    output_bytes: KibOrMore = 1 * MIB  # of stdout, and of stderr, that a caller gets: head and tail
    file_bytes: PositiveInt = 150 * MIB  # of one file that is uploaded or made
    max_files: PositiveInt = 200  # of one upload, of one program's inputs, and of its outputs
    files_hours: PositiveFloat = 24.0  # that a file is kept after its last use
    session_idle_minutes: PositiveFloat = 35.0  # after which a session's sandbox ends; its files are kept as others are
    # of one user; 0: no limit
    exec_per_minute: Annotated[int, msgspec.Meta(ge=0, description="0 (no limit) or more")] = 0
    max_tools: PositiveInt = 100  # that a program can call
    max_tool_calls: PositiveInt = 200  # of one program
    tool_wait_seconds: PositiveFloat = 600.0  # for a client to answer a program's calls
    jwt: JwtConfig = JwtConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.template:
            raise errors.InvalidRequest("librechat.template must name a template: `cloche template list` shows them")
        if self.timeout_seconds > self.max_timeout_seconds:
            raise errors.InvalidRequest(
                f"librechat.timeout_seconds = {self.timeout_seconds:g} is over librechat.max_timeout_seconds = "
                f"{self.max_timeout_seconds:g}: lower the one, or raise the other"
            )
