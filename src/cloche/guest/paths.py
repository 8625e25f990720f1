"""Where things are in a sandbox, for both sides: the host puts them there, and programs inside look for them."""

from __future__ import annotations

USER_BASE = "/home/user/.local"  # what programs install
DOOR_PORT = 49980  # on the loopback: see `door`
