"""Who is logged in: sessions of browsers, and the links that open one.

All of it is in memory, and of what a browser or a link holds only a hash. A session that a key opened ends with that
key: the key is looked up again at every request.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

from cloche.api.console.context import Visitor
from cloche.model import Principal
from cloche.store.keys import StoredKeys, hash_of

IDLE_SECONDS = 8 * 3600.0  # without anything that a person did
LONGEST_SECONDS = 24 * 3600.0
LINK_SECONDS = 15 * 60.0
MAX_SESSIONS = 1000
MAX_OF_ONE = 50  # of one owner: one more ends the one that was not used for the longest
MAX_LINKS = 20
AWAY_SECONDS = 60.0  # what a page asks for by itself, when nobody touched it for so long, keeps no session alive


class Session:
    def __init__(self, principal: Principal, key: str, now: float):
        self.principal = principal
        self.key = key  # the hash of the key that opened it; empty for a link's
        self.csrf = secrets.token_urlsafe(24)
        self.opened_at = self.used_at = now


class Link(NamedTuple):
    hashed: str
    until: float


class Sessions:
    def __init__(self, keys: StoredKeys, clock: Callable[[], float] = time.monotonic):
        self._keys = keys
        self._clock = clock
        self._sessions: dict[str, Session] = {}  # by the hash of what the browser holds, the longest unused first
        self._links: list[Link] = []

    def __len__(self) -> int:
        return len(self._sessions)

    def new_link(self) -> str:
        """What opens an admin's session once, within a quarter of an hour."""
        token, now = secrets.token_urlsafe(24), self._clock()
        self._links = [each for each in self._links if each.until > now][1 - MAX_LINKS :]
        self._links.append(Link(_hash(token), now + LINK_SECONDS))
        return token

    def follow(self, token: str, principal: Principal) -> str | None:
        """The session that the link opens; None for one that was used, is too old, or never was."""
        hashed, now = _hash(token), self._clock()
        link = next((each for each in self._links if secrets.compare_digest(each.hashed, hashed)), None)
        if link is None:
            return None
        self._links.remove(link)
        return self._open(principal, "") if link.until > now else None

    def enter(self, key: str) -> str | None:
        """The session that the key opens; None for one that is not valid."""
        hashed = hash_of(key)
        principal = self._keys.find_hashed(hashed)
        return None if principal is None else self._open(principal, hashed)

    def find(self, token: str, *, away: bool = False) -> Visitor | None:
        """Whose it is; None where it has ended. Unless nobody was there, it lasts longer from now on."""
        hashed, now = _hash(token), self._clock()
        session = self._sessions.get(hashed)
        if session is None:
            return None
        principal = self._principal(session, now)
        if principal is None:
            del self._sessions[hashed]
            return None
        if not away:
            session.used_at = now
            self._sessions[hashed] = self._sessions.pop(hashed)
        return Visitor(principal, session.csrf)

    def close(self, token: str) -> None:
        self._sessions.pop(_hash(token), None)

    def _principal(self, session: Session, now: float) -> Principal | None:
        """As the key says now, where a key opened it."""
        if now - session.used_at > IDLE_SECONDS or now - session.opened_at > LONGEST_SECONDS:
            return None
        return self._keys.find_hashed(session.key) if session.key else session.principal

    def _open(self, principal: Principal, key: str) -> str:
        now, token = self._clock(), secrets.token_urlsafe(32)
        self._sessions = {id: each for id, each in self._sessions.items() if self._principal(each, now) is not None}
        own = [id for id, each in self._sessions.items() if each.principal.owner == principal.owner]
        for ids, most in ((own, MAX_OF_ONE), (list(self._sessions), MAX_SESSIONS)):
            for id in ids[: max(0, len(ids) + 1 - most)]:
                self._sessions.pop(id, None)
        self._sessions[_hash(token)] = Session(principal, key, now)
        return token


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()
