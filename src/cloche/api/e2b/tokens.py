"""The secrets of one sandbox, made from the server's own: nothing to store, and the same after a restart."""

from __future__ import annotations

import base64
import hashlib
from functools import lru_cache
from typing import Literal

from cloche.api.tokens import same as same
from cloche.api.tokens import token_of

MAX_KNOWN = 16384

Operation = Literal["read", "write"]


class Tokens:
    """`secret` is the server's, and never leaves it."""

    def __init__(self, secret: bytes):
        self._secret = secret
        self.access = lru_cache(MAX_KNOWN)(self._access)  # asked for each sandbox where a signed URL names none

    def _access(self, sandbox: str) -> str:
        """For envd and the code server: as good as a key, for this one sandbox."""
        return self._made("access", sandbox)

    def traffic(self, sandbox: str) -> str:
        """For the sandbox's ports other than envd's."""
        return self._made("traffic", sandbox)

    def _made(self, purpose: str, sandbox: str) -> str:
        return token_of(self._secret, f"e2b:{purpose}", sandbox)


def signature(path: str, operation: Operation, user: str, token: str, expiration: int | None = None) -> str:
    """E2B's signature of a file URL, version 1. `path` is as it was given, `user` empty where none was."""
    raw = f"{path}:{operation}:{user}:{token}" + ("" if expiration is None else f":{expiration}")
    digest = hashlib.sha256(raw.encode("utf-8", "surrogatepass")).digest()
    return "v1_" + base64.b64encode(digest).rstrip(b"=").decode()
