"""Sessions of logged-in browsers, and the links that open one.

All of it is in memory, and tokens of browsers and links are kept as hashes only. A session that a key opened
ends with that key: the key is looked up again at every request.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

from cloche.api.console.context import ConsoleVisitor
from cloche.model import Principal
from cloche.store.keys import StoredKeys, hash_key

IDLE_SECONDS = 8 * 3600.0  # without anything that a person did
MAX_SESSION_SECONDS = 24 * 3600.0
LINK_SECONDS = 15 * 60.0
MAX_SESSIONS = 1000
MAX_SESSIONS_OF_OWNER = 50  # of one owner: one more ends the one that was not used for the longest
MAX_LINKS = 20
AWAY_SECONDS = 60.0  # requests of a page that was not touched for so long keep no session alive


class ConsoleSession:
    def __init__(self, principal: Principal, key: str, now: float):
        self.principal = principal
        self.key = key  # the hash of the key that opened it; empty for a link's
        self.csrf = secrets.token_urlsafe(24)
        self.opened_at = self.used_at = now


class LoginLink(NamedTuple):
    hashed: str
    until: float


class ConsoleSessions:
    def __init__(self, keys: StoredKeys, clock: Callable[[], float] = time.monotonic):
        self._keys = keys
        self._clock = clock
        self._sessions: dict[
            str, ConsoleSession
        ] = {}  # by the hash of what the browser holds, the longest unused first
        self._links: list[LoginLink] = []

    def __len__(self) -> int:
        return len(self._sessions)

    def new_link(self) -> str:
        """A token that opens an admin's session once, within a quarter of an hour."""
        token, now = secrets.token_urlsafe(24), self._clock()
        self._links = [each for each in self._links if each.until > now][1 - MAX_LINKS :]
        self._links.append(LoginLink(_hash_token(token), now + LINK_SECONDS))
        return token

    def follow(self, token: str, principal: Principal) -> str | None:
        """Returns the session that the link opens; None for one that was used, is too old, or never existed."""
        hashed, now = _hash_token(token), self._clock()
        link = next((each for each in self._links if secrets.compare_digest(each.hashed, hashed)), None)
        if link is None:
            return None
        self._links.remove(link)
        return self._open_session(principal, "") if link.until > now else None

    def enter(self, key: str) -> str | None:
        """Returns the session that the key opens; None for an invalid one."""
        hashed = hash_key(key)
        principal = self._keys.find_hashed(hashed)
        return None if principal is None else self._open_session(principal, hashed)

    def find(self, token: str, *, away: bool = False) -> ConsoleVisitor | None:
        """The visitor of a session; None where it has ended. Extends the session unless `away`."""
        hashed, now = _hash_token(token), self._clock()
        session = self._sessions.get(hashed)
        if session is None:
            return None
        principal = self._session_principal(session, now)
        if principal is None:
            del self._sessions[hashed]
            return None
        if not away:
            session.used_at = now
            self._sessions[hashed] = self._sessions.pop(hashed)
        return ConsoleVisitor(principal, session.csrf)

    def close(self, token: str) -> None:
        self._sessions.pop(_hash_token(token), None)

    def _session_principal(self, session: ConsoleSession, now: float) -> Principal | None:
        """The principal, as the key has it now, where a key opened the session."""
        if now - session.used_at > IDLE_SECONDS or now - session.opened_at > MAX_SESSION_SECONDS:
            return None
        return self._keys.find_hashed(session.key) if session.key else session.principal

    def _open_session(self, principal: Principal, key: str) -> str:
        now, token = self._clock(), secrets.token_urlsafe(32)
        self._sessions = {
            id: each for id, each in self._sessions.items() if self._session_principal(each, now) is not None
        }
        own = [id for id, each in self._sessions.items() if each.principal.owner == principal.owner]
        for ids, most in ((own, MAX_SESSIONS_OF_OWNER), (list(self._sessions), MAX_SESSIONS)):
            for id in ids[: max(0, len(ids) + 1 - most)]:
                self._sessions.pop(id, None)
        self._sessions[_hash_token(token)] = ConsoleSession(principal, key, now)
        return token


def _hash_token(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()
