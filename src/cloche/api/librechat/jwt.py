"""LibreChat's tokens: a JWS in its compact form, each claim of which is checked.

PyJWT verifies the signatures and reads JWKs; it is imported where a key is read, since a server without keys does
not need it. The policy is ours and stricter than PyJWT's: each key for one algorithm, base64url in one form only (no
padding), no repeated JSON member, no `crit`, no key locations from the token's own header, every claim bounded, and
times compared as they are written (PyJWT drops fractions of a second and reads the system's clock only).
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cloche import errors
from cloche.config.librechat import HS256_KEY_ID, JwtConfig
from cloche.model import Struct
from cloche.telemetry import log

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes

# The keys that verify LibreChat's tokens. Key files are read again when they change.

KEY_CHECK_SECONDS = 2.0  # how soon a key that was added, replaced or removed is noticed
MAX_KEY_FILE_BYTES = 256 * 1024
MAX_JWT_KEYS = 256
MIN_RSA_BITS = 2048

_DER = re.compile(r"M[A-Za-z0-9+/\s]{40,}={0,2}")  # every public key begins like that, as base64 of DER
_BASE64URL = re.compile(r"[A-Za-z0-9_-]+")
_KEY_ID = re.compile(r"[\x21-\x7e]{1,256}")


class JwtKey(NamedTuple):
    """A key and the one algorithm that it is for: a public key must never be taken for an HMAC secret."""

    algorithm: str
    accepts: Callable[[bytes, bytes], bool]  # (signature, what was signed)


class UnusableKey(Exception):
    """A key that cannot be used. The message repeats nothing of the key."""


class JwtKeys:
    """The keys that are valid now. A file that becomes unreadable loses its own keys only.

    Raises InvalidConfig if any of them cannot be used at the start, or if there are none.
    """

    def __init__(self, settings: JwtConfig, clock: Callable[[], float] = time.monotonic):
        self._settings = settings
        self._clock = clock
        self._seen = _files_fingerprint(settings)
        self._checked = clock()
        self._keys, problems = _read_keys(settings)
        self._check_usable(problems)

    def _check_usable(self, problems: list[str]) -> None:
        if problems:
            raise errors.InvalidConfig(problems[0])
        if not self._keys:
            raise errors.InvalidConfig(
                "[librechat.jwt] has no key with an id: each key of librechat.jwt.jwks needs a `kid`, and a file in "
                "librechat.jwt.keys_dir is named by it"
            )
        kinds = sorted({key.algorithm for key in self._keys.values()})
        if not set(kinds) & set(self._settings.algorithms):
            raise errors.InvalidConfig(
                f"librechat.jwt.algorithms has none that a key is for: the keys are for {' and '.join(kinds)}"
            )

    @property
    def ids(self) -> list[str]:
        return sorted(self._keys)

    def find(self, key_id: str) -> JwtKey | None:
        if self._clock() - self._checked >= KEY_CHECK_SECONDS:
            self._reload_changed()
        return self._keys.get(key_id)

    def _reload_changed(self) -> None:
        self._checked = self._clock()
        seen = _files_fingerprint(self._settings)
        if seen == self._seen:
            return
        self._seen = seen
        self._keys, problems = _read_keys(self._settings)
        log.info("librechat.keys_read", keys=len(self._keys))
        for problem in problems:
            log.warning("librechat.key_unusable", why=problem)


def is_inline_key(value: str) -> bool:
    """Whether a setting is a key itself, or a set of keys; otherwise it is a path."""
    text = value.strip()
    return text.startswith(("{", "-----BEGIN")) or bool(_DER.fullmatch(text))


def _files_fingerprint(settings: JwtConfig) -> tuple[Any, ...]:
    """A value that changes when one of the key files does."""
    named = [_expand_path(each) for each in (settings.jwks, settings.public_key) if each and not is_inline_key(each)]
    try:
        return tuple(_file_state(path) for path in (*named, *_key_files(settings.keys_dir)))
    except UnusableKey as problem:
        return (str(problem),)


def _file_state(path: Path) -> tuple[Any, ...]:
    try:
        found = path.stat()
    except (OSError, ValueError) as error:  # a NUL is the latter
        return (path, str(error))
    return (path, found.st_ino, found.st_size, found.st_mtime_ns)


def _read_keys(settings: JwtConfig) -> tuple[dict[str, JwtKey], list[str]]:
    """Returns the keys by their ids, and the problems of the keys that were left out."""
    reading = _JwtKeyReader()
    if settings.jwks:
        reading.take("jwks", lambda: _keys_from_jwks(settings.jwks))
    if settings.keys_dir:
        reading.read_directory(settings.keys_dir)
    if settings.public_key:
        reading.take("public_key", lambda: [(settings.key_id, _key_from_text(_key_text(settings.public_key)))])
    if settings.hs256_secret:
        reading.take("hs256_secret", lambda: [_key_from_secret(settings)])
    return reading.keys, reading.problems


class _JwtKeyReader:
    """The keys and problems found so far. An unusable source does not affect the others."""

    def __init__(self) -> None:
        self.keys: dict[str, JwtKey] = {}
        self.problems: list[str] = []

    def take(self, setting: str, produce: Callable[[], Iterable[tuple[str, JwtKey]]]) -> None:
        try:
            for key_id, key in produce():
                self._add_key(key_id, key)
        except UnusableKey as problem:
            self.problems.append(f"librechat.jwt.{setting}: {problem}")

    def read_directory(self, directory: str) -> None:
        try:
            files = _key_files(directory)
        except UnusableKey as problem:
            self.problems.append(f"librechat.jwt.keys_dir: {problem}")
            return
        for path in files:
            self.take("keys_dir", partial(_keys_from_file, path))

    def _add_key(self, key_id: str, key: JwtKey) -> None:
        if not _KEY_ID.fullmatch(key_id):
            raise UnusableKey("the id of a key must be 1 to 256 printable ASCII characters without spaces")
        if key_id in self.keys:
            raise UnusableKey(f"there are two keys with the id {key_id!r}: give each its own")
        if len(self.keys) == MAX_JWT_KEYS:
            raise UnusableKey(f"there are more than {MAX_JWT_KEYS} keys")
        self.keys[key_id] = key


# --- where keys come from


def _keys_from_jwks(setting: str) -> Iterator[tuple[str, JwtKey]]:
    """Keys without an id, of other kinds and for other uses are left out, as RFC 7517 (5) wants it."""
    try:
        listed = json.loads(_key_text(setting))
    except (ValueError, RecursionError):
        raise UnusableKey("it is not JSON") from None
    found = listed.get("keys") if isinstance(listed, dict) else None
    if not isinstance(found, list):
        raise UnusableKey('it must be a set of keys, {"keys": [...]}')
    for jwk in found:
        if isinstance(jwk, dict) and isinstance(jwk.get("kid"), str) and _is_for_tokens(jwk):
            yield jwk["kid"], _key_from_jwk(jwk)


def _keys_from_file(path: Path) -> Iterator[tuple[str, JwtKey]]:
    try:
        yield path.stem, _key_from_text(_read_file(path))
    except UnusableKey as problem:
        raise UnusableKey(f"{path.name}: {problem}") from None


def _key_from_secret(settings: JwtConfig) -> tuple[str, JwtKey]:
    key_id = settings.hs256_key_id or settings.key_id or HS256_KEY_ID
    return key_id, _key_for("HS256", settings.hs256_secret.encode())


def _key_files(directory: str) -> list[Path]:
    """The files of a directory, without dot files: editors' leftovers, and Kubernetes' mounts of secrets."""
    if not directory:
        return []
    try:
        with os.scandir(_expand_path(directory)) as entries:
            files = [Path(entry.path) for entry in entries if entry.name[0] != "." and entry.is_file()]
    except (OSError, ValueError) as error:
        raise UnusableKey(f"{directory!r} cannot be read as a directory: {error}") from None
    return sorted(files)[: MAX_JWT_KEYS + 1]


def _key_text(value: str) -> str:
    """The key itself. Environment variables hold PEM with line ends written as a backslash and an n."""
    return value.replace("\\n", "\n") if is_inline_key(value) else _read_file(_expand_path(value))


def _expand_path(written: str) -> Path:
    return Path(os.path.expanduser(written))  # unlike Path.expanduser, it takes any text


def _read_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_KEY_FILE_BYTES + 1)
    except OSError as error:
        raise UnusableKey(f"it is no key, and cannot be read as a file: {error.strerror}") from None
    except ValueError:  # a NUL
        raise UnusableKey("it is neither a key nor the path of one") from None
    if len(content) > MAX_KEY_FILE_BYTES:
        raise UnusableKey(f"{path} is larger than {MAX_KEY_FILE_BYTES} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise UnusableKey(f"{path} is not text: PEM or JSON is needed") from None


# --- what a key is


def _is_for_tokens(jwk: dict[str, Any]) -> bool:
    kind = (jwk.get("kty"), jwk.get("crv"))
    return (kind == ("OKP", "Ed25519") or kind[0] == "RSA") and jwk.get("use", "sig") == "sig"


def _key_from_text(text: str) -> JwtKey:
    stripped = text.strip()
    if stripped.startswith("{"):
        try:
            jwk = json.loads(stripped)
        except (ValueError, RecursionError):
            raise UnusableKey("it is not JSON") from None
        return _key_from_jwk(jwk)
    return _key_from_public(_parse_public_key(stripped))


def _parse_public_key(text: str) -> PublicKeyTypes:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    if "PRIVATE KEY-----" in text:
        raise UnusableKey("it is a private key, which only LibreChat should have: give its public key")
    try:
        if "-----BEGIN" in text:
            return serialization.load_pem_public_key(text.encode())
        return serialization.load_der_public_key(base64.b64decode("".join(text.split()), validate=True))
    except (ValueError, UnsupportedAlgorithm):
        raise UnusableKey("it is no public key: PEM (-----BEGIN PUBLIC KEY-----) or JWK is needed") from None


def _key_from_jwk(jwk: dict[str, Any]) -> JwtKey:
    if "d" in jwk:
        raise UnusableKey("it has a private key (`d`), which only LibreChat should have: give its public key")
    if not _is_for_tokens(jwk):
        raise UnusableKey("a JWK must be for signatures, with kty OKP and crv Ed25519, or with kty RSA")
    key = _key_from_public(_parse_jwk(jwk))
    if jwk.get("alg", key.algorithm) != key.algorithm:
        raise UnusableKey(f"a JWK of this kind is for {key.algorithm}, which its `alg` does not say")
    return key


def _parse_jwk(jwk: dict[str, Any]) -> PublicKeyTypes:
    import jwt

    for name in "en" if jwk["kty"] == "RSA" else "x":  # PyJWT skips characters that are not base64url
        if not isinstance(jwk.get(name), str) or not _BASE64URL.fullmatch(jwk[name]) or len(jwk[name]) % 4 == 1:
            raise UnusableKey(f"a JWK needs `{name}`, in base64url")
    try:
        key: PublicKeyTypes = jwt.PyJWK(jwk, "RS256" if jwk["kty"] == "RSA" else "EdDSA").key
    except jwt.PyJWTError:
        raise UnusableKey("the numbers of a JWK are no key") from None
    return key


def _key_from_public(key: PublicKeyTypes) -> JwtKey:
    from cryptography.hazmat.primitives.asymmetric import ed25519, rsa

    if isinstance(key, ed25519.Ed25519PublicKey):
        return _key_for("EdDSA", key)
    if not isinstance(key, rsa.RSAPublicKey):
        raise UnusableKey(
            "its kind is not Ed25519 (EdDSA) and not RSA (RS256), which are those that LibreChat signs with"
        )
    if key.key_size < MIN_RSA_BITS:
        raise UnusableKey(f"an RSA key needs {MIN_RSA_BITS} bits or more, not {key.key_size}")
    return _key_for("RS256", key)


def _key_for(algorithm: str, key: PublicKeyTypes | bytes) -> JwtKey:
    import jwt

    verifier = jwt.get_algorithm_by_name(algorithm)
    try:
        prepared = verifier.prepare_key(key)
    except jwt.InvalidKeyError:  # of an HMAC secret: that it is a PEM, DER, SSH or JSON Web key
        raise UnusableKey("it is a key of another kind, and not a shared secret") from None
    return JwtKey(algorithm, lambda signature, signed: verifier.verify(signed, prepared, signature))


MAX_TOKEN_BYTES = 16 * 1024
MAX_CLAIM_CHARACTERS = 256  # characters of a user, a tenant, an id
PRINCIPAL_SOURCES = frozenset({"librechat_jwt", "openid_reuse"})

_FARTHEST_SECONDS = 1e12  # numbers beyond are no dates, and not worth calculating with


class InvalidToken(errors.Unauthenticated):
    """The message gives the reason, and repeats nothing of the token."""


class TokenHolder(Struct):
    """The user and tenant that a token was signed for, and the id of the signing key."""

    user: str
    tenant: str
    key_id: str


class JwtVerifier:
    """Verifies tokens and returns their holders."""

    def __init__(self, settings: JwtConfig, keys: JwtKeys, clock: Callable[[], float] = time.time):
        self._settings = settings
        self._keys = keys
        self._clock = clock

    def verify(self, token: str) -> TokenHolder:
        """Raises InvalidToken. Claims are read only after the signature was verified."""
        parts = token.split(".")
        if len(token) > MAX_TOKEN_BYTES or len(parts) != 3:
            raise InvalidToken("it is no compact JWS of three parts, or too long for one")
        header, signature = _decode_object(parts[0]), _decode_base64url(parts[2])
        key_id = _text_claim(header, "kid")
        if not self._signing_key(header, key_id).accepts(signature, f"{parts[0]}.{parts[1]}".encode()):
            raise InvalidToken("its signature is wrong")
        claims = _decode_object(parts[1])
        self._check_times(claims)
        return TokenHolder(user=self._token_user(claims), tenant=self._token_tenant(claims), key_id=key_id)

    def _signing_key(self, header: dict[str, Any], key_id: str) -> JwtKey:
        if "crit" in header or header.get("typ", "JWT") != "JWT":
            raise InvalidToken("its header has `crit`, or a `typ` that is not JWT")
        if header.get("alg") not in self._settings.algorithms:
            raise InvalidToken("its `alg` is not one that is allowed here")
        key = self._keys.find(key_id)
        if key is None:
            raise InvalidToken("its `kid` is that of no key here: compare CODEAPI_JWT_KID on both sides")
        if key.algorithm != header["alg"]:
            raise InvalidToken("its `alg` is not that of the key with its `kid`")
        return key

    def _check_times(self, claims: dict[str, Any]) -> None:
        issued, begins, ends = (_time_claim(claims, name) for name in ("iat", "nbf", "exp"))
        now, skew = self._clock(), self._settings.skew_seconds
        if ends <= now - skew:
            raise InvalidToken("it has expired: compare the clocks of LibreChat and of this server")
        if begins > now + skew or issued > now + skew:
            raise InvalidToken("it is not valid yet: compare the clocks of LibreChat and of this server")
        if not 0 < ends - issued <= self._settings.max_age_seconds:
            raise InvalidToken(f"between its `iat` and `exp` must be 1 to {self._settings.max_age_seconds} seconds")

    def _token_user(self, claims: dict[str, Any]) -> str:
        if _text_claim(claims, "iss") != self._settings.issuer:
            raise InvalidToken(
                "its `iss` is not the one that is trusted here: compare CODEAPI_JWT_ISSUER on both sides"
            )
        if self._settings.audience not in _audience_claim(claims):
            raise InvalidToken("its `aud` is not this server: compare CODEAPI_JWT_AUDIENCE on both sides")
        if _text_claim(claims, "principal_source") not in PRINCIPAL_SOURCES:
            raise InvalidToken("its `principal_source` is not one that is trusted")
        for name in ("jti", "auth_context_hash", *(each for each in ("plan_id",) if each in claims)):
            _text_claim(claims, name)
        return _text_claim(claims, "sub")

    def _token_tenant(self, claims: dict[str, Any]) -> str:
        if "tenant_id" in claims:
            return _text_claim(claims, "tenant_id")
        if self._settings.strict_tenants:
            raise InvalidToken("it has no `tenant_id`, which librechat.jwt.strict_tenants wants")
        return self._settings.tenant


def _decode_base64url(part: str) -> bytes:
    """base64url as RFC 7515 has it: without padding, and each text one way to write it."""
    if not _BASE64URL.fullmatch(part):
        raise InvalidToken("a part of it is not base64url")
    try:
        content = base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))
    except binascii.Error:
        raise InvalidToken("a part of it is not base64url") from None
    if base64.urlsafe_b64encode(content).rstrip(b"=") != part.encode():
        raise InvalidToken("a part of it is not base64url as it is written")
    return content


def _decode_object(part: str) -> dict[str, Any]:
    try:
        found = json.loads(_decode_base64url(part).decode(), object_pairs_hook=_reject_duplicates)
    except (ValueError, RecursionError):
        raise InvalidToken("a part of it is not JSON with each member once") from None
    if not isinstance(found, dict):
        raise InvalidToken("a part of it is no JSON object")
    return found


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError for a repeated member name: readers disagree on which of the two counts."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a member is there twice")
    return found


def _text_claim(members: dict[str, Any], name: str) -> str:
    """Returns a text claim. It becomes part of names and records: so it is bounded, and printable."""
    value = members.get(name)
    if (
        not isinstance(value, str)
        or not 0 < len(value) <= MAX_CLAIM_CHARACTERS
        or not value.isprintable()
        or value != value.strip()
    ):
        raise InvalidToken(f"`{name}` must be there, and be a text of 1 to {MAX_CLAIM_CHARACTERS} characters")
    return value


def _time_claim(claims: dict[str, Any], name: str) -> float:
    value = claims.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < _FARTHEST_SECONDS:
        raise InvalidToken(f"`{name}` must be there, and be a number of seconds since 1970")
    return value


def _audience_claim(claims: dict[str, Any]) -> list[str]:
    named = claims.get("aud")
    listed = [named] if isinstance(named, str) else named
    if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
        raise InvalidToken("`aud` must be there, and be a text or a list of texts")
    return listed
