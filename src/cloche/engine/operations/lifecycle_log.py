"""How sandboxes begin, rest and end, as the log, the metrics and the audit log see it."""

from __future__ import annotations

import time
from collections.abc import Iterable

from cloche.engine.operations.audit import Trail
from cloche.engine.operations.counters import Tally
from cloche.store.base import HOST_DIED, SHUT_DOWN, Lost, SandboxRecord, State
from cloche.telemetry import log

MAX_REASON = 200  # characters


class Chronicle:
    def __init__(self, tally: Tally, trail: Trail):
        self._tally = tally
        self._trail = trail
        self._states: dict[str, State] = {}  # of those that have a cell

    def added(self, record: SandboxRecord) -> None:
        """It has a cell: for the first time, or again."""
        self._states[record.id] = record.state
        self._note("sandbox.created" if record.resumed_at is None else "sandbox.resumed", record, about=record.template)

    def changed(self, record: SandboxRecord, *, left: bool) -> None:
        """What is recorded of one that has a cell, or has left it just now. Not every change is worth a word."""
        before = self._states.get(record.id)
        if left:
            self._states.pop(record.id, None)
        elif before is not None:
            self._states[record.id] = record.state
        if before is None or before == record.state:
            return
        if record.state == "paused":
            self._note("sandbox.paused", record, outcome="memory" if record.pause_memory else "files")
        elif record.state == "running":
            self._note("sandbox.resumed", record)
        else:
            self.ended(record)

    def ended(self, record: SandboxRecord) -> None:
        """Also of one that was paused on a disk."""
        if record.owner:
            self._tally.ended[record.state] += 1
            about = {"sandbox": record.id, "owner": record.owner, "template": record.template}
            log.info("sandbox.ended", **about, state=record.state, reason=record.end_reason)
        self._note("sandbox.ended", record, outcome=record.state, about=(record.end_reason or "")[:MAX_REASON])

    def lost(self, sandboxes: Iterable[Lost]) -> None:
        """Those of host processes that died."""
        for id, owner in sandboxes:
            self._trail.note("sandbox.ended", owner, sandbox=id, outcome="lost", about=HOST_DIED, itself=True)

    def _note(self, what: str, record: SandboxRecord, *, outcome: str = "", about: str = "") -> None:
        if record.owner:
            itself = _by_itself(record)
            self._trail.note(what, record.owner, sandbox=record.id, outcome=outcome, about=about, itself=itself)


def _by_itself(record: SandboxRecord) -> bool:
    """Whether nobody asked for what happened to it: a deadline that passes runs where the sandbox was made."""
    if record.state == "paused":
        return record.on_deadline == "pause" and (record.deadline_at or time.time()) <= time.time()
    return record.state in ("expired", "lost") or record.end_reason == SHUT_DOWN
