"""Continuation tokens: they name a program and a round, are signed, and are bound to one caller."""

from __future__ import annotations

import base64
import hashlib
import hmac
import time

import msgspec

from cloche.api.librechat.identity import LibreChatCaller
from cloche.api.librechat.replies import LibreChatRefusal
from cloche.model import Struct

MAX_TOKEN_CHARACTERS = 512
NOT_FOUND_ERROR = "Execution not found or expired"
_SIGNATURE_CONTEXT = b"librechat.continuation\0"
_CALLER_CONTEXT = b"librechat.caller\0"


class Continuation(Struct, array_like=True):
    """The content of a token. `whose` is a keyed hash of the caller, which cannot be read from it."""

    dialogue: str
    round: int
    expires_at: int
    whose: str  # the digest of the caller


class ContinuationTokens:
    """Issues tokens, and reads the ones that come back. `secret` is the server's."""

    def __init__(self, secret: bytes):
        self._secret = secret

    def digest_caller(self, caller: LibreChatCaller) -> str:
        identity = msgspec.json.encode([caller.owner, caller.tenant, caller.user])
        return hmac.new(self._secret, _CALLER_CONTEXT + identity, hashlib.sha256).hexdigest()[:32]

    def issue_token(self, continuation: Continuation) -> str:
        content = msgspec.json.encode(continuation)
        return f"{_encode_base64url(content)}.{_encode_base64url(self._sign_content(content))}"

    def read(self, token: object, caller: LibreChatCaller) -> Continuation:
        """Raises LibreChatRefusal: 400 for a token that this caller was never given, 404 for one that expired."""
        continuation = self._open_token(token)
        if not hmac.compare_digest(continuation.whose, self.digest_caller(caller)):
            raise _invalid_token()
        if continuation.expires_at < time.time():
            raise results_expired()
        return continuation

    def _open_token(self, token: object) -> Continuation:
        try:
            content, signature = map(_decode_base64url, str(token)[: MAX_TOKEN_CHARACTERS + 1].split("."))
            if not isinstance(token, str) or not hmac.compare_digest(signature, self._sign_content(content)):
                raise _invalid_token()
            return msgspec.json.decode(content, type=Continuation)
        except (ValueError, msgspec.DecodeError):
            raise _invalid_token() from None

    def _sign_content(self, content: bytes) -> bytes:
        return hmac.new(self._secret, _SIGNATURE_CONTEXT + content, hashlib.sha256).digest()


def _invalid_token() -> LibreChatRefusal:
    return LibreChatRefusal(
        400, "Invalid continuation token", "send the continuation_token of the last answer as it came"
    )


def program_not_found() -> LibreChatRefusal:
    """For a valid token of a program that the server no longer knows."""
    return LibreChatRefusal(
        404, NOT_FOUND_ERROR, "there is no such program: it ended a while ago, or the server was restarted since"
    )


def results_expired() -> LibreChatRefusal:
    return LibreChatRefusal(
        404, NOT_FOUND_ERROR, "the results came too late: the program has been ended. Run it again from the start"
    )


def _encode_base64url(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def _decode_base64url(text: str) -> bytes:
    """Raises ValueError for text that `_encode_base64url` would write differently: one token has one form."""
    content = base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), b"-_", validate=True)
    if _encode_base64url(content) != text:
        raise ValueError("not canonical")
    return content
