"""Errors and reasons for sandboxes that have ended, are paused or do not exist, and for lack of memory."""

from __future__ import annotations

import errno
import os
import re
import signal
from datetime import UTC, datetime

from cloche import errors
from cloche.model import MIB, Limits, Struct
from cloche.store.base import SandboxRecord

# Why a sandbox ended, as its record, clients and the audit log have it. SHUT_DOWN_REASON and HOST_DIED_REASON are the
# store's, in `store/base.py`.
KILLED_BY_OWNER = "killed by its owner"  # unless the caller gives another reason
DEADLINE_PASSED = "its deadline passed"
PAUSED_TOO_LONG = "it was paused for longer than this host keeps paused sandboxes"
CLIENT_DISCONNECTED = "client disconnected"
CLIENT_DISCONNECTED_EARLY = "client disconnected before the sandbox was ready"
SIBLING_FAILED = "not all of its siblings could be made"
NETWORK_NOT_OPENED = "its network could not be opened"
KERNEL_NOT_KILLED = "a kernel of it could not be killed"
LAST_RUN_ENDED = "its last run ended"
PROGRAM_ENDED = "its program has ended"
BUILD_ENDED = "the build has ended"
CANARY_ENDED = "the canary's end"
CONTAINER_DELETED = "its container was deleted"
KEY_REVOKED = "the key that it was made with was revoked"

_GONE_ERRORS: dict[str, tuple[type[errors.Gone], str]] = {
    "expired": (errors.SandboxExpired, "timed out"),
    "killed": (errors.SandboxKilled, "was killed"),
    "lost": (errors.SandboxLost, "was lost"),
}


def sandbox_gone_error(record: SandboxRecord) -> errors.Gone:
    """The error for a request to a sandbox that has ended."""
    kind, verb = _GONE_ERRORS.get(record.state, _GONE_ERRORS["lost"])
    when = datetime.fromtimestamp(record.ended_at or record.created_at, UTC)
    what = f"sandbox {record.id} {verb} at {when:%Y-%m-%d %H:%M:%S} UTC"
    return kind(f"{what}: {record.end_reason or 'its host process died'}; create a new one")


def not_running_error(record: SandboxRecord) -> errors.ClocheError:
    """The error for using, or pausing, a sandbox that does not run: it is paused, or it has ended."""
    if record.state != "paused":
        return sandbox_gone_error(record)
    when = datetime.fromtimestamp(record.paused_at or record.created_at, UTC)
    what = f"sandbox {record.id} is paused already, since {when:%Y-%m-%d %H:%M:%S} UTC"
    return errors.SandboxPaused(f"{what}: resume it (connect to it) to use it, or kill it")


def sandbox_not_found_error(id: str) -> errors.SandboxNotFound:
    """The same error for an id that never existed and for one of another owner."""
    return errors.SandboxNotFound(f"there is no sandbox {id!r}")


def out_of_memory_reason(limits: Limits) -> str:
    """The reason for an execution whose kernel ran out of memory. Files count, as writable space is memory."""
    memory, space, both = (
        size / MIB for size in (limits.memory_bytes, limits.space_bytes, limits.memory_and_space_bytes)
    )
    limit = f"its limit is {both:g} MiB, {memory:g} MiB and {space:g} MiB for files"
    return f"the sandbox ran out of memory: {limit}; the context's state is lost"


# How kernels end, and the error for one that ended before it was ready.

_ERRNO = re.compile(r"\[Errno (\d{1,3})\]")
_START_ERRORS: dict[int, type[errors.ClocheError]] = {
    errno.EACCES: errors.PermissionDenied,
    errno.EPERM: errors.PermissionDenied,
    errno.EROFS: errors.PermissionDenied,
    errno.ENOTDIR: errors.NotADirectory,
    errno.EEXIST: errors.NotADirectory,  # `makedirs` where a file is
    errno.ENOENT: errors.InvalidPath,  # `makedirs` where none can be made
    errno.ENOSPC: errors.NoSpace,
    errno.ENAMETOOLONG: errors.InvalidPath,
    errno.ELOOP: errors.InvalidPath,
}


class KernelExit(Struct):
    """How a kernel ended."""

    status: int = 0  # as from waitpid
    cpu_seconds: float = 0.0
    memory_peak_bytes: int = 0
    over_memory: bool = False

    @property
    def signal(self) -> int | None:
        return os.WTERMSIG(self.status) if os.WIFSIGNALED(self.status) else None

    @property
    def code(self) -> int:
        """As in a shell: 128 + signal for one that a signal ended."""
        return os.waitstatus_to_exitcode(self.status) if self.signal is None else 128 + self.signal

    def __str__(self) -> str:
        if self.signal is None:
            return f"kernel exited with code {os.waitstatus_to_exitcode(self.status)}"
        try:
            return f"kernel killed by signal {self.signal} ({signal.Signals(self.signal).name})"
        except ValueError:
            return f"kernel killed by signal {self.signal}"


def kernel_start_error(exit: KernelExit, said: str) -> errors.ClocheError:
    """The error from init's fork, which reports in one line why it could not start: see `guest.init.processes`."""
    found = _ERRNO.match(said)
    kind = _START_ERRORS.get(int(found[1]), errors.FileError) if found else errors.Unavailable
    return kind(f"the {exit} before it was ready" + (f": {said.splitlines()[-1]}" if said else ""))
