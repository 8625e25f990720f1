"""Continuation tokens: which program a client answers, and in which round. Signed, and bound to who was given them."""

from __future__ import annotations

import base64
import hashlib
import hmac
import time

import msgspec

from cloche.api.librechat.identity import Caller
from cloche.api.librechat.replies import Refusal
from cloche.model import Struct

MAX_TOKEN = 512
NOT_FOUND = "Execution not found or expired"
_SIGNING = b"librechat.continuation\0"
_NAMING = b"librechat.caller\0"


class Continuation(Struct, array_like=True):
    """What a token says. `whose` stands for the caller, who is not to be read in it."""

    dialogue: str
    round: int
    expires_at: int
    whose: str


class Tokens:
    """Makes tokens, and reads those that come back. `secret` is the server's."""

    def __init__(self, secret: bytes):
        self._secret = secret

    def whose(self, caller: Caller) -> str:
        who = msgspec.json.encode([caller.owner, caller.tenant, caller.user])
        return hmac.new(self._secret, _NAMING + who, hashlib.sha256).hexdigest()[:32]

    def issue(self, continuation: Continuation) -> str:
        content = msgspec.json.encode(continuation)
        return f"{_text(content)}.{_text(self._signature(content))}"

    def read(self, token: object, caller: Caller) -> Continuation:
        """Raises Refusal: 400 for what this caller was never given, whoever else was, and 404 for what is too old."""
        continuation = self._opened(token)
        if not hmac.compare_digest(continuation.whose, self.whose(caller)):
            raise _invalid()
        if continuation.expires_at < time.time():
            raise expired()
        return continuation

    def _opened(self, token: object) -> Continuation:
        try:
            content, signature = map(_bytes, str(token)[: MAX_TOKEN + 1].split("."))
            if not isinstance(token, str) or not hmac.compare_digest(signature, self._signature(content)):
                raise _invalid()
            return msgspec.json.decode(content, type=Continuation)
        except (ValueError, msgspec.DecodeError):
            raise _invalid() from None

    def _signature(self, content: bytes) -> bytes:
        return hmac.new(self._secret, _SIGNING + content, hashlib.sha256).digest()


def _invalid() -> Refusal:
    return Refusal(400, "Invalid continuation token", "send the continuation_token of the last answer as it came")


def not_found() -> Refusal:
    """Of what the caller was given, and nobody knows any more."""
    return Refusal(404, NOT_FOUND, "there is no such program: it ended a while ago, or the server was restarted since")


def expired() -> Refusal:
    return Refusal(404, NOT_FOUND, "the results came too late: the program has been ended. Run it again from the start")


def _text(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    """Raises ValueError for what is not exactly as `_text` writes it: one token has one form."""
    content = base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), b"-_", validate=True)
    if _text(content) != text:
        raise ValueError("not canonical")
    return content
