"""Paths and ports inside a sandbox, for the host, which sets them up, and for programs inside."""

from __future__ import annotations

USER_BASE = "/home/user/.local"  # what programs install
DOOR_PORT = 49980  # on the loopback: see `door`
