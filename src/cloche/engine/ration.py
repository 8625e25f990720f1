"""How many lines of the audit log one owner can have: beyond them it is told how much there was, minute by minute.

The log is bounded for all owners together, and its oldest lines go first: without this, one who does a lot, or nothing
but that, would soon have pushed out what is on record of everybody else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cloche.store.audit import AuditLine

BURST_LINES = 2000  # of one owner, before
LINES_PER_MINUTE = 120  # hold for it; and as many for how its sandboxes begin and end
HELD_SECONDS = 60.0  # for which what is beyond is added up
KINDS = 32  # of one owner that are told apart while they are added up; of more, only what was done
MAX_OWNERS = 10_000

_UNRATIONED = ("admin.", "audit.", "owner.", "key.made", "key.rotated", "key.revoked")  # by admins and the server only


class _Left(NamedTuple):
    lines: float
    at: float


class Ration:
    """Not for several threads at once. Times are of one clock, any that never goes back."""

    def __init__(self) -> None:
        self._left: dict[tuple[str, bool], _Left] = {}
        self._held: dict[str, dict[tuple[str, ...], AuditLine]] = {}  # by owner and kind
        self._since = 0.0

    @property
    def holds(self) -> bool:
        """Whether something is left to be told."""
        return bool(self._held)

    def pass_on(self, lines: Sequence[AuditLine], now: float, *, whole: bool = False) -> list[AuditLine]:
        """Those that are to be written now, with what was held for a minute; `whole`: with all that is held."""
        passed = []
        for line in lines:
            if self._may(line, now):
                passed.append(line)
            else:
                self._hold(line, now)
        if self._held and (whole or now - self._since >= HELD_SECONDS):
            passed += [line for kinds in self._held.values() for line in kinds.values()]
            self._held = {}
        return passed

    def _may(self, line: AuditLine, now: float) -> bool:
        if line.what.startswith(_UNRATIONED):
            return True
        whose = line.owner, line.what.startswith("sandbox.")
        before = self._left.get(whose) or _Left(BURST_LINES, now)
        lines = min(BURST_LINES, before.lines + (now - before.at) * LINES_PER_MINUTE / 60)
        self._left[whose] = _Left(max(lines - 1, 0.0), now) if lines >= 1 else _Left(lines, now)
        if len(self._left) > MAX_OWNERS:
            self._forget_idle(now)
        return lines >= 1

    def _forget_idle(self, now: float) -> None:
        """Who has all of it again is as one that never came."""
        idle = BURST_LINES / LINES_PER_MINUTE * 60
        self._left = {whose: left for whose, left in self._left.items() if now - left.at < idle}

    def _hold(self, line: AuditLine, now: float) -> None:
        if not self._held:
            self._since = now
        kinds = self._held.setdefault(line.owner, {})
        kind: tuple[str, ...] = (line.what, line.by, line.key, line.sandbox, line.outcome, line.about)
        if kind not in kinds and len(kinds) >= KINDS:
            kind = (line.what,)
            line.by = line.key = line.sandbox = line.outcome = line.about = ""
        held = kinds.setdefault(kind, line)
        if held is not line:
            held.count += line.count
            held.bytes += line.bytes
            held.until = line.until or line.at
            held.id = ""
