"""LibreChat's tokens: a JWS in its compact form, each claim of which is checked.

Written here and not taken from a library, since it is small and must be strict: one form, three algorithms, a key that
is for one algorithm only, and nothing of a token's own header that says where a key is to be found.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cloche import errors
from cloche.config.librechat import HS256_KEY_ID, Jwt
from cloche.model import Struct
from cloche.telemetry import log

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes

# The keys that LibreChat's tokens are checked with. Files of them are read again when they change.

CHECK_SECONDS = 2.0  # how soon a key that was added, replaced or removed is noticed
MAX_FILE_BYTES = 256 * 1024
MAX_KEYS = 256
MIN_RSA_BITS = 2048

_DER = re.compile(r"M[A-Za-z0-9+/\s]{40,}={0,2}")  # every public key begins like that, as base64 of DER
_KEY_ID = re.compile(r"[\x21-\x7e]{1,256}")


class Key(NamedTuple):
    """A key and the one algorithm that it is for: a public key must never be taken for an HMAC secret."""

    algorithm: str
    accepts: Callable[[bytes, bytes], bool]  # (signature, what was signed)


class Problem(Exception):
    """A key that cannot be used, in words that repeat nothing of it."""


class Keys:
    """Those that are valid now. A file that becomes unreadable takes its keys with it, and nobody else's.

    Raises InvalidConfig if any of them cannot be used at the start, or if there are none.
    """

    def __init__(self, settings: Jwt, clock: Callable[[], float] = time.monotonic):
        self._settings = settings
        self._clock = clock
        self._seen = _fingerprint(settings)
        self._checked = clock()
        self._keys, problems = _read(settings)
        self._check(problems)

    def _check(self, problems: list[str]) -> None:
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

    def find(self, key_id: str) -> Key | None:
        if self._clock() - self._checked >= CHECK_SECONDS:
            self._refresh()
        return self._keys.get(key_id)

    def _refresh(self) -> None:
        self._checked = self._clock()
        seen = _fingerprint(self._settings)
        if seen == self._seen:
            return
        self._seen = seen
        self._keys, problems = _read(self._settings)
        log.info("librechat.keys_read", keys=len(self._keys))
        for problem in problems:
            log.warning("librechat.key_unusable", why=problem)


def is_text(value: str) -> bool:
    """Whether a setting is a key itself, or a set of them; else it is the path of one."""
    text = value.strip()
    return text.startswith(("{", "-----BEGIN")) or bool(_DER.fullmatch(text))


def _fingerprint(settings: Jwt) -> tuple[Any, ...]:
    """What changes when one of the files does."""
    named = [_path(each) for each in (settings.jwks, settings.public_key) if each and not is_text(each)]
    try:
        return tuple(_state(path) for path in (*named, *_files_of(settings.keys_dir)))
    except Problem as problem:
        return (str(problem),)


def _state(path: Path) -> tuple[Any, ...]:
    try:
        found = path.stat()
    except (OSError, ValueError) as error:  # a NUL is the latter
        return (path, str(error))
    return (path, found.st_ino, found.st_size, found.st_mtime_ns)


def _read(settings: Jwt) -> tuple[dict[str, Key], list[str]]:
    """The keys by their ids, and what is wrong with those that are left out."""
    reading = _Reading()
    if settings.jwks:
        reading.take("jwks", lambda: _from_jwks(settings.jwks))
    if settings.keys_dir:
        reading.take_directory(settings.keys_dir)
    if settings.public_key:
        reading.take("public_key", lambda: [(settings.key_id, _of_text(_unescape_pem(settings.public_key)))])
    if settings.hs256_secret:
        reading.take("hs256_secret", lambda: [_from_secret(settings)])
    return reading.keys, reading.problems


class _Reading:
    """What was read so far. One source that cannot be used does not spoil the others."""

    def __init__(self) -> None:
        self.keys: dict[str, Key] = {}
        self.problems: list[str] = []

    def take(self, setting: str, produce: Callable[[], Iterable[tuple[str, Key]]]) -> None:
        try:
            for key_id, key in produce():
                self._add(key_id, key)
        except Problem as problem:
            self.problems.append(f"librechat.jwt.{setting}: {problem}")

    def take_directory(self, directory: str) -> None:
        try:
            files = _files_of(directory)
        except Problem as problem:
            self.problems.append(f"librechat.jwt.keys_dir: {problem}")
            return
        for path in files:
            self.take("keys_dir", partial(_from_file, path))

    def _add(self, key_id: str, key: Key) -> None:
        if not _KEY_ID.fullmatch(key_id):
            raise Problem("the id of a key must be 1 to 256 printable ASCII characters without spaces")
        if key_id in self.keys:
            raise Problem(f"there are two keys with the id {key_id!r}: give each its own")
        if len(self.keys) == MAX_KEYS:
            raise Problem(f"there are more than {MAX_KEYS} keys")
        self.keys[key_id] = key


# --- where keys come from


def _from_jwks(setting: str) -> Iterator[tuple[str, Key]]:
    """Keys without an id, of other kinds and for other uses are left out, as RFC 7517 (5) wants it."""
    try:
        listed = json.loads(_unescape_pem(setting))
    except (ValueError, RecursionError):
        raise Problem("it is not JSON") from None
    found = listed.get("keys") if isinstance(listed, dict) else None
    if not isinstance(found, list):
        raise Problem('it must be a set of keys, {"keys": [...]}')
    for jwk in found:
        if isinstance(jwk, dict) and isinstance(jwk.get("kid"), str) and _is_for_tokens(jwk):
            yield jwk["kid"], _of_jwk(jwk)


def _from_file(path: Path) -> Iterator[tuple[str, Key]]:
    try:
        yield path.stem, _of_text(_contents(path))
    except Problem as problem:
        raise Problem(f"{path.name}: {problem}") from None


def _from_secret(settings: Jwt) -> tuple[str, Key]:
    secret = settings.hs256_secret.encode()

    def accepts(signature: bytes, signed: bytes) -> bool:
        return hmac.compare_digest(hmac.new(secret, signed, hashlib.sha256).digest(), signature)

    return settings.hs256_key_id or settings.key_id or HS256_KEY_ID, Key("HS256", accepts)


def _files_of(directory: str) -> list[Path]:
    """Its files, but not those that begin with a dot: editors' leftovers, and how Kubernetes mounts secrets."""
    if not directory:
        return []
    try:
        with os.scandir(_path(directory)) as entries:
            files = [Path(entry.path) for entry in entries if entry.name[0] != "." and entry.is_file()]
    except (OSError, ValueError) as error:
        raise Problem(f"{directory!r} cannot be read as a directory: {error}") from None
    return sorted(files)[: MAX_KEYS + 1]


