"""Sandboxes that are paused without their memory: all that is left of them is on a disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from cloche.network_policy import NetworkPolicy
from cloche.store.base import Records, SandboxRecord


class Asleep:
    """Those that this process may wake: its own, and those of host processes that have ended."""

    def __init__(self, records: Records, is_live: Callable[[str], bool]):
        self._records = records
        self._is_live = is_live
        self._known: dict[str, SandboxRecord] = {}
        self._policies: dict[str, NetworkPolicy] = {}  # with their secrets, which no disk has

    async def open(self) -> None:
        for record in await self._records.paused():
            if not self._is_live(record.instance):
                self._known[record.id] = _without_memory(record)

    def add(self, record: SandboxRecord, policy: NetworkPolicy | None = None) -> None:
        """`policy`: what it may reach when it wakes in this process; else what is recorded."""
        self._known[record.id] = record
        if policy is not None:
            self._policies[record.id] = policy

    def policy(self, id: str) -> NetworkPolicy | None:
        return self._policies.get(id)

    def forget(self, id: str) -> None:
        """Harmless when it is not known."""
        self._known.pop(id, None)
        self._policies.pop(id, None)

    async def find(self, id: str, owner: str | None) -> SandboxRecord | None:
        """One that can be woken here, also if the host process that had paused it ended a moment ago.

        With an owner, if it is theirs: else it is looked for as one that never was.
        """
        known = self._known.get(id)
        if known is not None and owner in (None, known.owner):
            return known
        record = await self._records.get(id, owner)
        if record is None or record.state != "paused" or self._is_live(record.instance):
            return None
        return _without_memory(record)

    def list(self, owner: str | None) -> Sequence[SandboxRecord]:
        return [each for each in self._known.values() if owner in (None, each.owner)]


def _without_memory(record: SandboxRecord) -> SandboxRecord:
    """Its host process has ended, and its memory with it."""
    return msgspec.structs.replace(record, pause_memory=False)
