"""The secrets of one sandbox, made from the server's own: nothing to store, and the same after a restart."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import lru_cache
from typing import Literal

from cloche.api.auth import same as same
from cloche.api.auth import token_of

MAX_KNOWN = 16384
_VERSION = "v1_"
_SIGNATURE = re.compile("v1_[A-Za-z0-9+/]{43}")

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


class Signed:
    """What is signed in a file URL, by whichever token. `path` is as it was given, `user` empty where none was."""

    def __init__(self, path: str, operation: Operation, user: str, expiration: int | None = None):
        begin = f"{path}:{operation}:{user}:"  # a path may be long, and is read once for all tokens
        self._begun = hashlib.sha256(begin.encode("utf-8", "surrogatepass"))
        self._end = "" if expiration is None else f":{expiration}"

    def digest(self, token: str) -> bytes:
        whole = self._begun.copy()
        whole.update(f"{token}{self._end}".encode())
        return whole.digest()


def signature(path: str, operation: Operation, user: str, token: str, expiration: int | None = None) -> str:
    """E2B's signature of a file URL, version 1."""
    digest = Signed(path, operation, user, expiration).digest(token)
    return _VERSION + base64.b64encode(digest).rstrip(b"=").decode()


def digest_in(given: str) -> bytes | None:
    """What a signature holds; None if it cannot be one."""
    if not _SIGNATURE.fullmatch(given):
        return None
    return base64.b64decode(given.removeprefix(_VERSION) + "=")
