"""What one sandbox may ask of the package index, and which packages anybody may."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable
from fnmatch import fnmatchcase

from cloche.config.sections import Packages

KINDS = ("pypi", "npm")
REQUESTS_AT_ONCE = 16  # of one sandbox that are seen to, so that there is room for others; the rest wait
NOTED_SECONDS = 60.0  # for which it can be asked why something was refused
PAGES_AT_ONCE = 4  # of one sandbox: they are in memory, and can be large


class Exceeded(Exception):
    """Its text says which limit, for the program and for the log."""

    def __init__(self, why: str, status: int):
        super().__init__(why)
        self.status = status


class Allowance:
    """Of one sandbox: so many requests a minute, with a minute's worth at once, and so many bytes in its life."""

    def __init__(self, config: Packages):
        self._per_minute = config.requests_per_minute
        self._sandbox_bytes = config.sandbox_bytes
        self._requests = float(config.requests_per_minute)
        self._at = time.monotonic()
        self._taken_bytes = 0
        self._refused, self._refused_at = "", 0.0
        self.requests = asyncio.Semaphore(REQUESTS_AT_ONCE)
        self.pages = asyncio.Semaphore(PAGES_AT_ONCE)

    def ask(self) -> None:
        """Raises Exceeded."""
        now = time.monotonic()
        self._requests = min(self._per_minute, self._requests + (now - self._at) * self._per_minute / 60)
        self._at = now
        if self._requests < 1:
            raise Exceeded(f"a sandbox may ask the package index {self._per_minute} times a minute: wait a little", 429)
        self._requests -= 1

    def check(self, count: int) -> None:
        """Whether so many bytes may be taken. Raises Exceeded."""
        if self._taken_bytes + count > self._sandbox_bytes:
            raise Exceeded(f"a sandbox may take {self._sandbox_bytes} bytes of packages in its life", 403)

    def take(self, count: int) -> None:
        """Raises Exceeded."""
        self.check(count)
        self._taken_bytes += count

    def note_refusal(self, why: str) -> None:
        self._refused, self._refused_at = why, time.monotonic()

    def last_refusal(self) -> str:
        """Why it did not get what it asked for, a moment ago. It is told once."""
        why, self._refused = self._refused, ""
        return why if time.monotonic() - self._refused_at < NOTED_SECONDS else ""


class Names:
    """Which packages the operator allows. `deny` comes first; `pypi:` or `npm:` before a name means one kind only."""

    def __init__(self, config: Packages):
        self._allow = {kind: _patterns(kind, config.allow) for kind in KINDS}
        self._deny = {kind: _patterns(kind, config.deny) for kind in KINDS}

    def allows(self, kind: str, name: str) -> bool:
        """A project's name is normalised."""
        plain = name.lower()
        return not _fits(self._deny[kind], plain) and _fits(self._allow[kind], plain)


def _patterns(kind: str, patterns: Iterable[str]) -> list[str]:
    found = []
    for pattern in patterns:
        before, colon, name = pattern.strip().lower().rpartition(":")
        if not colon or before == kind:
            found.append(re.sub(r"[-_.]+", "-", name) if kind == "pypi" else name)
    return found


def _fits(patterns: Iterable[str], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
