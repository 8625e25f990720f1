"""What is said of a sandbox that has ended: which of the three ways, when, and what to do. And of a kernel's end."""

from __future__ import annotations

from datetime import UTC, datetime

from cloche import errors
from cloche.model import MIB, Limits
from cloche.store.base import SandboxRecord

KILLED_BY_OWNER = "killed by its owner"  # unless whoever kills one says why

_KINDS: dict[str, tuple[type[errors.Gone], str]] = {
    "expired": (errors.SandboxExpired, "timed out"),
    "killed": (errors.SandboxKilled, "was killed"),
    "lost": (errors.SandboxLost, "was lost"),
}


def gone(record: SandboxRecord) -> errors.Gone:
    """The error for whoever still asks for it."""
    kind, verb = _KINDS.get(record.state, _KINDS["lost"])
    when = datetime.fromtimestamp(record.ended_at or record.created_at, UTC)
    what = f"sandbox {record.id} {verb} at {when:%Y-%m-%d %H:%M:%S} UTC"
    return kind(f"{what}: {record.end_reason or 'its host process died'}; create a new one")


def absent(record: SandboxRecord) -> errors.ClocheError:
    """The error for whoever wants to use, or pause, one that does not run: it is paused, or it has ended."""
    if record.state != "paused":
        return gone(record)
    when = datetime.fromtimestamp(record.paused_at or record.created_at, UTC)
    what = f"sandbox {record.id} is paused already, since {when:%Y-%m-%d %H:%M:%S} UTC"
    return errors.SandboxPaused(f"{what}: resume it (connect to it) to use it, or kill it")


def never(id: str) -> errors.SandboxNotFound:
    """The same for an id that never existed and for one that belongs to somebody else."""
    return errors.SandboxNotFound(f"there is no sandbox {id!r}")


def out_of_memory(limits: Limits) -> str:
    """Why an execution ended whose kernel the system killed. Files count, as writable space is memory."""
    memory, space = limits.memory_bytes / MIB, limits.space_bytes / MIB
    limit = f"its limit is {memory:g} MiB, and {space:g} MiB for files"
    return f"the sandbox ran out of memory: {limit}; the context's state is lost"
