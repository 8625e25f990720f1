"""What init has started, as it knows it."""

from __future__ import annotations

import time

_MAX_SHOWN = 4096


class Child:
    """Something that init started and that the host knows by a name of its own."""

    def __init__(self, name: str, pid: int, command: str, user: str, cwd: str):
        self.name = name
        self.pid = pid
        self.command = command
        self.user = user
        self.cwd = cwd
        self.started_at = time.time()
        self.cpu_seconds = 0.0  # of programs that init has forked for it
        self.peak_bytes = 0

    def info(self) -> dict:
        return {
            "id": self.name,
            "pid": self.pid,
            "command": self.command[:_MAX_SHOWN],
            "user": self.user,
            "cwd": self.cwd,
            "started_at": self.started_at,
        }
