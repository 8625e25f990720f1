"""Records of sandboxes and snapshots: the interfaces between the engine and its storage."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, NamedTuple, Protocol

from cloche.model import Limits, SandboxSpec, Snapshot, Struct

# The check whether an owner may store more, made before anything is stored.

CheckAllowance = Callable[[str, int], Awaitable[None]]
"""Of an owner, so many bytes more. Raises QuotaExceeded."""


async def allow_anything(owner: str, more_bytes: int) -> None:
    """Allows everything: for use without quotas."""


RecordState = Literal["running", "paused", "expired", "killed", "lost"]

SHUT_DOWN_REASON = "its host shut down"  # the reason of `killed` without a kill request
HOST_DIED_REASON = "its host process died"  # the reason of `lost` without any report


class LostSandbox(NamedTuple):
    """A lost sandbox and its owner."""

    id: str
    owner: str


class PausedFiles(Struct):
    """The files of a paused sandbox, on a disk."""

    image: str
    bytes: int = 0


class SandboxRecord(Struct):
    """The record of a sandbox, kept long after it has ended."""

    id: str
    spec: SandboxSpec  # its template is NAME@VERSION, and its limits are known; of a paused one it has no secrets
    state: RecordState
    instance: str  # the host process that runs or ran it
    created_at: float
    deadline_at: float | None = None
    ended_at: float | None = None
    end_reason: str | None = None
    paused_at: float | None = None
    memory_kept: bool = True  # of one that is paused
    files: PausedFiles | None = None  # of one that is paused
    resumed_at: float | None = None  # the last time
    key_id: str = ""  # the key that it was made with

    @property
    def owner(self) -> str:
        return self.spec.owner

    @property
    def template(self) -> str:
        return self.spec.template

    @property
    def limits(self) -> Limits:
        return self.spec.limits or Limits()


class SandboxRecords(Protocol):
    """Records of sandboxes. Used on one event loop; several processes may share the storage."""

    @property
    def failing(self) -> bool:
        """Whether records cannot be written now."""

    async def open(self) -> None:
        """Raises Unavailable if the records cannot be read."""

    def put(self, record: SandboxRecord) -> None:
        """Writes the record soon. Never waits."""

    async def get(self, id: str, owner: str | None = None) -> SandboxRecord | None:
        """Returns the record as it was put last, even a moment ago; with an owner, only if it is theirs.

        A foreign record takes as long to look up as one that never existed.
        """

    async def notes(self, id: str) -> dict[str, str]:
        """Returns the notes of a sandbox of any owner and host process; empty for an unknown one. As `get`."""

    async def list(self, owner: str) -> list[SandboxRecord]:
        """Lists all records of that owner, the newest first."""

    async def ended(self, owner: str, label: str, value: str | None, limit: int) -> Sequence[SandboxRecord]:
        """Returns the newest that ended without being killed, with such metadata; None matches any value."""

    async def recent(self, owner: str | None, limit: int) -> Sequence[SandboxRecord]:
        """Returns the last that have ended, for any reason, the newest first; with None as the owner, of all."""

    async def keep(self, record: SandboxRecord) -> None:
        """As `put`, but returns after the record is written. Raises Unavailable if it cannot be."""

    async def paused(self) -> Sequence[SandboxRecord]:
        """Returns all paused sandboxes of all owners."""

    async def claim(self, record: SandboxRecord, instance: str) -> SandboxRecord | None:
        """Assigns a paused sandbox of a host process that has ended to `instance`; it stays paused.

        None if it is not paused any more, or another process was faster.
        """

    async def conclude(self, record: SandboxRecord) -> bool:
        """As `keep`, but only if it is still paused. Whether it was."""

    async def mark_lost(self, is_live: Callable[[str], bool], at: float) -> Sequence[LostSandbox]:
        """Marks running sandboxes of instances that are not live as lost, and returns them.

        Paused ones stay paused, without their memory.
        """

    async def aclose(self) -> None:
        """Writes all pending records, then closes."""


class SnapshotRecords(Protocol):
    """Snapshots, and their names."""

    allow: CheckAllowance

    async def add(self, snapshot: Snapshot) -> None:
        """Returns after it is written. Raises Unavailable."""

    async def find(self, ref: str, owner: str | None) -> Snapshot | None:
        """Returns the snapshot of that id, else the newest of that name; with None as the owner, of any."""

    async def list(self, owner: str | None) -> Sequence[Snapshot]:
        """Lists the newest first, without environments and commands; with None as the owner, of all."""

    async def remove(self, id: str, owner: str) -> bool:
        """Removes the snapshot. Whether it was there."""

    async def images(self) -> set[str]:
        """Returns the images of all snapshots of all owners."""
