"""The interpreter below a kernel: a child process that evaluates the cells which this process receives.

It has a process group of its own, so that of the host's signals it gets those that the kernel passes on. As it ends,
so does the kernel.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence

from cloche.guest.kernel.channel import KernelChannel

_TICKS = os.sysconf("SC_CLK_TCK")


class InterpreterProcess:
    """A running interpreter. `handed`: its descriptors, number inside -> descriptor here; the latter are closed."""

    def __init__(
        self, command: Sequence[str], handed: Mapping[int, int], stdin: int, stderr: int | None = None
    ) -> None:
        for number, fd in handed.items():
            os.dup2(fd, number)
        self._process = subprocess.Popen(
            command, stdin=stdin, stderr=stderr, pass_fds=list(handed), preexec_fn=os.setpgrp
        )
        for number in handed:
            os.close(number)
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)

    def follow(self) -> None:
        """Ends this process as the interpreter, which has ended, did."""
        status = self._process.wait()
        if status < 0:
            signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
            os.kill(os.getpid(), -status)
        os._exit(status)

    def await_frame(self, channel: KernelChannel) -> None:
        """Until the host says something. Should the interpreter end meanwhile, so do we."""
        poll = select.poll()
        poll.register(channel.fileno(), select.POLLIN)
        poll.register(self.pidfd, select.POLLIN)
        while not channel.has_frame:
            ready = {fd for fd, _ in poll.poll()}
            if self.pidfd in ready:
                self.follow()
            if channel.fileno() in ready:
                return

    def set_oom_score(self, value: bytes) -> None:
        """Sets its OOM score: an interpreter that executes is killed first when memory is short."""
        try:
            with open(f"/proc/{self.pid}/oom_score_adj", "wb") as file:
                file.write(value)
        except OSError:
            pass

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the interpreter and of the children that it has waited for."""
        with open(f"/proc/{self.pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return sum(map(int, fields[11:15])) / _TICKS

    @property
    def peak_bytes(self) -> int:
        with open(f"/proc/{self.pid}/status") as file:
            found = [line.split()[1] for line in file if line.startswith("VmHWM:")]
        return int(found[0]) * 1024 if found else 0


def ignores_interrupts(pid: int) -> bool:
    """Whether a process ignores SIGINT. Raises OSError if it has ended."""
    with open(f"/proc/{pid}/status") as file:
        ignored = next((line.split()[1] for line in file if line.startswith("SigIgn:")), "0")
    return bool(int(ignored, 16) >> (signal.SIGINT - 1) & 1)
