"""uv's query of the interpreter before an installation, done once in the nursery for all sandboxes.

It is half the time of an installation from the host's cache. uv keeps the answer in its cache: the nursery's
is in a place that sandboxes can only read, and each takes a copy (see `bin/uv.py`).
"""

from __future__ import annotations

import contextlib
import os
import time

from cloche.guest.paths import SHARED_FILES_ID
from cloche.linux import mounts, syscalls

WARM_CACHE = "/opt/cloche/warm"
UV = "/opt/cloche/uv"
PYTHON = "/opt/cloche/env/bin/python"
_PATIENCE_SECONDS = 5.0
_CHANNEL = 3  # the zygote's own, and nobody else's
_SEALED = mounts.MS_NOSUID | mounts.MS_NODEV | mounts.MS_NOEXEC | mounts.MS_RDONLY | mounts.MS_BIND | mounts.MS_REMOUNT


class UvWarmup:
    """Runs beside the imports. A nursery without a package index for its sandboxes has no such place."""

    def __init__(self, env: dict) -> None:
        self._pid = 0
        if os.path.isdir(WARM_CACHE) and os.access(UV, os.X_OK):
            self._pid = _start_uv({**env, "HOME": "/tmp", "UV_CACHE_DIR": WARM_CACHE, "UV_OFFLINE": "1"})

    def finish(self) -> None:
        """Seals the cache before the first sandbox is made."""
        if os.path.isdir(WARM_CACHE):
            if self._pid and not _has_ended(self._pid):
                os.kill(self._pid, 9)
                os.waitpid(self._pid, 0)
            _give_away(WARM_CACHE)
            syscalls.mount("none", WARM_CACHE, "", _SEALED)


def _give_away(directory: str) -> None:
    """Gives the files to the id whose files no sandbox can lock. With fewer ids there is no such guard."""
    with contextlib.suppress(OSError):
        for path, directories, names in os.walk(directory):
            for name in [".", *directories, *names]:
                os.chown(f"{path}/{name}", SHARED_FILES_ID, -1, follow_symlinks=False)


def _start_uv(env: dict) -> int:
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
