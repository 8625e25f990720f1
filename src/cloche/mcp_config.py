"""How much clients of the Model Context Protocol may have of a server."""

from __future__ import annotations

from cloche import errors
from cloche.structs import Struct


class Mcp(Struct):
    """`/mcp`: see `cloche.mcp`."""

    idle_seconds: float = 1800.0  # without a request, after which a session and its sandboxes end
    sessions_per_owner: int = 64
    origins: tuple[str, ...] = ()  # of web pages that may speak to it, like https://inspector.example.com

    def __post_init__(self) -> None:
        for name in ("idle_seconds", "sessions_per_owner"):
            if not 0 < getattr(self, name) < float("inf"):
                raise errors.InvalidRequest(f"mcp.{name} must be a positive number, not {getattr(self, name)}")
