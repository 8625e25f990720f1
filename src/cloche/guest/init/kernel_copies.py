"""Copies that kernels fork of themselves, as init registers them: see "branch" in `cloche.guest.wire`.

Such a copy is the child of the kernel that it is a copy of, so init sees its end by a pidfd, and only that
kernel can tell how it ended. (`/proc` would tell too, but not across Landlock domains.) When the kernel that
forked it has gone first, the copy is init's own child, and reaped like any.
"""

from __future__ import annotations

import os
import select

from cloche.guest.init.children import ChildProcess
from cloche.guest.init.processes import UnknownKernel

_PARENT, _GROUP, _SESSION = 1, 2, 3  # in /proc/PID/stat, behind the name


class NotAKernelCopy(ValueError):
    """The process that a kernel names as its copy is none."""

    code = "invalid_request"


class KernelCopies:
    def __init__(self, processes, identities, watch_fd, event):
        self._processes = processes
        self._identities = identities
        self._watch_fd = watch_fd
        self._event = event

    def verb_handlers(self) -> dict:
        return {"kernel_branched": self.register_copy}

    def register_copy(self, header: dict, _: bytes) -> dict:
        """Registers that process as a kernel.

        A program has named it, so it is checked to be the copy that it is said to be.
        """
        origin, pid = self._processes.kernel(header["of"]), header["pid"]
        if origin is None:
            raise UnknownKernel(f"no kernel {header['of']!r}")
        if type(pid) is not int or pid < 2:
            raise NotAKernelCopy(f"{pid!r} is no process")
        pidfd = os.pidfd_open(pid)  # first: whatever the number stands for later, this is one process
        try:
            self._check_copy(pid, origin)
        except BaseException:
            os.close(pidfd)
            raise
        child = ChildProcess(header["kernel"], pid, origin.command, origin.user, origin.cwd)
        self._processes.register_kernel(child)
        self._watch_fd(pidfd, select.POLLIN, lambda: self._on_end(child, pidfd))
        return {}

    def _check_copy(self, pid: int, origin: ChildProcess) -> None:
        fields = _stat_fields(pid)
        if not fields or [int(fields[at]) for at in (_PARENT, _GROUP, _SESSION)] != [origin.pid, pid, pid]:
            raise NotAKernelCopy(f"process {pid} is not a copy that kernel {origin.name!r} has made")
        if os.stat(f"/proc/{pid}").st_uid != self._identities.ids(origin.user)[0]:
            raise NotAKernelCopy(f"process {pid} is not {origin.user}'s")
        if self._processes.knows(pid):
            raise NotAKernelCopy(f"process {pid} has a name already")

    def _on_end(self, child: ChildProcess, pidfd: int) -> None:
        self._watch_fd(pidfd, 0, None)
        os.close(pidfd)
        fields = _stat_fields(child.pid)
        if not fields or int(fields[_PARENT]) != os.getpid():  # else we reap it, or have
            self._processes.remove_kernel(child)
        self._event({"ev": "branch_ended", "kernel": child.name})


def _stat_fields(pid: int) -> list:
    """The fields behind the name, which may hold anything; none of a process that is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []
