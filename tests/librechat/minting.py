"""Tokens as LibreChat mints them (packages/api/src/auth/codeapi.ts), and as nobody should."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Callable
from typing import Any

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, padding, rsa

KEY_ID = "lc-codeapi-2026-05"  # LibreChat's own default
Signer = Callable[[bytes], bytes]


def b64(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def new_ed25519() -> ed25519.Ed25519PrivateKey:
    return ed25519.Ed25519PrivateKey.generate()


def new_rsa(bits: int = 2048) -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=bits)


def pem(key: ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey) -> str:
    form = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return key.public_key().public_bytes(*form).decode()


def private_pem(key: ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey) -> str:
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return key.private_bytes(*form).decode()


def jwk(key: ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey, kid: str = KEY_ID) -> dict[str, str]:
    if isinstance(key, rsa.RSAPrivateKey):
        numbers = key.public_key().public_numbers()
        size = (numbers.n.bit_length() + 7) // 8
        return {"kty": "RSA", "n": b64(numbers.n.to_bytes(size)), "e": b64(numbers.e.to_bytes(3)), "kid": kid}
    return {"kty": "OKP", "crv": "Ed25519", "x": b64(key.public_key().public_bytes_raw()), "kid": kid, "alg": "EdDSA"}


def signer(key: Any) -> tuple[str, Signer]:
    """(alg, how it signs)."""
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return "EdDSA", key.sign
    if isinstance(key, rsa.RSAPrivateKey):
        return "RS256", lambda signed: key.sign(signed, padding.PKCS1v15(), hashes.SHA256())
    return "HS256", lambda signed: hmac.new(key, signed, hashlib.sha256).digest()


def claims(user: str = "6630f2a1c0ffee0123456789", **changed: Any) -> dict[str, Any]:
    """What LibreChat says of a user. A claim that is changed to `...` is left out."""
    now = int(time.time())
    said = {
        "iss": "librechat",
        "aud": "codeapi",
        "sub": user,
        "iat": now,
        "nbf": now,
        "exp": now + 300,
        "jti": "8b4b88d9-0d6f-4f0e-9d7e-111111111111",
        "tenant_id": "legacy",
        "role": "USER",
        "principal_source": "librechat_jwt",
        "auth_context_hash": hashlib.sha256(user.encode()).hexdigest(),
        **changed,
    }
    return {name: value for name, value in said.items() if value is not ...}


def mint(key: Any, said: dict[str, Any] | str | None = None, **header: Any) -> str:
    """A token. `said` and the header can be given as they should not be; a text is taken as it is."""
    alg, sign = signer(key)
    head = {
        name: value for name, value in {"alg": alg, "typ": "JWT", "kid": KEY_ID, **header}.items() if value is not ...
    }
    body = said if isinstance(said, str) else json.dumps(claims() if said is None else said)
    return signed(sign, json.dumps(head), body)


def signed(sign: Signer, head: str, body: str) -> str:
    content = f"{b64(head.encode())}.{b64(body.encode())}"
    return f"{content}.{b64(sign(content.encode()))}"
