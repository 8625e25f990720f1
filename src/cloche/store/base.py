"""The seam between the engine and whatever keeps its records."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, NamedTuple, Protocol

from cloche.model import Limits, OnDeadline, Snapshot, Struct, User
from cloche.network_policy import NetworkPolicy

# Whether an owner may store more: asked before anything of theirs is kept.

Allow = Callable[[str, int], Awaitable[None]]
"""Of an owner, so many bytes more. Raises QuotaExceeded."""


async def anything(owner: str, more_bytes: int) -> None:
    """Where there are no quotas."""


State = Literal["running", "paused", "expired", "killed", "lost"]

SHUT_DOWN = "its host shut down"  # why those are `killed` that nobody killed
HOST_DIED = "its host process died"  # why those are `lost` of which nobody heard more


class Lost(NamedTuple):
    """A sandbox that was, and whose."""

    id: str
    owner: str


class Revival(Struct):
    """What it takes to make a paused sandbox again, should its memory be gone. Secrets are not among it."""

    image: str  # of its files
    bytes: int = 0  # that the image has
    env: dict[str, str] = {}
    user: User = "user"
    cwd: str = "/mnt/data"
    sudo: bool = False
    network: NetworkPolicy | None = None
    lifetime_seconds: float | None = None
    pause_memory: bool = True  # whether the pause at its deadline keeps its memory


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
    on_deadline: OnDeadline = "kill"
    pause_memory: bool = True  # whether a pause at its deadline keeps its memory; of a paused one: whether it is kept
    auto_resume: bool = False
    notes: dict[str, str] = {}
    volumes: dict[str, str] = {}  # by path, the id or name of each
    paused_at: float | None = None
    resumed_at: float | None = None  # the last time
    revival: Revival | None = None  # of one that is paused
    key_id: str = ""  # the key that it was made with


class Records(Protocol):
    """Records of sandboxes. Used on one event loop; several processes may share what is behind it."""

    @property
    def failing(self) -> bool:
        """Whether they cannot be kept now."""

    async def open(self) -> None:
        """Raises Unavailable if the records cannot be read."""

    def put(self, record: SandboxRecord) -> None:
        """Keeps the record, soon. Never waits."""

    async def get(self, id: str, owner: str | None = None) -> SandboxRecord | None:
        """The record as it was put last, also if that was a moment ago; with an owner, if it is theirs.

        One that is somebody else's is looked for as long as one that never was.
        """

    async def notes(self, id: str) -> dict[str, str]:
        """The notes of a sandbox, whoever's it is and wherever it runs; none of one that never was. As `get`."""

    async def list(self, owner: str) -> list[SandboxRecord]:
        """All that are kept for that owner, the newest first."""

    async def ended(self, owner: str, label: str, value: str | None, limit: int) -> Sequence[SandboxRecord]:
        """The newest that have ended though nobody killed them, with such metadata; None is any value."""

    async def recent(self, owner: str | None, limit: int) -> Sequence[SandboxRecord]:
        """The last that have ended, for whatever reason, the newest first, of that owner or with None of all."""

    async def keep(self, record: SandboxRecord) -> None:
        """As `put`, but returns when it is kept. Raises Unavailable if it cannot be."""

    async def paused(self) -> Sequence[SandboxRecord]:
        """All that are paused, whoever's they are."""

    async def claim(self, record: SandboxRecord, instance: str) -> SandboxRecord | None:
        """A paused sandbox of a host process that has ended is `instance`'s from now on, and stays paused.

        None if it is not paused any more, or is another's: somebody was faster.
        """

    async def conclude(self, record: SandboxRecord) -> bool:
        """As `keep`, if it is still paused: whether it was."""

    async def mark_lost(self, is_live: Callable[[str], bool], at: float) -> Sequence[Lost]:
        """Running sandboxes of instances that are not live become lost. Which these are.

        Those that were paused stay so, without their memory.
        """

    async def aclose(self) -> None:
        """Keeps all that was put, then closes."""


class Snapshots(Protocol):
    """Snapshots, and the names that they have."""

    allow: Allow

    async def add(self, snapshot: Snapshot) -> None:
        """Returns when it is kept. Raises Unavailable."""

    async def find(self, ref: str, owner: str | None) -> Snapshot | None:
        """The one of that id, else the newest of that name; with None whoever's it is."""

    async def list(self, owner: str | None) -> Sequence[Snapshot]:
        """The newest first, without environments and commands; with None whoever's they are."""

    async def remove(self, id: str, owner: str) -> bool:
        """Whether it was there."""

    async def images(self) -> set[str]:
        """Those of all snapshots, whoever's they are."""
