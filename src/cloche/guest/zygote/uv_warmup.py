"""What uv asks an interpreter before it installs anything, asked once in the nursery instead of in every sandbox.

It is half of what an installation from the host's cache takes. uv keeps the answer in its cache: of the nursery's, in a
place of which sandboxes can only read, each takes a copy (see `uv.py`).
"""

from __future__ import annotations

import os
import time

from cloche.linux import mounts, syscalls

PLACE = "/opt/cloche/warm"
UV = "/opt/cloche/uv"
PYTHON = "/opt/cloche/env/bin/python"
_PATIENCE_SECONDS = 5.0
_CHANNEL = 3  # the zygote's own, and nobody else's
_SEALED = mounts.MS_NOSUID | mounts.MS_NODEV | mounts.MS_NOEXEC | mounts.MS_RDONLY | mounts.MS_BIND | mounts.MS_REMOUNT


class UvWarmup:
    """Goes on beside the imports. In a nursery whose sandboxes have no package index there is no such place."""

    def __init__(self, env: dict) -> None:
        self._pid = 0
        if os.path.isdir(PLACE) and os.access(UV, os.X_OK):
            self._pid = _start({**env, "HOME": "/tmp", "UV_CACHE_DIR": PLACE, "UV_OFFLINE": "1"})

    def finish(self) -> None:
        """Before the first sandbox is made: nobody writes there any more."""
        if os.path.isdir(PLACE):
            if self._pid and not _has_ended(self._pid):
                os.kill(self._pid, 9)
                os.waitpid(self._pid, 0)
            syscalls.mount("none", PLACE, "", _SEALED)


def _start(env: dict) -> int:
    words = ["uv", "python", "find", "--no-project", PYTHON]
    silent = [(os.POSIX_SPAWN_OPEN, fd, "/dev/null", os.O_RDWR, 0) for fd in (0, 1, 2)]
    return os.posix_spawn(UV, words, env, file_actions=[*silent, (os.POSIX_SPAWN_CLOSE, _CHANNEL)])


def _has_ended(pid: int) -> bool:
    until = time.monotonic() + _PATIENCE_SECONDS
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True
