"""The lifecycle of sandboxes (created, paused, resumed, ended) in the log, the metrics and the audit log."""

from __future__ import annotations

import time
from collections.abc import Iterable

from cloche.engine.operations.audit import AuditLog
from cloche.engine.operations.metrics import EngineCounters
from cloche.store.base import HOST_DIED_REASON, SHUT_DOWN_REASON, LostSandbox, RecordState, SandboxRecord
from cloche.telemetry import log

MAX_REASON = 200  # characters


class LifecycleLog:
    def __init__(self, counters: EngineCounters, audit_log: AuditLog):
        self._counters = counters
        self._audit_log = audit_log
        self._states: dict[str, RecordState] = {}  # of those that have a cell

    def on_sandbox_added(self, record: SandboxRecord) -> None:
        """Records that a sandbox has a cell: for the first time, or again."""
        self._states[record.id] = record.state
        self._record_action(
            "sandbox.created" if record.resumed_at is None else "sandbox.resumed", record, about=record.template
        )

    def changed(self, record: SandboxRecord, *, left: bool) -> None:
        """Records a change of state of a sandbox that has a cell, or has just left it. Other changes are ignored."""
        before = self._states.get(record.id)
        if left:
            self._states.pop(record.id, None)
        elif before is not None:
            self._states[record.id] = record.state
        if before is None or before == record.state:
            return
        if record.state == "paused":
            self._record_action("sandbox.paused", record, outcome="memory" if record.memory_kept else "files")
        elif record.state == "running":
            self._record_action("sandbox.resumed", record)
        else:
            self.ended(record)

    def ended(self, record: SandboxRecord) -> None:
        """Records the end of a sandbox, also of one that was paused on a disk."""
        if record.owner:
            self._counters.ended[record.state] += 1
            about = {"sandbox": record.id, "owner": record.owner, "template": record.template}
            log.info("sandbox.ended", **about, state=record.state, reason=record.end_reason)
        self._record_action("sandbox.ended", record, outcome=record.state, about=(record.end_reason or "")[:MAX_REASON])

    def lost(self, sandboxes: Iterable[LostSandbox]) -> None:
        """Records the end of sandboxes whose host processes died."""
        for id, owner in sandboxes:
            self._audit_log.record(
                "sandbox.ended", owner, sandbox=id, outcome="lost", about=HOST_DIED_REASON, itself=True
            )

    def _record_action(self, what: str, record: SandboxRecord, *, outcome: str = "", about: str = "") -> None:
        if record.owner:
            itself = _is_automatic(record)
            self._audit_log.record(what, record.owner, sandbox=record.id, outcome=outcome, about=about, itself=itself)


def _is_automatic(record: SandboxRecord) -> bool:
    """Whether no caller asked for the change: a passed deadline runs in the task that made the sandbox."""
    if record.state == "paused":
        return record.spec.on_deadline == "pause" and (record.deadline_at or time.time()) <= time.time()
    return record.state in ("expired", "lost") or record.end_reason == SHUT_DOWN_REASON
