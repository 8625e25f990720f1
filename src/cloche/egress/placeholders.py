"""Secrets into the headers of a request: headers of their own, or values where a program wrote a placeholder.

Nothing else of a request is looked at, neither its URL nor its body: those are what servers log and store.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence

from cloche.egress import http1
from cloche.egress.masking import basic_credentials
from cloche.network_policy import FRAMING_HEADERS, MAX_SECRETS_BYTES, Secret

# What a program may send, with all secrets in it once: a placeholder is short, and may be there very often.
MAX_FILLED_BYTES = http1.MAX_HEAD_BYTES + MAX_SECRETS_BYTES

Headers = Sequence[tuple[str, str]]

_AUTHORIZATION = ("authorization", "proxy-authorization")


def with_secrets(headers: Headers, secrets: Sequence[Secret]) -> list[tuple[str, str]]:
    """The headers of a request, with what the secrets say. What a program sent under a secret's header is dropped.

    Where two secrets would set the same, the one for the more particular domain does.

    Raises BadRequest where they would be longer than MAX_FILLED_BYTES, before they are.
    """
    ordered = sorted(secrets, key=_particular)
    own = {secret.header.lower(): secret.value for secret in ordered if secret.header is not None}
    values = {secret.name: secret.value for secret in ordered if secret.name is not None}
    kept = [(name, value) for name, value in headers if name not in own]
    room = _Room(sum(len(name) + len(value) for name, value in (*kept, *own.items())))
    return [*((name, _filled(name, value, values, room)) for name, value in kept), *own.items()]


class _Room:
    """How much a request's headers can still grow."""

    def __init__(self, taken_bytes: int):
        self._bytes = MAX_FILLED_BYTES
        self.take(taken_bytes)

    def take(self, count: int) -> None:
        self._bytes -= count
        if self._bytes < 0:
            raise http1.BadRequest(f"with its secrets the head of the request is over {MAX_FILLED_BYTES} bytes")


def _particular(secret: Secret) -> tuple[bool, int]:
    """All are for one host, so that the longer domain is below the shorter one."""
    return not secret.domain.startswith("*"), len(secret.domain)


def _filled(header: str, value: str, values: dict[str, str], room: _Room) -> str:
    if not values or header in FRAMING_HEADERS:
        return value
    credentials = basic_credentials(value) if header in _AUTHORIZATION else None
    if credentials is not None:
        filled = _fill(credentials, values, room)
        return value if filled == credentials else f"Basic {base64.b64encode(filled.encode()).decode()}"
    return _fill(value, values, room)


def _fill(text: str, values: dict[str, str], room: _Room) -> str:
    """In one pass, so that a value that looks like a placeholder stays as it is."""

    def value(match: re.Match[str]) -> str:
        found = values[match[1] or match[2]]
        room.take(len(found))
        return found

    names = "|".join(sorted(values, key=len, reverse=True))
    return re.sub(rf"\$(?:\{{({names})\}}|({names}))", value, text)
