"""How kernels end, and what that says about one that never came to its work."""

from __future__ import annotations

import errno
import os
import re
import signal

from cloche import errors
from cloche.model import Struct

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
        """As a shell says it: 128 + signal for one that a signal ended."""
        return os.waitstatus_to_exitcode(self.status) if self.signal is None else 128 + self.signal

    def __str__(self) -> str:
        if self.signal is None:
            return f"kernel exited with code {os.waitstatus_to_exitcode(self.status)}"
        try:
            return f"kernel killed by signal {self.signal} ({signal.Signals(self.signal).name})"
        except ValueError:
            return f"kernel killed by signal {self.signal}"


def failed_start(exit: KernelExit, said: str) -> errors.ClocheError:
    """Init's fork says in one line why it could not go where it was sent: see `guest.processes`."""
    found = _ERRNO.match(said)
    kind = _START_ERRORS.get(int(found[1]), errors.FileError) if found else errors.Unavailable
    return kind(f"the {exit} before it was ready" + (f": {said.splitlines()[-1]}" if said else ""))
