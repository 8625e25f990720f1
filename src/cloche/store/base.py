"""The seam between the engine and whatever keeps its records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from cloche.model import Limits, Struct

State = Literal["running", "expired", "killed", "lost"]

SHUT_DOWN = "its host shut down"  # why those are `killed` that nobody killed


class SandboxRecord(Struct):
    """What is known of a sandbox, also long after it has ended."""

    id: str
    owner: str
    template: str  # NAME@VERSION
    state: State
    instance: str  # the host process that runs or ran it
    created_at: float
    deadline_at: float | None = None
    ended_at: float | None = None
    end_reason: str | None = None
    metadata: dict[str, str] = {}
    limits: Limits = Limits()


class Records(Protocol):
    """Records of sandboxes. Used on one event loop; several processes may share what is behind it."""

    async def open(self) -> None:
        """Raises Unavailable if the records cannot be read."""

    def put(self, record: SandboxRecord) -> None:
        """Keeps the record, soon. Never waits."""

    async def get(self, id: str) -> SandboxRecord | None:
        """The record as it was put last, also if that was a moment ago."""

    async def list(self, owner: str) -> list[SandboxRecord]:
        """All that are kept for that owner, the newest first."""

    async def ended(self, owner: str, label: str, value: str | None, limit: int) -> Sequence[SandboxRecord]:
        """The newest that have ended though nobody killed them, with such metadata; None is any value."""

    async def mark_lost(self, is_live: Callable[[str], bool], at: float) -> int:
        """Running sandboxes of instances that are not live become lost. How many there were."""

    async def aclose(self) -> None:
        """Keeps all that was put, then closes."""
