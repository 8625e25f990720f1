"""Secrets of one sandbox, made from the server's own: nothing to store, and the same after a restart."""

from __future__ import annotations

import hashlib
import hmac


def token_of(secret: bytes, purpose: str, sandbox: str) -> str:
    """As good as a key, for one purpose and one sandbox. `secret` is the server's, and never leaves it."""
    return hmac.new(secret, f"{purpose}:{sandbox}".encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


def same(given: str | None, wanted: str) -> bool:
    """Compares secrets in constant time."""
    return given is not None and hmac.compare_digest(given.encode("utf-8", "surrogatepass"), wanted.encode())
