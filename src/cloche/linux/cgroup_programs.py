"""All processes of a group but one, in a group of their own below it, so that they can be stopped while that one works.

Use it through `cloche.linux.cgroups`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time

from cloche.linux import cgroups_v1, cgroups_v2
from cloche.linux.cgroup_files import numbers, write

NAME = b"/programs"
FREEZE_SECONDS = 5.0  # one who waits for the kernel itself (a disk that does not answer) cannot be stopped before
_FIRST_LOOK_SECONDS = 0.0002
_LONGEST_LOOK_SECONDS = 0.01


class Switch:
    """The freezer of one group. Its file stays open: to thaw must work also where no descriptor is to be had."""

    def __init__(self, version: int, directory: bytes) -> None:
        """Raises OSError."""
        self._freezer = cgroups_v1.Freezer(directory) if version == 1 else cgroups_v2.Freezer(directory)
        self._fd = os.open(directory + self._freezer.FILE, os.O_WRONLY | os.O_CLOEXEC)

    def freeze(self) -> None:
        os.pwrite(self._fd, self._freezer.FROZEN, 0)

    def wait_until_frozen(self, deadline: float) -> None:
        """Raises OSError, TimeoutError in particular."""
        pause_seconds = _FIRST_LOOK_SECONDS
        while not self._freezer.frozen():
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, f"some did not stand still within {FREEZE_SECONDS:.0f} s")
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _LONGEST_LOOK_SECONDS)

    def thaw(self) -> None:
        """And closes it. A group that is gone has nobody to thaw."""
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, self._freezer.THAWED, 0)
        os.close(self._fd)


class Programs:
    """`directory` is the group's in the hierarchy of the freezer, which in version 1 holds no other controller."""

    def __init__(self, version: int, directory: bytes) -> None:
        self._version = version
        self._whole = directory
        self.directory = directory + NAME
        self._frozen: Switch | None = None

    def freeze(self, awake_pid: int) -> None:
        """Stops all but that one, and returns when they stand still: all since the same moment.

        Who came since the last time is moved in, which takes 8 to 25 ms (see `cgroups`). Raises OSError, TimeoutError
        in particular: then all run as before.
        """
        deadline = time.monotonic() + FREEZE_SECONDS
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.directory, 0o755)
        switch = Switch(self._version, self.directory)
        try:
            switch.freeze()
            if self._outside(awake_pid):
                self._gather(awake_pid, deadline)
            switch.wait_until_frozen(deadline)
        except BaseException:
            switch.thaw()
            raise
        self._frozen = switch

    def _gather(self, awake_pid: int, deadline: float) -> None:
        """Moves in who is outside. All are frozen meanwhile, that one too: nobody outruns us by forking."""
        whole = Switch(self._version, self._whole)
        try:
            whole.freeze()
            whole.wait_until_frozen(deadline)
            for pid in self._outside(awake_pid):
                with contextlib.suppress(ProcessLookupError):  # it was ended meanwhile
                    write(self.directory + b"/cgroup.procs", b"%d" % pid)
        finally:
            whole.thaw()

    def _outside(self, awake_pid: int) -> list[int]:
        return [pid for pid in numbers(self._whole + b"/cgroup.procs") if pid != awake_pid]

    def thaw(self) -> None:
        """Nothing if they are not frozen."""
        switch, self._frozen = self._frozen, None
        if switch is not None:
            switch.thaw()

    def pids(self) -> list[int]:
        """Of those that were moved in, and of their children."""
        with contextlib.suppress(FileNotFoundError):
            return numbers(self.directory + b"/cgroup.procs")
        return []
