"""Paths and ports inside a sandbox, for the host, which sets them up, and for programs inside."""

from __future__ import annotations

USER_BASE = "/home/user/.local"  # what programs install
DOOR_PORT = 49980  # on the loopback: see `door`
HOST_DIRECTORY = "/opt/cloche/host"  # where a sandbox with a kernel of its own finds sockets of the host's
HOST_SOCKET = HOST_DIRECTORY + "/sock"
STANDALONE_ORDER = "/opt/cloche/standalone.json"
STANDALONE_FILTER = "/opt/cloche/standalone.bpf"

SHARED_FILES_ID = 4095
"""In a nursery, the owner of files that all of its sandboxes see: these cannot lock them (`linux/lock_guard.py`)."""