def _unescape_pem(value: str) -> str:
    """Variables hold PEM with its ends of lines written as `\\n`."""
    return value.replace("\\n", "\n") if is_text(value) else _contents(_path(value))


def _path(written: str) -> Path:
    return Path(os.path.expanduser(written))  # unlike Path.expanduser, it takes any text


def _contents(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise Problem(f"it is no key, and cannot be read as a file: {error.strerror}") from None
    except ValueError:  # a NUL
        raise Problem("it is neither a key nor the path of one") from None
    if len(content) > MAX_FILE_BYTES:
        raise Problem(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise Problem(f"{path} is not text: PEM or JSON is needed") from None


# --- what a key is


def _is_for_tokens(jwk: dict[str, Any]) -> bool:
    kind = (jwk.get("kty"), jwk.get("crv"))
    return (kind == ("OKP", "Ed25519") or kind[0] == "RSA") and jwk.get("use", "sig") == "sig"


def _of_text(text: str) -> Key:
    stripped = text.strip()
    if stripped.startswith("{"):
        try:
            jwk = json.loads(stripped)
        except (ValueError, RecursionError):
            raise Problem("it is not JSON") from None
        return _of_jwk(jwk)
    return _of_public_key(_parsed(stripped))


def _parsed(text: str) -> PublicKeyTypes:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    if "PRIVATE KEY-----" in text:
        raise Problem("it is a private key, which only LibreChat should have: give its public key")
    try:
        if "-----BEGIN" in text:
            return serialization.load_pem_public_key(text.encode())
        return serialization.load_der_public_key(base64.b64decode("".join(text.split()), validate=True))
    except (ValueError, UnsupportedAlgorithm):
        raise Problem("it is no public key: PEM (-----BEGIN PUBLIC KEY-----) or JWK is needed") from None


def _of_jwk(jwk: dict[str, Any]) -> Key:
    from cryptography.hazmat.primitives.asymmetric import ed25519, rsa

    if "d" in jwk:
        raise Problem("it has a private key (`d`), which only LibreChat should have: give its public key")
    if not _is_for_tokens(jwk):
        raise Problem("a JWK must be for signatures, with kty OKP and crv Ed25519, or with kty RSA")
    try:
        if jwk["kty"] == "RSA":
            numbers = rsa.RSAPublicNumbers(*(int.from_bytes(_member(jwk, name)) for name in "en"))
            key = _of_public_key(numbers.public_key())
        else:
            key = _of_public_key(ed25519.Ed25519PublicKey.from_public_bytes(_member(jwk, "x")))
    except ValueError:
        raise Problem("the numbers of a JWK are no key") from None
    if jwk.get("alg", key.algorithm) != key.algorithm:
        raise Problem(f"a JWK of this kind is for {key.algorithm}, which its `alg` does not say")
    return key


def _member(jwk: dict[str, Any], name: str) -> bytes:
    value = jwk.get(name)
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9_-]+", value):
        raise Problem(f"a JWK needs `{name}`, in base64url")
    try:
        return base64.urlsafe_b64decode(value + "=" * (-len(value) % 4))
    except binascii.Error:
        raise Problem(f"a JWK needs `{name}`, in base64url") from None


def _of_public_key(key: PublicKeyTypes) -> Key:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ed25519, padding, rsa

    if isinstance(key, rsa.RSAPublicKey) and key.key_size < MIN_RSA_BITS:
        raise Problem(f"an RSA key needs {MIN_RSA_BITS} bits or more, not {key.key_size}")

    def accepts(signature: bytes, signed: bytes) -> bool:
        try:
            if isinstance(key, rsa.RSAPublicKey):
                key.verify(signature, signed, padding.PKCS1v15(), hashes.SHA256())
            elif isinstance(key, ed25519.Ed25519PublicKey):
                key.verify(signature, signed)
        except InvalidSignature:
            return False
        return True

    if isinstance(key, ed25519.Ed25519PublicKey):
        return Key("EdDSA", accepts)
    if isinstance(key, rsa.RSAPublicKey):
        return Key("RS256", accepts)
    raise Problem("its kind is not Ed25519 (EdDSA) and not RSA (RS256), which are those that LibreChat signs with")


MAX_TOKEN_BYTES = 16 * 1024
MAX_NAME = 256  # characters of a user, a tenant, an id
SOURCES = frozenset({"librechat_jwt", "openid_reuse"})

_BASE64URL = re.compile(r"[A-Za-z0-9_-]+")
_FARTHEST_SECONDS = 1e12  # numbers beyond are no dates, and not worth calculating with


class InvalidToken(errors.Unauthenticated):
    """The message says why, and repeats nothing of the token."""


class Holder(Struct):
    """Who a token was minted for, and the key that says so."""

    user: str
    tenant: str
    key_id: str


class Verifier:
    """Says who holds a token."""

    def __init__(self, settings: Jwt, keys: Keys, clock: Callable[[], float] = time.time):
        self._settings = settings
        self._keys = keys
        self._clock = clock

    def verify(self, token: str) -> Holder:
        """Raises InvalidToken. What it claims is looked at only once its signature is known to be good."""
        parts = token.split(".")
        if len(token) > MAX_TOKEN_BYTES or len(parts) != 3:
            raise InvalidToken("it is no compact JWS of three parts, or too long for one")
        header, signature = _object(parts[0]), _decoded(parts[2])
        key_id = _text_claim(header, "kid")
        if not self._key(header, key_id).accepts(signature, f"{parts[0]}.{parts[1]}".encode()):
            raise InvalidToken("its signature is wrong")
        claims = _object(parts[1])
        self._check_times(claims)
        return Holder(user=self._user(claims), tenant=self._tenant(claims), key_id=key_id)

    def _key(self, header: dict[str, Any], key_id: str) -> Key:
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
        issued, begins, ends = (_seconds(claims, name) for name in ("iat", "nbf", "exp"))
        now, skew = self._clock(), self._settings.skew_seconds
        if ends <= now - skew:
            raise InvalidToken("it has expired: compare the clocks of LibreChat and of this server")
        if begins > now + skew or issued > now + skew:
            raise InvalidToken("it is not valid yet: compare the clocks of LibreChat and of this server")
        if not 0 < ends - issued <= self._settings.max_age_seconds:
            raise InvalidToken(f"between its `iat` and `exp` must be 1 to {self._settings.max_age_seconds} seconds")

    def _user(self, claims: dict[str, Any]) -> str:
        if _text_claim(claims, "iss") != self._settings.issuer:
            raise InvalidToken(
                "its `iss` is not the one that is trusted here: compare CODEAPI_JWT_ISSUER on both sides"
            )
        if self._settings.audience not in _audiences(claims):
            raise InvalidToken("its `aud` is not this server: compare CODEAPI_JWT_AUDIENCE on both sides")
        if _text_claim(claims, "principal_source") not in SOURCES:
            raise InvalidToken("its `principal_source` is not one that is trusted")
        for name in ("jti", "auth_context_hash", *(each for each in ("plan_id",) if each in claims)):
            _text_claim(claims, name)
        return _text_claim(claims, "sub")

    def _tenant(self, claims: dict[str, Any]) -> str:
        if "tenant_id" in claims:
            return _text_claim(claims, "tenant_id")
        if self._settings.strict_tenants:
            raise InvalidToken("it has no `tenant_id`, which librechat.jwt.strict_tenants wants")
        return self._settings.tenant


def _decoded(part: str) -> bytes:
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


def _object(part: str) -> dict[str, Any]:
    try:
        found = json.loads(_decoded(part).decode(), object_pairs_hook=_once_each)
    except (ValueError, RecursionError):
        raise InvalidToken("a part of it is not JSON with each member once") from None
    if not isinstance(found, dict):
        raise InvalidToken("a part of it is no JSON object")
    return found


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of two members with one name, one reader takes the first and another the last: so there can be none."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a member is there twice")
    return found


def _text_claim(members: dict[str, Any], name: str) -> str:
    """It can be part of names and of records of ours: so it is bounded, and has nothing in it that is not seen."""
    value = members.get(name)
    if (
        not isinstance(value, str)
        or not 0 < len(value) <= MAX_NAME
        or not value.isprintable()
        or value != value.strip()
    ):
        raise InvalidToken(f"`{name}` must be there, and be a text of 1 to {MAX_NAME} characters")
    return value


def _seconds(claims: dict[str, Any], name: str) -> float:
    value = claims.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < _FARTHEST_SECONDS:
        raise InvalidToken(f"`{name}` must be there, and be a number of seconds since 1970")
    return value


def _audiences(claims: dict[str, Any]) -> list[str]:
    named = claims.get("aud")
    listed = [named] if isinstance(named, str) else named
    if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
        raise InvalidToken("`aud` must be there, and be a text or a list of texts")
    return listed
