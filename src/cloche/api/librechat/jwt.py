"""LibreChat's tokens: a JWS in its compact form, each claim of which is checked.

Written here and not taken from a library, since it is small and must be strict: one form, three algorithms, a key that
is for one algorithm only, and nothing of a token's own header that says where a key is to be found.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import time
from collections.abc import Callable
from typing import Any

from cloche import errors
from cloche.api.librechat.jwt_keys import Key, Keys
from cloche.config.librechat import Jwt
from cloche.model import Struct

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
        key_id = _text(header, "kid")
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
        if _text(claims, "iss") != self._settings.issuer:
            raise InvalidToken(
                "its `iss` is not the one that is trusted here: compare CODEAPI_JWT_ISSUER on both sides"
            )
        if self._settings.audience not in _audiences(claims):
            raise InvalidToken("its `aud` is not this server: compare CODEAPI_JWT_AUDIENCE on both sides")
        if _text(claims, "principal_source") not in SOURCES:
            raise InvalidToken("its `principal_source` is not one that is trusted")
        for name in ("jti", "auth_context_hash", *(each for each in ("plan_id",) if each in claims)):
            _text(claims, name)
        return _text(claims, "sub")

    def _tenant(self, claims: dict[str, Any]) -> str:
        if "tenant_id" in claims:
            return _text(claims, "tenant_id")
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


def _text(members: dict[str, Any], name: str) -> str:
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
